"""KVStore: the page tensors of one rank, as each layer declares them.

Pages are numbers here; the engine decides which request owns a page.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from banyan.base.ids import PageId
from banyan.base.os import anonymous_memory
from banyan.layers.cache_spec import LayerCache
from banyan.messages.plan import PageCopy
from banyan.model_config.model_config import STATE


def private_zeros(size_bytes: int) -> mmap.mmap:
    """Zeroed memory of this process that is allocated when written. Not in huge pages: the first
    token of a layer would then take 2 MiB."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def viewed(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over all of `memory`, which it keeps alive."""
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros, but host memory is allocated only when written; torch writes its zeros."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return viewed(private_zeros(size_bytes), shape, dtype)


Positions = TypeVar("Positions", int, np.ndarray, Tensor)


@dataclass(frozen=True)
class GroupLayout:
    """The pages of one cache group. Rank 0 decides it; every rank finds its own layers in it.

    Attributes:
        kind, window: as in `layers.cache_spec.PageGroup`; which layers belong to the group.
        page_size: tokens per page; in a STATE group the distance between checkpoints.
        num_pages: pages of the group, including the padding page 0.
    """

    kind: str
    window: int
    page_size: int
    num_pages: int

    def columns(self, length: int) -> int:
        """Entries of the page table of a request of `length` tokens."""
        return 1 if self.kind == STATE else -(-length // self.page_size)

    def column(self, positions: Positions) -> Positions:
        """Index of each position's page in the request's page table."""
        return positions * 0 if self.kind == STATE else positions // self.page_size

    def locate(self, pages: Positions, positions: Positions) -> Positions:
        """Cache locations of `positions`: page · page_size + offset; in a STATE group the page."""
        if self.kind == STATE:
            return pages
        return pages * self.page_size + positions % self.page_size

    def holds(self, cache: LayerCache) -> bool:
        return (cache.kind, cache.window) == (self.kind, self.window)


class KVStore:
    """Page tensors of one rank, by layer and name: [num_pages, page_size, …], and of a layer that
    keeps a state [num_pages, …].

    Args:
        caches: cache tensors that the layers of this rank declare.
        is_shared: rank 0 moves the pages of all ranks; it maps pages in host memory.
        stream: the stream of the steps; pages are written in its order.
        rollback_checkpoints: extra STATE pages that hold the state after each draft token, for
            rollback when drafts are rejected.

    Attributes:
        file: descriptor of the mapped memory; -1 = not mapped.
        places: layer -> name -> first byte of its pages in the file.
    """

    def __init__(
        self,
        groups: tuple[GroupLayout, ...],
        caches: Iterable[LayerCache],
        device: torch.device,
        is_shared: bool = False,
        stream: Callable[[], AbstractContextManager[object]] = nullcontext,
        rollback_checkpoints: int = 0,
    ) -> None:
        self.groups = groups
        self.rollback_checkpoints = (
            rollback_checkpoints if any(group.kind == STATE for group in groups) else 0
        )
        states = (group.num_pages for group in groups if group.kind == STATE)
        self.first_rollback_checkpoint = next(states, 0)
        """The first rollback checkpoint page; 0 without STATE groups."""
        self.caches = tuple(caches)
        self.is_host = device.type == "cpu"
        """The pages are in host memory."""
        self.is_shared = is_shared
        is_mapped = is_shared and self.is_host
        self.file = anonymous_memory("banyan-pages") if is_mapped else -1
        self.places: dict[int, dict[str, int]] = {}
        self._group_of: dict[int, int] = {}
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._maps: list[mmap.mmap] = []
        """Host memory of the pages."""
        self._bytes: dict[int, list[Tensor]] = {}
        self._on_host: dict[int, list[np.ndarray]] = {}
        """`_bytes` as numpy arrays, for host memory in the default arrangement; else empty."""
        self.device, self.stream = device, stream
        self._is_by_name = self._is_apart = self._is_arranged = False
        for cache in self.caches:
            index = next(i for i, group in enumerate(groups) if group.holds(cache))
            group = groups[index]
            tokens = () if group.kind == STATE else (group.page_size,)
            checkpoints = self.rollback_checkpoints if group.kind == STATE else 0
            self._group_of[cache.layer] = index
            self._tensors[cache.layer], self.places[cache.layer] = {}, {}
            for name, tensor in cache.tensors.items():
                shape = (group.num_pages + checkpoints, *tokens, *tensor.shape)
                if is_mapped:
                    self.places[cache.layer][name] = os.fstat(self.file).st_size
                self._tensors[cache.layer][name] = self._zeros(shape, tensor.dtype, device)

    def tensors(self, layer: int) -> Mapping[str, Tensor]:
        """Pages of one layer by the names it has declared."""
        return self._tensors[layer]

    def group_of(self, layer: int) -> int:
        """The cache group of a layer."""
        return self._group_of[layer]

    @property
    def num_layers(self) -> int:
        """One more than the number of the last layer that keeps anything."""
        return 1 + max(self._group_of, default=-1)

    def of_layers_from(self, first: int) -> "KVStore":
        """A view of the layers from `first` on, numbered from 0."""
        part = KVStore(self.groups, (), torch.device("cpu"))
        for layer, tensors in self._tensors.items():
            if layer >= first:
                part._tensors[layer - first] = tensors
                part._group_of[layer - first] = self._group_of[layer]
        return part

    def copy(self, copies: list[PageCopy], when: str) -> None:
        """Carry out the copies within the device that are marked `when` ("before" | "after"), in
        the order of the plan."""
        for copy in copies:
            if copy.when == when and copy.is_on_device:
                for pages in self._pages_of(copy.group):
                    pages[copy.dst.page].copy_(pages[copy.src.page])

    def roll_back(self, pages: Sequence[int], checkpoints: Sequence[int]) -> None:
        """Copy states from rollback checkpoint pages to `pages`."""
        targets, sources = torch.tensor(pages), torch.tensor(checkpoints)
        for group, layout in enumerate(self.groups):
            for held in self._pages_of(group) if layout.kind == STATE else ():
                held[targets] = held[sources]

    def arrange(self, is_by_name: bool, is_apart: bool) -> None:
        """Set how pages are copied between a device and the host. Call it before the first copy.

        Args:
            is_by_name: order by tensor name, then layer, instead of by layer.
            is_apart: copy each tensor separately, instead of a page in one piece.
        """
        self._is_by_name, self._is_apart, self._is_arranged = is_by_name, is_apart, True
        self._bytes.clear()
        self._on_host.clear()

    def page_bytes(self, group: int) -> int:
        """Bytes of one page over all layers and tensors of a group."""
        return sum(rows.shape[1] for rows in self._bytes_of(group))

    def take(self, group: int, page: PageId) -> np.ndarray:
        """The bytes of a page as they are now: layers in order, tensors as declared (but see
        `arrange`). On a device it waits for the work that the stream has queued."""
        if group not in self._on_host:
            rows = self._bytes_of(group)
            is_host = all(each.device.type == "cpu" for each in rows) and not self._is_arranged
            self._on_host[group] = [each.numpy() for each in rows] if is_host else []
        if on_host := self._on_host[group]:  # twice as fast as many small tensors
            return np.concatenate([rows[page] for rows in on_host])
        parts = [rows[page] for rows in self._bytes_of(group)]
        # sync: the page is read in host memory
        if self._is_apart:
            parts = [part.cpu() for part in parts]
        return torch.cat(parts).cpu().numpy() if parts else np.empty(0, np.uint8)

    def put(self, group: int, page: PageId, payload: np.ndarray) -> None:
        """Fill a page with bytes from `take`. Nothing else may use the page meanwhile."""
        at = 0
        whole = torch.from_numpy(payload if payload.flags.writeable else payload.copy())
        with torch.inference_mode(), self.stream():
            if not self._is_apart:
                whole = whole.to(self.device)  # sync: the caller may reuse the payload's memory
            for rows in self._bytes_of(group):
                rows[page] = whole[at : at + rows.shape[1]]
                at += rows.shape[1]
        assert at == len(payload)

    def _bytes_of(self, group: int) -> list[Tensor]:
        """The memory of a group's tensors: [num_pages, bytes of a page] each."""
        if group not in self._bytes:
            self._bytes[group] = [
                pages.flatten(1).view(torch.uint8) for pages in self._pages_of(group)
            ]
        return self._bytes[group]

    def _pages_of(self, group: int) -> list[Tensor]:
        held = [
            (name, pages)
            for layer, index in self._group_of.items()
            if index == group
            for name, pages in self._tensors[layer].items()
        ]
        if self._is_by_name:
            names = list(dict.fromkeys(name for name, _ in held))
            held.sort(key=lambda each: names.index(each[0]))
        return [pages for _, pages in held]

    def release(self) -> None:
        """Return the pages' memory to the system. In host memory addresses stay valid, and the
        pages read as zero; on a device the pages cannot be used before `resume`.
        """
        for pages in self._device_pages():
            pages.untyped_storage().resize_(0)
        for memory in self._maps:
            memory.madvise(mmap.MADV_DONTNEED if self.file < 0 else mmap.MADV_REMOVE)

    def resume(self) -> None:
        """Allocate released pages again, all zero. On a device their addresses change."""
        with self.stream():
            for pages in self._device_pages():
                pages.untyped_storage().resize_(pages.nbytes)
                pages.zero_()

    def _device_pages(self) -> list[Tensor]:
        if self.is_host:
            return []
        return [pages for tensors in self._tensors.values() for pages in tensors.values()]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeroed pages; host memory is allocated only when written."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or not size_bytes:
            return torch.zeros(shape, dtype=dtype, device=device)
        if self.file < 0:
            memory = private_zeros(size_bytes)
        else:
            at = os.fstat(self.file).st_size
            os.ftruncate(self.file, at + -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            memory = mmap.mmap(self.file, size_bytes, offset=at)
        self._maps.append(memory)
        return viewed(memory, shape, dtype)


_BLOCK_BYTES = 2 << 20
"""Alignment of the memory: the smallest piece that transfer engines register."""


class DeviceMemory:
    """Device memory that a transfer engine reads and writes by address.

    Satisfies `disaggregation.transfer_engine.TransferMemory`. Zeros at first.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        whole = torch.zeros(self.size_bytes + _BLOCK_BYTES, dtype=torch.uint8, device=device)
        first = -whole.data_ptr() % _BLOCK_BYTES
        self._bytes = whole[first : first + self.size_bytes]
        self.address = self._bytes.data_ptr()

    def read(self, at: int, size_bytes: int) -> np.ndarray:
        # sync: the bytes are checked in host memory
        return self._bytes[at : at + size_bytes].cpu().numpy()

    def write(self, at: int, payload: np.ndarray) -> None:
        given = torch.from_numpy(payload if payload.flags.writeable else payload.copy())
        # sync: an engine outside the stream reads them next
        self._bytes[at : at + len(payload)].copy_(given)
