"""RankPages: presents the pages of all ranks of a replica as one rank's pages, for page movers.

Every rank holds its own heads and layers. Rank 0 maps their memory, or uses a window of one page
for ranks on a device or another machine (rank_page_access.py). A transferred page has all layers in
order and all heads of each, whatever the number of ranks, so it fits servers with other numbers of
ranks. States are cut by heads or channels. A tensor that every rank holds whole (a latent) is read
from one rank and written to all.

No call waits for a step: rank 0 reads pages whose steps are complete on all ranks, before any rank
gets a plan that may write to them (`EarlyMover`).
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.base.ids import PageId
from banyan.kv_transfer.page_mover import PageMover
from banyan.messages.disaggregation import KVTransferEvent, KVTransferOp
from banyan.messages.plan import CopyResult, Held, Lookup, PageCopy
from banyan.parallel.groups import Group
from banyan.runner.kvstore import KVStore
from banyan.runner.rank_page_access import PageLayout, RankAccess, RankMemory, own_rank_pages


@dataclass(frozen=True)
class _Part:
    """One rank's part of a tensor: bytes of its pages, and which heads they hold."""

    rows: np.ndarray
    """[num_pages, page_bytes] uint8; [1, page_bytes] for a window, which holds the current page."""
    runs: list[tuple[int, int, int]]
    """Runs of consecutive heads: (first in the whole tensor, first here, count)."""

    def of(self, page: PageId) -> np.ndarray:
        return self.rows[page if len(self.rows) > 1 else 0]


@dataclass(frozen=True)
class _Whole:
    """One tensor of one layer over all ranks. A page of it is [outer, heads, bytes]; some states
    have channels in place of heads."""

    outer: int
    heads: int
    width: int
    parts: list[_Part]

    @property
    def size_bytes(self) -> int:
        return self.outer * self.heads * self.width

    def take(self, page: PageId, into: np.ndarray) -> None:
        whole = into.reshape(self.outer, self.heads, self.width)
        for part in self.parts:
            of = part.of(page).reshape(self.outer, -1, self.width)
            for there, here, count in part.runs:
                whole[:, there : there + count] = of[:, here : here + count]

    def put(self, page: PageId, payload: np.ndarray) -> None:
        whole = payload.reshape(self.outer, self.heads, self.width)
        for part in self.parts:
            of = part.of(page).reshape(self.outer, -1, self.width)
            for there, here, count in part.runs:
                of[:, here : here + count] = whole[:, there : there + count]


class RankPages:
    """Satisfies `kv_transfer.page_mover.Pages`, on rank 0.

    Args:
        store: of rank 0.
        rank_access: to the pages of the other ranks, in their order.
        is_by_head: a page holds one head after another; else one token after another.
        timeout_s: time limit for another rank's reply.
        is_by_name: order pages by tensor name, then layer; else by layer.

    Raises:
        DeviceError: a rank does not publish its pages in time.
        ConfigError: the ranks' parts of a layer do not cover the whole tensor.
    """

    def __init__(
        self,
        store: KVStore,
        rank_access: Sequence[RankAccess],
        is_by_head: bool,
        timeout_s: float,
        is_by_name: bool = False,
    ) -> None:
        self.groups = store.groups
        ranks = [own_rank_pages(store), *(access.open(timeout_s) for access in rank_access)]
        self._windows = [rank.window for rank in ranks if rank.window is not None]
        self._lock = Lock()
        self.page_layouts = [page_layout for rank in ranks for page_layout in rank.page_layouts]
        held: dict[tuple[int, str], list[tuple[PageLayout, np.ndarray]]] = {}
        for rank in ranks:
            for page_layout in rank.page_layouts:
                found = held.setdefault((page_layout.layer, page_layout.name), [])
                found.append((page_layout, self._rows(rank, page_layout)))
        self._wholes: list[list[_Whole]] = [[] for _ in self.groups]
        names = list(dict.fromkeys(name for _, name in held))
        order = {key: (key[0], names.index(key[1])) for key in held}
        for layer, name in sorted(held, key=lambda key: order[key][:: -1 if is_by_name else 1]):
            group = held[layer, name][0][0].group
            outer = 1 if is_by_head else self.groups[group].page_size
            self._wholes[group].append(_whole(held[layer, name], outer))

    def page_bytes(self, group: int) -> int:
        return sum(whole.size_bytes for whole in self._wholes[group])

    def take(self, group: int, page: PageId) -> np.ndarray:
        """The bytes of a page over all ranks: layers in order, tensors as declared (but see
        `is_by_name`), all heads."""
        payload, at = np.empty(self.page_bytes(group), np.uint8), 0
        with self._lock:
            self._move(False, group, page)
            for whole in self._wholes[group]:
                whole.take(page, payload[at : at + whole.size_bytes])
                at += whole.size_bytes
        return payload

    def put(self, group: int, page: PageId, payload: np.ndarray) -> None:
        """Fill a page on every rank. Nothing else may use the page meanwhile."""
        at = 0
        with self._lock:
            for whole in self._wholes[group]:
                whole.put(page, payload[at : at + whole.size_bytes])
                at += whole.size_bytes
            self._move(True, group, page)
        assert at == len(payload)

    def _move(self, is_put: bool, group: int, page: PageId) -> None:
        """Copy between windows and their devices, on all ranks at once. Every answer is received,
        whatever fails: a leftover answer would be taken for the next page's."""
        with ExitStack() as answers:
            for window in reversed(
                self._windows
            ):  # rank 0 last: it works in this call, while the others work in parallel
                window.ask(is_put, group, page)
                answers.callback(window.wait)

    def _rows(self, rank: RankMemory, page_layout: PageLayout) -> np.ndarray:
        pages = self.groups[page_layout.group].num_pages if rank.window is None else 1
        rows = rank.memory[page_layout.at : page_layout.at + pages * page_layout.page_bytes]
        return rows.reshape(-1, page_layout.page_bytes)


