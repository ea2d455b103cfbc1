"""PagePool: the free pages of one group.

Every page has exactly one owner at any time: the pool (free), the pool on behalf of steps in
flight (limbo), one running request (private), or one radix node (cached). Ownership moves, it is
never shared, so the pool needs no reference counts: readers of a cached page lock its node.
"""

from collections import deque

from banyan.base.ids import PageId
from banyan.kv_cache.epochs import Epoch, EpochTracker


class PagePool:
    """Pages 1 … num_pages−1 of one group; page 0 is padding and is never given out."""

    def __init__(self, num_pages: int, epochs: EpochTracker) -> None:
        self._epochs = epochs
        self._free = [PageId(i) for i in range(num_pages - 1, 0, -1)]
        self._limbo: deque[tuple[Epoch, list[PageId]]] = deque()
        self.total = num_pages - 1
        self.limbo = 0
        """Pages that wait for their stamp."""

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[PageId]:
        """`count` pages, now the caller's. The caller has checked `free`."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        if not count:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def release(self, pages: list[PageId], epoch: Epoch) -> None:
        """Give pages back; they become free once the stamp has passed."""
        if not pages:
            return
        if self._epochs.passed(epoch):
            self._free.extend(pages)
        else:
            self._limbo.append((epoch, pages))
            self.limbo += len(pages)

    def settle(self) -> None:
        """Free the pages whose stamps have passed. Called after each completion."""
        for _ in range(len(self._limbo)):
            epoch, pages = self._limbo.popleft()
            if self._epochs.passed(epoch):
                self._free.extend(pages)
                self.limbo -= len(pages)
            else:
                self._limbo.append((epoch, pages))

    def check(self) -> None:
        """Raise AssertionError when a page is listed twice or the padding page got in."""
        pages = [*self._free, *(p for _, batch in self._limbo for p in batch)]
        assert len(set(pages)) == len(pages), "a page is free twice"
        assert 0 not in pages, "the padding page became free"
        assert self.limbo == sum(len(batch) for _, batch in self._limbo)
