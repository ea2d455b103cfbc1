"""A checkpoint file mapped read-only into memory, and the tensors its header names.

Shared by the GGUF and safetensors readers: opening, bounds, zero-copy views and checks of tensor
offsets.
"""

import errno
import mmap
import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from types import TracebackType
from typing import Self

from banyan.base.errors import ModelError
from banyan.base.log import printable

MAX_TENSORS = 250_000
"""Tensors that one file may name. The largest published models have fewer than 100,000 in all."""

MAX_DIMS = 8
"""Dimensions that one tensor may have."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first; () is a scalar."""
    type: str
    """The format's own name: "F32", "BF16", "Q4_K" …"""
    offset: int
    """First byte, counted from the start of the file."""
    size_bytes: int


class MappedFile:
    """Base of the readers. The file must not change while it is open.

    Args:
        path: a regular file.
        kind: what the file should be, for messages ("GGUF").
        is_mapped: False reads the whole file into memory instead, for file systems (some network
            ones) on which mapped pages come slowly or not at all.

    Raises:
        ModelError: the file is missing, unreadable, empty or not a regular file.
    """

    def __init__(self, path: str, kind: str, is_mapped: bool = True) -> None:
        self.path = path
        self.kind = kind
        self._is_mapped = is_mapped
        self.tensors: dict[str, TensorInfo] = {}
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise self.error("it is not a regular file", "name a file, not a folder or pipe")
            if status.st_size == 0:
                raise self.error("the file is empty", "copy or download it again")
            with open(path, "rb") as file:
                self._map = _mapped(file) if is_mapped else _copied(file, status.st_size)
        except OSError as error:
            raise self.error(
                f"cannot open it: {error.strerror}", "check the path and its permissions"
            ) from None
        self.size_bytes = len(self._map)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the mapping go; with views still in use it lives until the last of them is gone."""
        try:
            self._map.close()
        except BufferError:
            # A view keeps the map alive by itself; what was read need not stay in our memory, and
            # dropping our reference is all that is left.
            self.let_go()
            self._map = mmap.mmap(-1, 1)

    def let_go(self) -> None:
        """Take the pages of the file that were read out of this process's memory. They stay in the
        system's cache of files while that has room, and views come back to them when they are used.
        A file that was read into memory stays there."""
        if self._is_mapped and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def bytes_of(self, name: str) -> memoryview:
        """The raw bytes of one tensor, read-only and without a copy.

        Raises:
            ModelError: the file has no such tensor.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise self.error(f"it has no tensor {printable(name)!r}", "check the model's family")
        view = memoryview(self._map)[tensor.offset : tensor.offset + tensor.size_bytes]
        return view.toreadonly()

    def error(self, text: str, hint: str = "the file is damaged; download it again") -> ModelError:
        return ModelError(f"{self.kind} file {printable(self.path)!r}: {text}", hint)

    def _check_layout(self) -> None:
        """Refuse tensors that leave the file or share bytes."""
        previous: TensorInfo | None = None
        for tensor in sorted(self.tensors.values(), key=lambda t: (t.offset, t.size_bytes)):
            end = tensor.offset + tensor.size_bytes
            if end > self.size_bytes:
                raise self.error(
                    f"tensor {printable(tensor.name)!r} ends at byte {end:,}, the file has "
                    f"{self.size_bytes:,}",
                    "the file is cut short or damaged; download it again",
                )
            if previous is not None and tensor.offset < previous.offset + previous.size_bytes:
                raise self.error(
                    f"tensors {printable(previous.name)!r} and {printable(tensor.name)!r} overlap "
                    f"at byte {tensor.offset:,}"
                )
            previous = tensor


def _mapped(file: BufferedReader) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _copied(file: BufferedReader, size_bytes: int) -> mmap.mmap:
    """The bytes of the file in memory of our own; OSError when it is shorter than it was."""
    memory, done = mmap.mmap(-1, size_bytes), 0
    with memoryview(memory) as view:
        while count := file.readinto(view[done:]):
            done += count
    if done != size_bytes:
        raise OSError(errno.EIO, f"it ended after {done:,} of {size_bytes:,} bytes")
    return memory
