"""PagePool: the free pages of one group. Epochs: when a released page may be reused (rule R1).

Every page has exactly one owner at any time: the pool (free), the pool on behalf of steps in flight
(limbo), one running request (private), or one radix node (cached). Ownership moves and is never
shared, so the pool needs no reference counts: readers of a cached page lock its node.
"""

from collections import deque
from dataclasses import dataclass

from banyan.base.ids import NO_STEP, PageId, StepId


@dataclass(frozen=True)
class Epoch:
    """The step and the copies that were in flight when a page was released.

    Steps complete in the order of their launch. Once the step and all copies of an epoch are
    complete, nothing can read or write the page any more.
    """

    step: StepId
    copies: tuple[int, ...] = ()


NEVER_USED = Epoch(NO_STEP)
"""Epoch of a page that no step has used: free at once."""


class EpochTracker:
    """Which steps and copies are in flight."""

    def __init__(self) -> None:
        self.launched = NO_STEP
        self.completed = NO_STEP
        self.open_copies: dict[int, None] = {}
        """Copies within the device: they may still read released pages."""
        self.open_loads: dict[int, None] = {}
        """Copies from a store or peer. Nothing else uses their pages, so epochs omit them."""
        self._last_copy = 0

    def new_copy(self) -> int:
        """A new copy id."""
        self._last_copy += 1
        return self._last_copy

    def open_copy(self) -> int:
        """The id of a new copy within the device, now in flight."""
        copy_id = self.new_copy()
        self.open_copies[copy_id] = None
        return copy_id

    def now(self) -> Epoch:
        """The epoch of a page that is released now."""
        return Epoch(self.launched, tuple(self.open_copies))

    def has_passed(self, epoch: Epoch) -> bool:
        """Whether everything in the epoch is complete."""
        return epoch.step <= self.completed and not any(
            copy in self.open_copies for copy in epoch.copies
        )

    @property
    def is_clear(self) -> bool:
        """Nothing is in flight, so no page will become free by waiting."""
        is_over = self.launched == self.completed
        return is_over and not self.open_copies and not self.open_loads


class PagePool:
    """Pages 1 … num_pages−1 of one group; page 0 is padding and is never given out."""

    def __init__(self, num_pages: int, epochs: EpochTracker) -> None:
        self._epochs = epochs
        self._free = [PageId(i) for i in range(num_pages - 1, 0, -1)]
        self._limbo: deque[tuple[Epoch, list[PageId]]] = deque()
        self.total = num_pages - 1
        self.limbo = 0
        """Pages that wait for their epoch to pass."""

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
        """Give pages back; they become free once the epoch has passed."""
        if not pages:
            return
        if self._epochs.has_passed(epoch):
            self._free.extend(pages)
        else:
            self._limbo.append((epoch, pages))
            self.limbo += len(pages)

    def settle(self) -> None:
        """Free the pages whose epochs have passed. Called after each completion."""
        for _ in range(len(self._limbo)):
            epoch, pages = self._limbo.popleft()
            if self._epochs.has_passed(epoch):
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
