"""Projections beside which adapters may lie: what a rank holds of them, and the weight that adds
them. A model that is built without adapters has none of this.
"""

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn

from banyan.layers.embedding import Embedding, Logits
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.slot import WeightSlot
from banyan.ops.adapter_rows import RowTable
from banyan.ops.adapters import AdapterTable, AdapterTokens
from banyan.ops.api import Ops
from banyan.ops.expert_adapters import ExpertTable
from banyan.ops.packed import PackedEmbedding, PackedLinear

Projection = ColumnLinear | RowLinear
EMBEDDING, HEAD, GAINS = "embed_tokens", "lm_head", "DoRA"
"""Kinds of changes beside those of projections; the names of config/adapter_card.py."""


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
        self.outputs = AdapterTokens(1)
        """Of the tokens whose logits are computed."""

    def wrap(self, name: str, projection: Projection, ops: Ops) -> None:
        """Let adapters lie beside a filled projection; weights that come later find the same
        ones."""
        self.seat(name)
        assert projection.weight is not None
        has_gains = GAINS in self.kinds
        rows = self.rows.setdefault(name, RowTable(self.capacity)) if has_gains else None
        is_added_elsewhere = isinstance(projection, RowLinear) and projection.group.rank
        self.biases[name] = None if is_added_elsewhere else projection.bias
        projection.weight = Adapted(projection.weight, self.tables[name], rows, self, ops)

    def wrap_ends(self, embedding: Embedding, head: nn.Module | None, ops: Ops) -> None:
        """The same for the embedding and the logits, where they were asked for."""
        if EMBEDDING in self.kinds and embedding.rows is not None:  # of later stages it is None
            table = self.rows.setdefault("embedding", RowTable(self.capacity))
            embedding.rows = AdaptedEmbedding(embedding.rows, table, self, ops)
        if HEAD in self.kinds and isinstance(head, Logits):
            assert head.weight is not None
            table = self.rows.setdefault("head", RowTable(self.capacity))
            head.weight = AdaptedHead(head.weight, table, self, ops)

    def seat(self, name: str) -> None:
        """Make room for what adapters bring for a projection."""
        if name not in self.tables:
            slot = self.slots[name]
            width = self.max_rank * len(slot.shapes)
            self.tables[name] = self.table(_own_inputs(slot), width)

    def table(self, inputs: int, width: int) -> AdapterTable:
        """Empty; see there."""
        return AdapterTable(inputs, width, self.capacity, self.is_rounded, self.keeps_parts)


class Adapted:
    """A packed weight with the adapters beside it."""

    def __init__(
        self,
        weight: PackedLinear,
        table: AdapterTable,
        rows: RowTable | None,
        seats: AdapterSeats,
        ops: Ops,
    ) -> None:
        self._weight = weight
        self._table = table
        self._rows = rows
        self._seats = seats
        self._ops = ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = self._weight(x, bias)
        self._ops.adapt(out, x, self._table, self._seats.tokens)
        if self._rows is not None:
            self._ops.adapt_rows(out, out, self._rows, self._seats.tokens)
        return out


class AdaptedEmbedding:
    """A packed embedding with the adapters beside it."""

    def __init__(
        self, rows: PackedEmbedding, table: RowTable, seats: AdapterSeats, ops: Ops
    ) -> None:
        self._rows, self._table = rows, table
        self._seats, self._ops = seats, ops

    def __call__(self, tokens: Tensor) -> Tensor:
        out = self._rows(tokens)
        self._ops.adapt_rows(out, tokens, self._table, self._seats.tokens)
        return out


class AdaptedHead:
    """The packed weight of the logits with the adapters beside it."""

    def __init__(
        self, weight: PackedLinear, table: RowTable, seats: AdapterSeats, ops: Ops
    ) -> None:
        self._weight, self._table = weight, table
        self._seats, self._ops = seats, ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = self._weight(x, bias)
        self._ops.adapt_rows(out, x, self._table, self._seats.outputs)
        return out


def _own_inputs(slot: WeightSlot) -> int:
    """Inputs on this rank; all parts have the same."""
    (part, shape), *_ = slot.shapes.items()
    rule = slot.rules[part]
    first, last = rule.span(shape[1], slot.group) if rule.dim == 1 else (0, shape[1])
    return last - first


def projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """Every projection within a model's blocks, by name."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, ColumnLinear | RowLinear):
            yield name, module
