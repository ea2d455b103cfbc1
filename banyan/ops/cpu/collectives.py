"""Collectives as ops of the compiled library: recorded like every other op, or run at once.

Implements `parallel.collectives.Collectives` on memory that the ranks map together; the segment
comes from `parallel/shared.py`.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from banyan.base.errors import DeviceError
from banyan.ops.cpu.library import Library

SLOT_BYTES = 1 << 20
"""Bytes that a rank puts into the segment at once; longer tensors take several rounds."""
_SPIN_NS, _CROWDED_SPIN_NS = 40_000, 2_000
"""How long a waiting rank spins before it sleeps; the second if the ranks share cores."""


class SharedMemory:
    """One rank's slot in a shared segment.

    Args:
        file: the open segment; it stays mapped and open while the slot is held.
        timeout_s: if a rank waits longer than this for another one, all ranks fail.
        is_crowded: the ranks have more threads than there are cores.

    Raises:
        DeviceError: the segment has other numbers of ranks or slots, or the slot is taken.
    """

    def __init__(
        self,
        library: Library,
        file: int,
        rank: int,
        size: int,
        timeout_s: float,
        is_crowded: bool,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self._library = library
        self._size = size
        spin_ns = _CROWDED_SPIN_NS if is_crowded else _SPIN_NS
        memory = mmap.mmap(file, segment_bytes(library, size, slot_bytes))
        view = ctypes.c_char.from_buffer(memory)
        why = ctypes.create_string_buffer(200)
        self._group = library.function("bn_shared_open")(
            ctypes.addressof(view),
            file,
            rank,
            size,
            slot_bytes,
            timeout_s,
            spin_ns,
            why,
            len(why),
        )
        if not self._group:
            raise DeviceError(f"the ranks' shared memory cannot be used: {why.value.decode()}")
        free = library.function("bn_shared_free")
        # Not at exit: the process frees the memory, and a step may still be running.
        weakref.finalize(self, _leave, free, self._group, file, view).atexit = False

    def all_reduce(self, x: Tensor) -> None:
        wide = x.float().contiguous()
        self._library.call("bn_all_reduce", len(x), self._group, wide.data_ptr(), _width(x))
        if wide is not x:  # rounded once; a recording refuses that
            x.copy_(wide)

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        rows, item = len(x), x.element_size()
        out = self._library.empty((rows, columns), x.dtype)
        room = -(-columns // self._size) * item
        self._library.call(
            "bn_all_gather",
            rows,
            self._group,
            *_rows(x),
            out.data_ptr(),
            x.shape[1] * item,
            room,
            columns * item,
        )
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        share, wide = self._share(x), x.float()
        out = self._library.empty((len(x), share))
        self._library.call(
            "bn_reduce_scatter", len(x), self._group, *_rows(wide), out.data_ptr(), share * 4
        )
        return out.to(x.dtype)

    def all_to_all(self, x: Tensor) -> Tensor:
        share = self._share(x) * x.element_size()
        out = self._library.empty(x.shape, x.dtype)
        self._library.call("bn_all_to_all", len(x), self._group, *_rows(x), out.data_ptr(), share)
        return out

    def gather_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        assert rows.is_contiguous()
        out = self._library.empty((count, x.shape[1]), x.dtype)
        self._library.call(
            "bn_gather_rows",
            count,
            self._group,
            *_rows(x),
            out.data_ptr(),
            rows.data_ptr(),
            x.shape[1] * x.element_size(),
        )
        return out

    def reduce_rows(self, x: Tensor, rows: Tensor, count: int) -> Tensor:
        wide = x.float().contiguous()
        out = self._library.empty((count, x.shape[1]))
        self._library.call(
            "bn_reduce_rows",
            len(x),
            self._group,
            wide.data_ptr(),
            out.data_ptr(),
            rows.data_ptr(),
            x.shape[1] * 4,
        )
        return out.to(x.dtype)

    def gather_columns(self, x: Tensor, columns: int, rows: Tensor, count: int) -> Tensor:
        item = x.element_size()
        out = self._library.empty((count, columns), x.dtype)
        room = -(-columns // self._size) * item
        self._library.call(
            "bn_gather_columns",
            len(x),
            self._group,
            *_rows(x),
            out.data_ptr(),
            x.shape[1] * item,
            room,
            columns * item,
            rows.data_ptr(),
        )
        return out

    def dispatch_rows(self, x: Tensor, places: Tensor, of_rank: int, rows: Tensor) -> Tensor:
        count, per_token = places.shape
        assert rows.is_contiguous() and places.is_contiguous() and places.dtype == torch.int64
        out = self._library.empty((count, x.shape[1]), x.dtype)
        self._library.call(
            "bn_dispatch_rows",
            count,
            self._group,
            *_rows(x),
            out.data_ptr(),
            rows.data_ptr(),
            places.data_ptr(),
            x.shape[1] * x.element_size(),
            of_rank,
            per_token,
        )
        return out

    def combine_rows(
        self,
        x: Tensor,
        places: Tensor,
        of_rank: int,
        rows: Tensor | None,
        count: int,
        is_apart: bool,
    ) -> Tensor:
        per_token, width = places.shape[1], x.shape[1]
        wide = x.float().contiguous()
        assert places.is_contiguous() and places.dtype == torch.int64 and len(x) == len(places)
        out = self._library.empty((count, width))
        self._library.call(
            "bn_combine_rows",
            len(x),
            self._group,
            wide.data_ptr(),
            out.data_ptr(),
            0 if rows is None else rows.data_ptr(),
            places.data_ptr(),
            width * 4 // (per_token if is_apart else 1),
            of_rank,
            per_token,
            int(is_apart),
        )
        return out.to(x.dtype)

    def broadcast(self, x: Tensor, source: int) -> None:
        self._whole("bn_broadcast", x, source)

    def send(self, x: Tensor, to: int) -> None:
        self._whole("bn_send", x, to)

    def recv(self, x: Tensor, source: int) -> None:
        self._whole("bn_recv", x, source)

    def _whole(self, op: str, x: Tensor, other: int) -> None:
        assert x.is_contiguous() and 0 <= other < self._size
        row_bytes = _width(x) * x.element_size()
        self._library.call(op, len(x), self._group, x.data_ptr(), row_bytes, other)

    def _share(self, x: Tensor) -> int:
        assert x.shape[1] % self._size == 0, f"{x.shape[1]} columns for {self._size} ranks"
        return x.shape[1] // self._size


def meet(memory: SharedMemory) -> None:
    """Wait until every rank has called this."""
    memory._library.call("bn_meet", 1, memory._group)


def segment_bytes(library: Library, size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Bytes of a segment for `size` ranks; the system allocates only the pages that are used."""
    return library.function("bn_shared_bytes")(size, slot_bytes)


def most_ranks(library: Library) -> int:
    return library.function("bn_shared_most_ranks")()


def _width(x: Tensor) -> int:
    """Elements per row."""
    width = 1
    for extent in x.shape[1:]:
        width *= extent
    return width


def _rows(x: Tensor) -> tuple[int, int]:
    """Address and stride in bytes of rows; each row must be contiguous."""
    assert x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1), f"rows lie apart: {x.stride()}"
    return x.data_ptr(), x.stride(0) * x.element_size()


def _leave(free: Callable[..., int], group: int, file: int, view: object) -> None:
    """view: keeps the memory mapped; released last."""
    free(group)
    os.close(file)