def _whole(held: Sequence[tuple[PageLayout, np.ndarray]], page_outer: int) -> _Whole:
    """The whole tensor of one layer, from the ranks that have a part of it, in their order.

    Args:
        page_outer: tokens of a page, if they are the outer dimension; 1 = heads are.
    """
    first = held[0][0]
    if not first.shared:
        return _Whole(1, 1, first.page_bytes, [_Part(rows, [(0, 0, 1)]) for _, rows in held])
    outer = math.prod(first.shape[: first.axis]) * (1 if first.is_state else page_outer)
    heads = first.shape[first.axis]
    parts = [_Part(rows, _runs(page_layout)) for page_layout, rows in held]
    seen = np.zeros(heads, bool)
    for part in parts:
        for there, _, count in part.runs:
            seen[there : there + count] = True
    if not seen.all():
        raise ConfigError(
            f"layer {first.layer}: {len(held)} ranks have {seen.sum()} of {heads} heads",
            hint="leave --disaggregation-mode out, or use one rank",
        )
    here = sum(part.last - part.first for part in first.shared)
    return _Whole(outer, heads, first.page_bytes // outer // here, parts)


def _runs(page_layout: PageLayout) -> list[tuple[int, int, int]]:
    runs, there, here = list[tuple[int, int, int]](), 0, 0
    for part in page_layout.shared:
        count = part.last - part.first
        runs.append((there + part.first, here, count))
        there, here = there + part.size, here + count
    return runs


def end_together(store: KVStore, copies: list[PageCopy], ranks: Group) -> Tensor | None:
    """Synchronise ranks whose pages rank 0 moves, after a step with these copies: rank 0 may read
    or reuse pages of all ranks then, so every rank must have ended it.

    returns: a tensor to wait for, if the ranks synchronise on the device.
    """
    if not store.is_host:
        return ranks.all_reduce(torch.zeros(1, device=store.device))
    if any(copy.when == "after" for copy in copies):
        ranks.all_reduce(torch.zeros(1))
    return None


class EarlyMover:
    """Satisfies PageMover. Copies begin when rank 0 sends their plan, not when it runs it: after
    sending, other ranks may overwrite the pages that the copies read."""

    def __init__(self, mover: PageMover) -> None:
        self.inner = self._mover = mover

    @property
    def is_attached(self) -> bool:
        return self._mover.is_attached

    def begin(self, copies: list[PageCopy]) -> None:
        self._mover.start(copies)

    def start(self, copies: list[PageCopy]) -> None:
        """They have begun."""

    def look(self, lookups: list[Lookup]) -> None:
        self._mover.look(lookups)

    def execute(self, ops: list[KVTransferOp]) -> None:
        self._mover.execute(ops)

    def ended(self) -> list[CopyResult | Held | KVTransferEvent]:
        return self._mover.ended()

    def close(self) -> None:
        self._mover.close()
