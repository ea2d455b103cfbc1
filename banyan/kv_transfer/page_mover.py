"""Mover: copies pages between the device and a store, on its own threads.

Every copy and lookup ends once, and `ended` returns its result. A page that cannot be read or
written is a failed copy. Only the first error of each kind is logged, so that a store that is gone
does not fill the log.
"""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from banyan.base.ids import PageId
from banyan.base.log import logger
from banyan.kv_transfer.store import Damaged, Missing, Store
from banyan.messages.disaggregation import KVTransferEvent, KVTransferOp
from banyan.messages.plan import DEVICE, PEER, STORE, CopyResult, Held, Lookup, PageCopy

log = logger(__name__)

_REPORTED_AT_ONCE = 16
"""Pages whose arrival is reported together, since each report wakes the engine."""
_GRACE_S = 0.3
"""Time for a thread to finish its current page when the engine ends."""
LOOKED_UP, READ, WRITTEN = "looked up", "read", "written"
_INSTEAD = {
    LOOKED_UP: "prompts are computed instead",
    READ: "their tokens are computed instead",
    WRITTEN: "they are not kept",
}


class Pages(Protocol):
    """The pages on the device (runner/kvstore.py, runner/rank_pages.py)."""

    @property
    def groups(self) -> Sequence[object]: ...
    def page_bytes(self, group: int) -> int: ...
    def take(self, group: int, page: PageId) -> np.ndarray: ...
    def put(self, group: int, page: PageId, payload: np.ndarray) -> None: ...


class PageMover(Protocol):
    """Copies pages to and from places outside the device. Everything that begins ends once."""

    @property
    def is_attached(self) -> bool:
        """Whether there is a place to copy pages to."""
        ...

    def start(self, copies: list[PageCopy]) -> None:
        """Begin the copies that leave or enter the device, in order. Returns once the bytes of
        leaving pages are read, so the pages may be reused."""
        ...

    def look(self, lookups: list[Lookup]) -> None: ...
    def execute(self, ops: list[KVTransferOp]) -> None: ...
    def ended(self) -> list[CopyResult | Held | KVTransferEvent]:
        """Everything that has ended since the last call."""
        ...

    def close(self) -> None: ...


class TransferWorker(Protocol):
    """Runs functions one after another, outside the calling thread."""

    def do(self, work: Callable[[], None]) -> None: ...
    def close(self) -> None: ...
    def join(self, timeout_s: float) -> bool:
        """Wait for the current function; whether it has ended."""
        ...


class Mover:
    """
    Args:
        pages: in the host's memory.
        store: None = none is attached yet; copies to and from it fail.
        wake: called from the threads whenever something has ended.
        open_lane: opens the lanes for lookups, reads and writes.
    """

    def __init__(
        self,
        pages: Pages,
        store: Store | None,
        wake: Callable[[], None],
        open_worker: Callable[[str], TransferWorker] | None = None,
    ) -> None:
        self._pages = pages
        self._wake = wake
        self._open_worker: Callable[[str], TransferWorker] = open_worker or _WorkerThread
        self._ended: SimpleQueue[CopyResult | Held | KVTransferEvent] = SimpleQueue()
        self._transfers: _StoreTransfers | None = None
        if store is not None:
            self.attach(store)

    @property
    def is_attached(self) -> bool:
        """Whether there is a store."""
        return self._transfers is not None

    def page_bytes(self) -> list[int]:
        """Size of one page of each group."""
        return [self._pages.page_bytes(group) for group in range(len(self._pages.groups))]

    def attach(self, store: Store) -> None:
        """Use `store`, which nothing else uses. No copy is running."""
        assert self._transfers is None
        self._transfers = _StoreTransfers(self._pages, store, self._end, self._open_worker)

    def detach(self) -> None:
        """Close the store. Queued copies are dropped, without a result."""
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            transfers.close()

    def start(self, copies: list[PageCopy]) -> None:
        """Begin the copies to and from the store, in order. Returns once the bytes of pages that
        go to the store are read."""
        transfers = self._transfers
        if transfers is not None:
            transfers.start(copies)
        elif failed := [copy.id for copy in copies if not copy.is_on_device]:
            self._end(CopyResult(ids=[], failed=failed))

    def look(self, lookups: list[Lookup]) -> None:
        """Answer lookups, in order."""
        transfers = self._transfers
        for lookup in lookups:
            if transfers is None:
                self._end(Held(lookup.id, 0))
            else:
                transfers.look(lookup)

    def execute(self, ops: list[KVTransferOp]) -> None:
        """A store has no KV transfers."""
        assert not ops

    def ended(self) -> list[CopyResult | Held | KVTransferEvent]:
        """What has ended since the last call."""
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        """End the threads. Queued copies are dropped; a thread that hangs is abandoned."""
        self.detach()

    def _end(self, result: CopyResult | Held) -> None:
        self._ended.put(result)
        self._wake()


