"""LoRATargets: the tables of adapter matrices of a rank, one per layer that adapters can change."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.layers.weight_slot import WeightSlot
from banyan.ops.lora import AdapterStack, AdapterTable, AdapterTokens, ExpertTable, RowTable

EMBEDDING, HEAD, GAINS = "embed_tokens", "lm_head", "DoRA"
"""Kinds of changes besides plain projections, as named in lora/adapter_config.py."""
HEADS = ("head", "head.dense", "head.out")
"""Modules that compute logits or class scores; an encoder may use the last two."""


@dataclass(frozen=True)
class StackLayout:
    """Dtype and device of matrices that are preallocated on a device."""

    dtype: torch.dtype
    device: torch.device


class LoRATargets:
    """The tables of one rank by module name, and the adapter of each token of the current step.

    Args:
        max_rank: highest rank of an adapter.
        capacity: highest number of an adapter.
        targets: last parts of the projections' names in checkpoints; () = every projection.
        kinds: further changes that adapters may make, from adapter_config.KINDS.
        is_rounded, keeps_parts: as for AdapterTable.
        stacked: layout of tables on a device other than the host; None = they are on the host.
    """

    def __init__(
        self,
        max_rank: int,
        capacity: int,
        targets: Sequence[str] = (),
        kinds: Collection[str] = (),
        is_rounded: bool = False,
        keeps_parts: bool = True,
        stacked: StackLayout | None = None,
    ) -> None:
        self.is_rounded, self.keeps_parts = is_rounded, keeps_parts
        self.stacked = stacked
        self.max_rank = max_rank
        self.capacity = capacity
        self.targets = () if "all" in targets else tuple(targets)
        self.kinds = frozenset(kinds)
        self.tables: dict[str, AdapterTable] = {}
        """By name of the projection in the model."""
        self.experts: dict[str, ExpertTable] = {}
        """By name of the projection of experts."""
        self.rows: dict[str, RowTable] = {}
        """Changes to whole rows, by name of the projection; also "embedding" and the names in
        HEADS."""
        self.biases: dict[str, Tensor | None] = {}
        """Biases of the projections in `rows`, if this rank adds one."""
        self.slots: dict[str, WeightSlot] = {}
        """Shapes and sharding of every projection that could have a table."""
        self.tokens = AdapterTokens(1)
        """Adapters of the current step; a recorded step keeps the object it was recorded with."""
        self.gathered: AdapterTokens | None = None
        """Adapters of the tokens of all replicas or context-parallel ranks of the step; None if
        layers gather no rows (`Group.gather_rows`)."""
        self.outputs = AdapterTokens(1)
        """Adapters of the tokens whose logits are computed."""

    def add_table(self, name: str, is_exact: bool = False) -> None:
        """Create the table of a projection. is_exact: in float32."""
        if name not in self.tables:
            slot = self.slots[name]
            self.tables[name] = self.table(_own_inputs(slot), own_outputs(slot), is_exact)

    @property
    def has_outputs(self) -> bool:
        """Whether logits or scores depend on the adapter directly."""
        return not self.rows.keys().isdisjoint(HEADS)

    def tokens_of(self, gathers: bool) -> AdapterTokens:
        """Adapters of the rows that a layer receives: gathered ones or this rank's own."""
        return self.gathered if gathers and self.gathered is not None else self.tokens

    def table(self, inputs: int, outputs: Sequence[int], is_exact: bool = False) -> AdapterTable:
        """Create an empty table. outputs: outputs of each part of the projection on this rank."""
        stack, sizes = None, (self.max_rank, self.capacity)
        if self.stacked is not None:
            dtype = torch.float32 if is_exact else self.stacked.dtype
            stack = AdapterStack(inputs, outputs, *sizes, dtype, self.stacked.device)
        width = self.max_rank * len(outputs)
        how = (self.is_rounded, self.keeps_parts, stack)
        return AdapterTable(inputs, width, self.capacity, *how)

    def new_tokens(self, count: int) -> AdapterTokens:
        """Buffers for steps with up to `count` tokens."""
        if self.stacked is None:
            return AdapterTokens(count)
        shape, device = (count, self.capacity), self.stacked.device
        return AdapterTokens(count, torch.ones(shape, dtype=torch.bool, device=device))

    @property
    def stacked_bytes(self) -> int:
        """Bytes of all preallocated tables on a device."""
        return sum(t.stack.size_bytes for t in self.tables.values() if t.stack is not None)


class AdaptedRouter:
    """The adapters of a router.

    Args:
        gathers: it scores gathered rows.
    """

    def __init__(self, table: AdapterTable, lora_targets: LoRATargets, gathers: bool) -> None:
        self._table, self._lora_targets, self._gathers = table, lora_targets, gathers

    def now(self) -> tuple[AdapterTable, AdapterTokens]:
        """Table and adapters of the current step."""
        return self._table, self._lora_targets.tokens_of(self._gathers)


def own_outputs(slot: WeightSlot) -> list[int]:
    """Outputs of each part on this rank."""
    found = list[int]()
    for part, shape in slot.shapes.items():
        rule = slot.rules[part]
        first, last = rule.span(shape[0], slot.group) if rule.dim == 0 else (0, shape[0])
        found.append(last - first)
    return found


def _own_inputs(slot: WeightSlot) -> int:
    """Inputs on this rank; all parts have the same number."""
    (part, shape), *_ = slot.shapes.items()
    rule = slot.rules[part]
    first, last = rule.span(shape[1], slot.group) if rule.dim == 1 else (0, shape[1])
    return last - first
