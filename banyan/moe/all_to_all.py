"""Rows that travel to the ranks of their experts in an exchange of a fixed size, which a device's
own operators make: nobody has to know how many go where, so nothing waits, and steps are captured.
"""

import torch
from torch import Tensor

from banyan.layers.build import Build
from banyan.ops.experts_api import ExchangingExperts
from banyan.parallel.groups import Groups


class Exchange:
    """
    Args:
        most: tokens of a rank in one exchange.
        has_rounds: more of them go in several, one after another.
    """

    def __init__(self, groups: Groups, most: int, has_rounds: bool) -> None:
        self._has_rounds = has_rounds
        self._rows, self._alike = groups.ffn, groups.attention
        self._ranks, self._most = groups.exchange.ranks, most

    @classmethod
    def of(cls, build: Build) -> "Exchange | None":
        is_there = build.sends_rows and build.exchanged
        return cls(build.groups, build.exchanged, build.is_fused) if is_there else None

    def _share(self, rows: int) -> int:
        """What each rank brings, in the step at hand; ranks with the same rows divide them."""
        return -(-self._rows.most_rows(rows) // self._alike.size)

    def holds(self, rows: int) -> bool:
        """The same on all ranks. rows: of this replica."""
        return self._has_rounds or self._share(rows) <= self._most

    def __call__(
        self, packed: ExchangingExperts, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """x: [tokens, dim], of this replica; ids, weights: of the router; returns [tokens, dim]."""
        rows, share, alike = len(x), self._share(len(x)), self._alike
        first, end, most = alike.rank * share, (alike.rank + 1) * share, self._most
        parts = list[Tensor]()
        for at in range(first, end, most):
            mine, count = slice(at, min(at + most, end)), min(most, end - at)
            given = (x[mine], ids[mine], weights[mine])
            parts.append(packed.exchanged(*given, self._ranks, count))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        whole = alike.all_gather(out.reshape(1, -1), alike.size * out.numel())
        return whole.view(-1, x.shape[1])[:rows]