class PairMover:
    """Satisfies PageMover: copies to and from another server go through one mover, those to and
    from a store through another."""

    is_attached = True

    def __init__(self, peers: PageMover, store: Mover) -> None:
        self.store = store
        self._peers = peers

    def start(self, copies: list[PageCopy]) -> None:
        to_peers = [copy for copy in copies if PEER in (copy.src.tier, copy.dst.tier)]
        to_store = [copy for copy in copies if STORE in (copy.src.tier, copy.dst.tier)]
        self._peers.start(to_peers)
        self.store.start(to_store)

    def look(self, lookups: list[Lookup]) -> None:
        self.store.look(lookups)

    def execute(self, ops: list[KVTransferOp]) -> None:
        self._peers.execute(ops)

    def ended(self) -> list[CopyResult | Held | KVTransferEvent]:
        return [*self._peers.ended(), *self.store.ended()]

    def close(self) -> None:
        self._peers.close()
        self.store.close()


class _StoreTransfers:
    """Copies to and from one store. `end` is called from its threads."""

    def __init__(
        self,
        pages: Pages,
        store: Store,
        end: Callable[[CopyResult | Held], None],
        open_worker: Callable[[str], TransferWorker],
    ) -> None:
        self._pages = pages
        self._store = store
        self._end = end
        self._groups = len(pages.groups)
        self._warned: dict[str, None] = {}
        self._workers = [open_worker(name) for name in ("store-look", "store-read", "store-write")]

    def start(self, copies: list[PageCopy]) -> None:
        _, read, write = self._workers
        taken: list[tuple[PageCopy, np.ndarray]] = []
        wanted: list[PageCopy] = []
        refused: list[int] = []
        for copy in copies:
            if copy.is_on_device:
                continue
            if copy.src.tier == DEVICE and copy.when == "before":
                taken.append((copy, self._pages.take(copy.group, copy.src.page)))
            elif copy.dst.tier == DEVICE and copy.when == "before":
                wanted.append(copy)
            else:
                refused.append(copy.id)
        if refused:
            self._end(CopyResult(ids=[], failed=refused))
        if taken:
            write.do(lambda: self._write(taken))
        for first in range(0, len(wanted), _REPORTED_AT_ONCE):
            read.do(lambda some=wanted[first : first + _REPORTED_AT_ONCE]: self._read(some))

    def look(self, lookup: Lookup) -> None:
        self._workers[0].do(lambda: self._look(lookup))

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        if all([worker.join(_GRACE_S) for worker in self._workers]):
            self._store.close()  # else a thread still uses it

    def _look(self, lookup: Lookup) -> None:
        count = 0
        try:
            for key in lookup.keys:
                if not all(self._store.has(_name(g, key)) for g in range(self._groups)):
                    break
                count += 1
        except Exception as error:
            self._warn_once(LOOKED_UP, error)
        self._end(Held(lookup.id, count))

    def _read(self, copies: list[PageCopy]) -> None:
        began = time.perf_counter()
        ids, failed = list[int](), list[int]()
        for copy in copies:
            (ids if self._has_read(copy) else failed).append(copy.id)
        self._end(CopyResult(ids, failed, time.perf_counter() - began if ids else 0.0))

    def _has_read(self, copy: PageCopy) -> bool:
        try:
            payload = np.frombuffer(self._store.read(_name(copy.group, copy.src.key)), np.uint8)
            wanted = self._pages.page_bytes(copy.group)
            if len(payload) != wanted:
                raise Damaged(f"a page of {len(payload)} bytes, not {wanted}")
            self._pages.put(copy.group, copy.dst.page, payload)
        except Missing:
            return False
        except Exception as error:
            self._warn_once(READ, error)
            return False
        return True

    def _write(self, pages: list[tuple[PageCopy, np.ndarray]]) -> None:
        ids, failed = list[int](), list[int]()
        for copy, payload in pages:
            try:
                self._store.write(_name(copy.group, copy.dst.key), payload.data)
                ids.append(copy.id)
            except Exception as error:
                self._warn_once(WRITTEN, error)
                failed.append(copy.id)
        self._end(CopyResult(ids, failed))

    def _warn_once(self, what: str, error: Exception) -> None:
        kind = f"{what} {type(error).__name__}"
        if kind not in self._warned:
            self._warned[kind] = None
            log.warning(
                "pages of the cache store cannot be %s (%s: %s); %s, and this is not logged again",
                what,
                type(error).__name__,
                error,
                _INSTEAD[what],
            )


class _WorkerThread:
    """A TransferWorker that is a thread."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def close(self) -> None:
        self._is_closed = True
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if not self._is_closed:
                work()


def _name(group: int, key: bytes) -> bytes:
    return bytes((group,)) + key
