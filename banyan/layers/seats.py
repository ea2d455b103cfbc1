"""What a rank holds of adapters: a table for every place where one may lie. Knows no layer that
adapters lie beside.
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from banyan.layers.slot import WeightSlot
from banyan.ops.adapter_rows import RowTable
from banyan.ops.adapters import AdapterTable, AdapterTokens
from banyan.ops.expert_adapters import ExpertTable

EMBEDDING, HEAD, GAINS = "embed_tokens", "lm_head", "DoRA"
"""Kinds of changes beside those of projections; the names of config/adapter_card.py."""
HEADS = ("head", "head.dense", "head.out")
"""What makes logits of tokens or scores of classes; an encoder does so in two steps."""


class AdapterSeats:
    """The tables of one rank by projection, and the tokens of the step that is being computed.

    Args:
        max_rank: highest rank of an adapter.
        capacity: highest number of one.
        targets: last parts of the projections' names in checkpoints; () = every projection.
        kinds: what else adapters may change: EMBEDDING, HEAD, and outputs as a whole (GAINS).
        is_rounded, keeps_parts: as for AdapterTable.
    """

    def __init__(
        self,
        max_rank: int,
        capacity: int,
        targets: Sequence[str] = (),
        kinds: Collection[str] = (),
        is_rounded: bool = False,
        keeps_parts: bool = True,
    ) -> None:
        self.is_rounded, self.keeps_parts = is_rounded, keeps_parts
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

    def seat(self, name: str) -> None:
        """Make room for what adapters bring for a projection."""
        if name not in self.tables:
            slot = self.slots[name]
            width = self.max_rank * len(slot.shapes)
            self.tables[name] = self.table(_own_inputs(slot), width)

    @property
    def has_outputs(self) -> bool:
        """Logits or scores depend on adapters of their own."""
        return not self.rows.keys().isdisjoint(HEADS)

    def tokens_of(self, gathers: bool) -> AdapterTokens:
        """Those whose rows come to a layer, which are the gathered ones or this rank's own."""
        return self.gathered if gathers and self.gathered is not None else self.tokens

    def table(self, inputs: int, width: int) -> AdapterTable:
        """Empty; see there."""
        return AdapterTable(inputs, width, self.capacity, self.is_rounded, self.keeps_parts)


class AdaptedRouter:
    """What lies beside a router.

    Args:
        gathers: it scores rows that were gathered.
    """

    def __init__(self, table: AdapterTable, seats: AdapterSeats, gathers: bool) -> None:
        self._table, self._seats, self._gathers = table, seats, gathers

    def now(self) -> tuple[AdapterTable, AdapterTokens]:
        """Of the step at hand."""
        return self._table, self._seats.tokens_of(self._gathers)


def _own_inputs(slot: WeightSlot) -> int:
    """Inputs on this rank; all parts have the same."""
    (part, shape), *_ = slot.shapes.items()
    rule = slot.rules[part]
    first, last = rule.span(shape[1], slot.group) if rule.dim == 1 else (0, shape[1])
    return last - first
