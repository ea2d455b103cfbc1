"""Lists the weight files of a folder, safetensors or torch's, and checks that they are complete,
from the index and the headers.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.formats.mapped import MappedFile
from banyan.formats.safetensors import SafetensorsFile
from banyan.formats.torch_file import TorchFile

_MAX_INDEX_BYTES = 64 << 20
_AGAIN = "download the model again"
_AHEAD_BYTES = 2 << 30
"""About what a fast disk reads while a process loads its libraries."""
_PIECE_BYTES = 128 << 10
"""A system reads no more than its read-ahead, often this much, however much it is asked for."""
_PARALLEL_BYTES = 8 << 20
"""What one thread reads at a time."""


@dataclass(frozen=True)
class WeightFiles:
    """How a folder names its weight files: one, or several with an index."""

    single: str
    pattern: str

    def index_of(self, folder: Path) -> Path | None:
        index = folder / f"{self.single}.index.json"
        return index if index.is_file() else None


SAFETENSORS = WeightFiles("model.safetensors", "*.safetensors")
TORCH = WeightFiles("pytorch_model.bin", "pytorch_model*.bin")


def has_weights(names: Iterable[str]) -> bool:
    """Whether files of these names hold weights, other than GGUF."""
    return any(fnmatch(name, kind.pattern) for name in names for kind in (SAFETENSORS, TORCH))


def open_weight_file(path: str, is_mapped: bool = True) -> MappedFile:
    """Open a file of `weight_files`.

    Raises:
        ModelError: it is damaged, or not to be trusted.
    """
    opened = TorchFile if path.endswith(".bin") else SafetensorsFile
    return opened.open(path, is_mapped)


def weight_files(folder: str) -> list[Path]:
    """The weight files of a folder, in the order of its index if it has one: safetensors, or the
    files of torch.save if there are none.

    Raises:
        ModelError: there is none, or the index is damaged or names a file that is missing.
    """
    path = Path(folder)
    for kind in (SAFETENSORS, TORCH):
        if index := kind.index_of(path):
            return [path / name for name in dict.fromkeys(_weight_map(index).values())]
        if (path / kind.single).is_file():
            return [path / kind.single]
        if found := sorted(path.glob(kind.pattern)):
            return found
    raise ModelError(
        f"{printable(folder)!r} holds no *.safetensors file",
        hint="name a .gguf file or a folder with safetensors weights",
    )


def tensor_names(folder: str) -> list[str]:
    """Names of the tensors of a folder's safetensors files; [] if it has none.

    Raises:
        ModelError: a file is damaged or missing.
    """
    if not has_weights(os.listdir(folder)):
        return []
    names: list[str] = []
    for file in weight_files(folder):
        with open_weight_file(str(file)) as opened:
            names += opened.tensors
    return names


def size_of_weights(path: str) -> int:
    """Bytes of the weights of a file or folder, as they lie on the disk."""
    return sum(file.stat().st_size for file in files_of_weights(path))


def files_of_weights(path: str) -> list[Path]:
    """The files that hold the weights of a file or folder."""
    return [Path(path)] if os.path.isfile(path) else weight_files(path)


def read_ahead(path: str) -> None:
    """Ask the system to read the weights of a file or folder from the disk while nobody waits for
    them yet. Takes a moment per GiB; what is wrong with them, their reader will say."""
    left = _AHEAD_BYTES
    with contextlib.suppress(OSError, ModelError):
        for file in files_of_weights(path):
            with file.open("rb") as opened:
                size = min(left, os.fstat(opened.fileno()).st_size)
                for at in range(0, size, _PIECE_BYTES):
                    os.posix_fadvise(opened.fileno(), at, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
                left -= size


@contextlib.contextmanager
def parallel_reads(
    path: str,
    threads: int,
    share: int = 0,
    shares: int = 1,
    read: Callable[[int, int, int], bytes] = os.pread,
) -> Iterator[None]:
    """Read the weights of a file or folder into the system's cache with several threads, in the
    order in which they are loaded, until the block ends.

    Network disks and cloud disks give one reader a small part of their speed. At most half of the
    free memory is read, so that the first files are still there when the loader comes to them.

    Args:
        threads: 0 = read nothing.
        share, shares: the processes of this machine that load the same files read different parts.
        read: takes a descriptor, a number of bytes and an offset.
    """
    if not threads:
        yield
        return
    left = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    is_over = False

    def read_piece(file: Path, at: int) -> None:
        if is_over:
            return
        with contextlib.suppress(OSError), file.open("rb") as opened:  # the loader reports it
            read(opened.fileno(), _PARALLEL_BYTES, at)

    with ThreadPoolExecutor(threads, "read-weights") as pool:
        pieces = 0
        for file in files_of_weights(path):
            size = min(left, file.stat().st_size)
            for at in range(0, size, _PARALLEL_BYTES):
                if pieces % shares == share:
                    pool.submit(read_piece, file, at)
                pieces += 1
            left -= size
        try:
            yield
        finally:
            is_over = True


def check_weight_files(folder: str) -> None:
    """Read every header; ModelError names the file that is cut short, damaged, or lacks a tensor
    that the index promises."""
    headers: dict[str, set[str]] = {}
    for file in weight_files(folder):
        with open_weight_file(str(file)) as opened:
            headers[file.name] = set(opened.tensors)
    indexes = (kind.index_of(Path(folder)) for kind in (SAFETENSORS, TORCH))
    index = next((path for path in indexes if path is not None and headers), None)
    if index is None or not set(_weight_map(index).values()) <= set(headers):
        return
    for tensor, name in _weight_map(index).items():
        if tensor not in headers[name]:
            raise ModelError(
                f"{index.name} puts the tensor {printable(tensor)!r} into {name!r}, which lacks it",
                hint=_AGAIN,
            )


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file of the same folder."""
    size = index.stat().st_size
    if size > _MAX_INDEX_BYTES:
        raise ModelError(f"{index.name} has {size:,} bytes, limit {_MAX_INDEX_BYTES:,}")
    try:
        weight_map = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ModelError(f"{index.name} has no readable weight_map", hint=_AGAIN) from None
    for name in {str(name): name for name in weight_map.values()}.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(
                f"{index.name} names {printable(str(name))!r}, which is no file of the same folder"
            )
        if not (index.parent / name).is_file():
            raise ModelError(
                f"{index.name} names {printable(name)!r}, which is missing", hint=_AGAIN
            )
    return weight_map
