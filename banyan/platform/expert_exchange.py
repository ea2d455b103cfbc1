"""Limits of a device's operators that exchange rows between the ranks of experts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

BufferFormula = Callable[[int, int, int, int, int], int]
"""(tokens, width, per_token, ranks, experts) -> bytes."""


@dataclass(frozen=True)
class Dispatch:
    """Exchanges of a fixed size: rows go to the ranks of their experts, results come back. A step
    with such exchanges can be captured as a graph.

    Attributes:
        tokens: most of one rank in an exchange.
        widths: accepted widths of a row.
        per_token: most experts of a token.
        ranks: accepted numbers of ranks.
        experts: most over all ranks.
        buffer_bytes: what an exchange needs of the buffer of the ranks' group.
        takes_weights: the weights of a token's experts travel with its row.
    """

    tokens: int
    widths: range
    per_token: int
    ranks: Sequence[int]
    experts: int
    buffer_bytes: BufferFormula
    takes_weights: bool = False

    def obstacle(self, tokens: int, width: int, per_token: int, ranks: int, experts: int) -> str:
        """Why an exchange is impossible; "" = it is possible.

        Args:
            tokens: of each rank.
            experts: of all ranks.
        """
        if not 0 < tokens <= self.tokens:
            return f"a rank sends 1 to {self.tokens} tokens at once, not {tokens}"
        if width not in self.widths:
            first, last, step = self.widths[0], self.widths[-1], self.widths.step
            each = f", a multiple of {step}" if step > 1 else ""
            return f"rows are {first} to {last} wide{each}, not {width}"
        return _expert_obstacle(self, per_token, ranks, experts)


@dataclass(frozen=True)
class FusedDispatch:
    """One operator that dispatches rows, runs the experts and combines the results.

    Attributes:
        tokens: most of one rank in a call.
        widths: accepted widths of a row.
        inners: accepted widths of gate and up together.
        per_token: most experts of a token.
        ranks: accepted numbers of ranks.
        experts: most over all ranks.
        buffer_bytes: what a call needs of the buffer of the ranks' group.
        tile: the first weight alternates so many columns of gate and of up; 0 = gate, then up.
    """

    tokens: int
    widths: range
    inners: range
    per_token: int
    ranks: Sequence[int]
    experts: int
    buffer_bytes: BufferFormula
    tile: int = 0

    def obstacle(
        self, tokens: int, width: int, inner: int, per_token: int, ranks: int, experts: int
    ) -> str:
        """Why a call is impossible; "" = it is possible. inner: of gate and up together."""
        if not 0 < tokens <= self.tokens:
            return f"a rank gives 1 to {self.tokens} tokens at once, not {tokens}"
        for name, accepted, size in (
            ("rows", self.widths, width),
            ("gates and ups together", self.inners, inner),
        ):
            if size not in accepted:
                most = f"{accepted[0]} to {accepted[-1]} wide, a multiple of {accepted.step}"
                return f"{name} are {most}, not {size}"
        return _expert_obstacle(self, per_token, ranks, experts)


def _expert_obstacle(
    limits: Dispatch | FusedDispatch, per_token: int, ranks: int, experts: int
) -> str:
    if not 0 < per_token <= min(limits.per_token, experts):
        most = min(limits.per_token, experts)
        return f"a token goes through 1 to {most} experts, not {per_token}"
    if ranks not in limits.ranks:
        return f"{ranks} ranks cannot exchange rows at once"
    if experts % ranks or experts > limits.experts:
        return (
            f"{experts} experts are not the same number on each of {ranks} ranks, and "
            f"{limits.experts} at most"
        )
    return ""
