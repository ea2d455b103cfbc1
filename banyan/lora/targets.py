"""What a rank holds of adapters: a table for every place where one may lie. Knows no layer that
adapters lie beside.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.layers.weight_slot import WeightSlot
from banyan.ops.lora import AdapterTable, AdapterTokens
from banyan.ops.lora_experts import ExpertTable
from banyan.ops.lora_rows import RowTable
from banyan.ops.lora_stack import AdapterStack

EMBEDDING, HEAD, GAINS = "embed_tokens", "lm_head", "DoRA"
"""Kinds of changes beside those of projections; the names of lora/adapter_config.py."""
HEADS = ("head", "head.dense", "head.out")
"""What makes logits of tokens or scores of classes; an encoder does so in two steps."""


@dataclass(frozen=True)
class StackLayout:
    """How matrices lie on a device that is not the host: of which type, and where."""

    dtype: torch.dtype
    device: torch.device


class LoRATargets:
    """The tables of one rank by projection, and the tokens of the step that is being computed.

    Args:
        max_rank: highest rank of an adapter.
        capacity: highest number of one.
        targets: last parts of the projections' names in checkpoints; () = every projection.
        kinds: what else adapters may change: EMBEDDING, HEAD, and outputs as a whole (GAINS).
        is_rounded, keeps_parts: as for AdapterTable.
        stacked: where tables lie on a device that is not the host; None = they are the host's.
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
        """By the projection's name in the model."""
        self.experts: dict[str, ExpertTable] = {}
        """By the projection of experts."""
        self.rows: dict[str, RowTable] = {}
        """The same of what is done to whole rows; also of "embedding" and "head"."""
        self.biases: dict[str, Tensor | None] = {}
        """Of projections in `rows`, where this rank adds one."""
        self.slots: dict[str, WeightSlot] = {}
        """Shapes and cuts of every projection that could have a table."""
        self.tokens = AdapterTokens(1)
        """Of the step at hand; what is recorded keeps those of its recording."""
        self.gathered: AdapterTokens | None = None
        """Of all replicas that work on the step, or all shares of it; None where layers gather no
        rows (`Group.gather_rows`)."""
        self.outputs = AdapterTokens(1)
        """Of the tokens whose logits are computed."""

    def add_table(self, name: str, is_exact: bool = False) -> None:
        """Make room for what adapters bring for a projection; is_exact: in float32."""
        if name not in self.tables:
            slot = self.slots[name]
            self.tables[name] = self.table(_own_inputs(slot), own_outputs(slot), is_exact)

    @property
    def has_outputs(self) -> bool:
        """Logits or scores depend on adapters of their own."""
        return not self.rows.keys().isdisjoint(HEADS)

    def tokens_of(self, gathers: bool) -> AdapterTokens:
        """Those whose rows come to a layer, which are the gathered ones or this rank's own."""
        return self.gathered if gathers and self.gathered is not None else self.tokens

    def table(self, inputs: int, outputs: Sequence[int], is_exact: bool = False) -> AdapterTable:
        """Empty; see there. outputs: of each part of the projection on this rank."""
        stack, sizes = None, (self.max_rank, self.capacity)
        if self.stacked is not None:
            dtype = torch.float32 if is_exact else self.stacked.dtype
            stack = AdapterStack(inputs, outputs, *sizes, dtype, self.stacked.device)
        width = self.max_rank * len(outputs)
        how = (self.is_rounded, self.keeps_parts, stack)
        return AdapterTable(inputs, width, self.capacity, *how)

    def new_tokens(self, count: int) -> AdapterTokens:
        """For steps of so many tokens."""
        if self.stacked is None:
            return AdapterTokens(count)
        shape, device = (count, self.capacity), self.stacked.device
        return AdapterTokens(count, torch.ones(shape, dtype=torch.bool, device=device))

    @property
    def stacked_bytes(self) -> int:
        """Of all tables on a device that is not the host."""
        return sum(t.stack.size_bytes for t in self.tables.values() if t.stack is not None)


class AdaptedRouter:
    """What lies beside a router.

    Args:
        gathers: it scores rows that were gathered.
    """

    def __init__(self, table: AdapterTable, lora_targets: LoRATargets, gathers: bool) -> None:
        self._table, self._lora_targets, self._gathers = table, lora_targets, gathers

    def now(self) -> tuple[AdapterTable, AdapterTokens]:
        """Of the step at hand."""
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
    """Inputs on this rank; all parts have the same."""
    (part, shape), *_ = slot.shapes.items()
    rule = slot.rules[part]
    first, last = rule.span(shape[1], slot.group) if rule.dim == 1 else (0, shape[1])
    return last - first
