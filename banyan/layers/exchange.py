"""Rows that travel to the ranks of their experts in an exchange of a fixed size, which a device's
own operators make: nobody has to know how many go where, so nothing waits, and steps are captured.
"""

from torch import Tensor

from banyan.layers.build import Build
from banyan.ops.experts_api import ExchangingExperts
from banyan.parallel.groups import Groups


class Exchange:
    """
    Args:
        most: tokens of a rank in one exchange.
    """

    def __init__(self, groups: Groups, most: int) -> None:
        self._rows, self._alike = groups.ffn, groups.attention
        self._ranks, self._most = groups.exchange.ranks, most

    @classmethod
    def of(cls, build: Build) -> "Exchange | None":
        is_there = build.sends_rows and build.exchanged
        return cls(build.groups, build.exchanged) if is_there else None

    def _share(self, rows: int) -> int:
        """What each rank brings, in the step at hand; ranks with the same rows divide them."""
        return -(-self._rows.most_rows(rows) // self._alike.size)

    def holds(self, rows: int) -> bool:
        """The same on all ranks. rows: of this replica."""
        return self._share(rows) <= self._most

    def __call__(
        self, packed: ExchangingExperts, x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """x: [tokens, dim], of this replica; ids, weights: of the router; returns [tokens, dim]."""
        rows, share, alike = len(x), self._share(len(x)), self._alike
        mine = slice(alike.rank * share, (alike.rank + 1) * share)
        out = packed.exchanged(x[mine], ids[mine], weights[mine], self._ranks, share)
        whole = alike.all_gather(out.reshape(1, -1), alike.size * out.numel())
        return whole.view(-1, x.shape[1])[:rows]
