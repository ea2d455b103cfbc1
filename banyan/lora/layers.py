"""Projections beside which adapters may lie: the weight that adds them. A model that is built
without adapters has none of this.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from banyan.layers.embedding import Embedding, Logits
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.lora.targets import EMBEDDING, GAINS, HEAD, AdapterSeats
from banyan.ops.api import Ops
from banyan.ops.lora import AdapterTable
from banyan.ops.lora_rows import RowTable
from banyan.ops.packed import PackedEmbedding, PackedLinear

Projection = ColumnLinear | RowLinear


class Adapted:
    """A packed weight with the adapters beside it.

    Args:
        gathers: the rows that come to it were gathered.
    """

    def __init__(
        self,
        weight: PackedLinear,
        table: AdapterTable,
        rows: RowTable | None,
        seats: AdapterSeats,
        ops: Ops,
        gathers: bool,
    ) -> None:
        self._gathers = gathers
        self._weight = weight
        self._table = table
        self._rows = rows
        self._seats = seats
        self._ops = ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out, tokens = self._weight(x, bias), self._seats.tokens_of(self._gathers)
        self._ops.adapt(out, x, self._table, tokens)
        if self._rows is not None:
            self._ops.adapt_rows(out, out, self._rows, tokens)
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
    """The packed weight of the logits, or of scores of classes, with the adapters beside it.

    Args:
        tables: what is done to the outputs, one after another.
    """

    def __init__(
        self, weight: PackedLinear, tables: Sequence[RowTable], seats: AdapterSeats, ops: Ops
    ) -> None:
        self._weight, self._tables = weight, tables
        self._seats, self._ops = seats, ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = self._weight(x, bias)
        for table in self._tables:
            self._ops.adapt_rows(out, x, table, self._seats.outputs)
        return out


def wrap(seats: AdapterSeats, name: str, projection: Projection, ops: Ops) -> None:
    """Let adapters lie beside a filled projection; weights that come later find the same ones."""
    seats.seat(name)
    assert projection.weight is not None
    has_gains = GAINS in seats.kinds
    rows = seats.rows.setdefault(name, RowTable(seats.capacity)) if has_gains else None
    is_added_elsewhere = isinstance(projection, RowLinear) and projection.group.rank
    seats.biases[name] = None if is_added_elsewhere else projection.bias
    own = (projection.weight, seats.tables[name], rows, seats, ops)
    projection.weight = Adapted(*own, projection.group.gathers)


def wrap_ends(seats: AdapterSeats, embedding: Embedding, head: nn.Module | None, ops: Ops) -> None:
    """The same for the embedding and the head, of logits or of classes, where they were asked
    for."""
    if EMBEDDING in seats.kinds and embedding.rows is not None:  # of later stages it is None
        table = seats.rows.setdefault("embedding", RowTable(seats.capacity))
        embedding.rows = AdaptedEmbedding(embedding.rows, table, seats, ops)
    if HEAD in seats.kinds and isinstance(head, Logits | ColumnLinear):
        wrap_head(seats, "head", head, ops)


def wrap_head(
    seats: AdapterSeats, name: str, head: Logits | ColumnLinear, ops: Ops, has_bias: bool = False
) -> None:
    """Let adapters lie beside a filled head.

    Args:
        has_bias: what they bring in its place has one too.
    """
    assert head.weight is not None
    names = [name, bias_of(name)] if has_bias else [name]
    tables = [seats.rows.setdefault(each, RowTable(seats.capacity)) for each in names]
    head.weight = AdaptedHead(head.weight, tables, seats, ops)


def bias_of(head: str) -> str:
    """Where the biases lie that adapters bring with a head."""
    return f"{head}.bias"


def projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """Every projection within a model's blocks, by name."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, ColumnLinear | RowLinear):
            yield name, module
