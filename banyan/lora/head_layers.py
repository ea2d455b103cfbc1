"""Matrices of single heads beside which adapters may lie: those of latent attention that bring
queries into the latent space, and values out of it. Each head is a projection of its own.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from banyan.layers.latent_attention import HeadExpansion
from banyan.lora.targets import LoRATargets
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
        lora_targets: LoRATargets,
        ops: Ops,
    ) -> None:
        self._weight, self._tables = weight, tables
        self._lora_targets, self._ops = lora_targets, ops

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, heads, in]; returns [tokens, heads, out]."""
        out = self._weight(x)
        for head, table in enumerate(self._tables):
            self._ops.adapt(out[:, head], x[:, head], table, self._lora_targets.tokens)
        return out


def expansions(model: nn.Module) -> Iterator[tuple[str, HeadExpansion]]:
    """Every expansion of latents within a model's blocks, by name."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, HeadExpansion):
            yield name, module


def seat_heads(
    name: str, expansion: HeadExpansion, lora_targets: LoRATargets
) -> tuple[list[AdapterTable], list[AdapterTable]]:
    """Room for what adapters bring for the heads of this rank: into the latent space, and back."""
    facts, found = expansion.facts, ([], [])
    for head in range(heads_of(expansion)):
        sizes = (facts.plain_dim, facts.rank), (facts.rank, facts.value_dim)
        for side, tables, (inputs, outputs) in zip(("into", "back"), found, sizes, strict=True):
            at = f"{name}.{side}.{head}"
            if at not in lora_targets.tables:
                lora_targets.tables[at] = lora_targets.table(inputs, [outputs])
            tables.append(lora_targets.tables[at])
    return found


def wrap_heads(name: str, expansion: HeadExpansion, lora_targets: LoRATargets, ops: Ops) -> None:
    """Let adapters lie beside a filled expansion; weights that come later find the same ones."""
    assert expansion.into is not None and expansion.back is not None
    into, back = seat_heads(name, expansion, lora_targets)
    expansion.into = AdaptedHeads(expansion.into, into, lora_targets, ops)
    expansion.back = AdaptedHeads(expansion.back, back, lora_targets, ops)


def heads_of(expansion: HeadExpansion) -> int:
    """How many of them this rank has."""
    first, last = expansion.rule.span(expansion.shape[0], expansion.group)
    return (last - first) // expansion.rule.unit
