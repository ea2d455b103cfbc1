"""Agreement between replicas that must step together (expert parallelism, DP attention)."""

from typing import Protocol


class Lockstep(Protocol):
    """Asked before every launch; the answer is the same on all replicas."""

    def agree(self, tokens: int) -> list[int]:
        """Tell this replica's token count for the next step; token counts of all replicas.

        When any of them is above 0, every replica runs a step, with no rows where it has no work.
        """
        ...
