"""Stamps: when a page that was let go may be given to somebody else (rule R1 of the border).

Steps complete in the order of their launch. A stamp names everything that was in flight when a
page was released; once all of it is complete, nothing can still read or write that page.
"""

from dataclasses import dataclass

from banyan.base.ids import NO_STEP, StepId


@dataclass(frozen=True)
class Epoch:
    step: StepId
    copies: tuple[int, ...] = ()


NEVER_USED = Epoch(NO_STEP)


class EpochTracker:
    """Which steps and copies are in flight."""

    def __init__(self) -> None:
        self.launched = NO_STEP
        self.completed = NO_STEP
        self.open_copies: dict[int, None] = {}
        """Copies within the device: they may still read what was let go."""
        self.open_loads: dict[int, None] = {}
        """Copies from the store. Their pages are nobody else's, so no stamp names them."""
        self._last_copy = 0

    def new_copy(self) -> int:
        """A number that no copy had before."""
        self._last_copy += 1
        return self._last_copy

    def open_copy(self) -> int:
        """The number of a new copy within the device."""
        copy_id = self.new_copy()
        self.open_copies[copy_id] = None
        return copy_id

    def now(self) -> Epoch:
        """Epoch for something released at this moment."""
        return Epoch(self.launched, tuple(self.open_copies))

    def passed(self, epoch: Epoch) -> bool:
        """Whether everything that the stamp names is complete."""
        return epoch.step <= self.completed and not any(
            copy in self.open_copies for copy in epoch.copies
        )

    @property
    def is_clear(self) -> bool:
        """Nothing is in flight that will give pages back: no step, no copy."""
        is_over = self.launched == self.completed
        return is_over and not self.open_copies and not self.open_loads
