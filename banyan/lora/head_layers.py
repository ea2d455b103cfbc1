"""Matrices of single heads beside which adapters may lie: those of latent attention that bring
queries into the latent space, and values out of it. Each head is a projection of its own.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from banyan.layers.latent_attention import HeadExpansion
from banyan.lora.targets import AdapterSeats
from banyan.ops.api import Ops
from banyan.ops.lora import AdapterTable
from banyan.ops.packed import PackedHeadLinear


class AdaptedHeads:
    """A packed matrix per head with the adapters beside it.

    Args:
        tables: by head.
    """

    def __init__(
        self,
        weight: PackedHeadLinear,
        tables: Sequence[AdapterTable],
        seats: AdapterSeats,
        ops: Ops,
    ) -> None:
        self._weight, self._tables = weight, tables
        self._seats, self._ops = seats, ops

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, in]; returns [tokens, heads, out]."""
        out = self._weight(x)
        for head, table in enumerate(self._tables):
            self._ops.adapt(out[:, head], x[:, head], table, self._seats.tokens)
        return out


def expansions(model: nn.Module) -> Iterator[tuple[str, HeadExpansion]]:
    """Every expansion of latents within a model's blocks, by name."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, HeadExpansion):
            yield name, module


def seat_heads(
    name: str, expansion: HeadExpansion, seats: AdapterSeats
) -> tuple[list[AdapterTable], list[AdapterTable]]:
    """Room for what adapters bring for the heads of this rank: into the latent space, and back."""
    facts, found = expansion.facts, ([], [])
    for head in range(heads_of(expansion)):
        sizes = (facts.plain_dim, facts.rank), (facts.rank, facts.value_dim)
        for side, tables, (inputs, outputs) in zip(("into", "back"), found, sizes, strict=True):
            at = f"{name}.{side}.{head}"
            if at not in seats.tables:
                seats.tables[at] = seats.table(inputs, [outputs])
            tables.append(seats.tables[at])
    return found


def wrap_heads(name: str, expansion: HeadExpansion, seats: AdapterSeats, ops: Ops) -> None:
    """Let adapters lie beside a filled expansion; weights that come later find the same ones."""
    assert expansion.into is not None and expansion.back is not None
    into, back = seat_heads(name, expansion, seats)
    expansion.into = AdaptedHeads(expansion.into, into, seats, ops)
    expansion.back = AdaptedHeads(expansion.back, back, seats, ops)


def heads_of(expansion: HeadExpansion) -> int:
    """How many of them this rank has."""
    first, last = expansion.rule.span(expansion.shape[0], expansion.group)
    return (last - first) // expansion.rule.unit
