"""Projections beside which adapters may lie: the weight that adds them. A model that is built
without adapters has none of this.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from banyan.layers.embedding import Embedding, Logits
from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.lora.targets import EMBEDDING, GAINS, HEAD, LoRATargets
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
        lora_targets: LoRATargets,
        ops: Ops,
        gathers: bool,
    ) -> None:
        self._gathers = gathers
        self._weight = weight
        self._table = table
        self._rows = rows
        self._lora_targets = lora_targets
        self._ops = ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out, tokens = self._weight(x, bias), self._lora_targets.tokens_of(self._gathers)
        self._ops.adapt(out, x, self._table, tokens)
        if self._rows is not None:
            self._ops.adapt_rows(out, out, self._rows, tokens)
        return out


class AdaptedEmbedding:
    """A packed embedding with the adapters beside it."""

    def __init__(
        self, rows: PackedEmbedding, table: RowTable, lora_targets: LoRATargets, ops: Ops
    ) -> None:
        self._rows, self._table = rows, table
        self._lora_targets, self._ops = lora_targets, ops

    def __call__(self, tokens: Tensor) -> Tensor:
        out = self._rows(tokens)
        self._ops.adapt_rows(out, tokens, self._table, self._lora_targets.tokens)
        return out


class AdaptedHead:
    """The packed weight of the logits, or of scores of classes, with the adapters beside it.

    Args:
        tables: what is done to the outputs, one after another.
    """

    def __init__(
        self, weight: PackedLinear, tables: Sequence[RowTable], lora_targets: LoRATargets, ops: Ops
    ) -> None:
        self._weight, self._tables = weight, tables
        self._lora_targets, self._ops = lora_targets, ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = self._weight(x, bias)
        for table in self._tables:
            self._ops.adapt_rows(out, x, table, self._lora_targets.outputs)
        return out


def wrap(lora_targets: LoRATargets, name: str, projection: Projection, ops: Ops) -> None:
    """Let adapters lie beside a filled projection; weights that come later find the same ones."""
    lora_targets.seat(name)
    assert projection.weight is not None
    has_gains = GAINS in lora_targets.kinds
    rows = (
        lora_targets.rows.setdefault(name, RowTable(lora_targets.capacity)) if has_gains else None
    )
    is_added_elsewhere = isinstance(projection, RowLinear) and projection.group.rank
    lora_targets.biases[name] = None if is_added_elsewhere else projection.bias
    own = (projection.weight, lora_targets.tables[name], rows, lora_targets, ops)
    projection.weight = Adapted(*own, projection.group.gathers)


def wrap_ends(
    lora_targets: LoRATargets, embedding: Embedding, head: nn.Module | None, ops: Ops
) -> None:
    """The same for the embedding and the head, of logits or of classes, where they were asked
    for."""
    if EMBEDDING in lora_targets.kinds and embedding.rows is not None:  # of later stages it is None
        table = lora_targets.rows.setdefault("embedding", RowTable(lora_targets.capacity))
        embedding.rows = AdaptedEmbedding(embedding.rows, table, lora_targets, ops)
    if HEAD in lora_targets.kinds and isinstance(head, Logits | ColumnLinear):
        wrap_head(lora_targets, "head", head, ops)


def wrap_head(
    lora_targets: LoRATargets,
    name: str,
    head: Logits | ColumnLinear,
    ops: Ops,
    has_bias: bool = False,
) -> None:
    """Let adapters lie beside a filled head.

    Args:
        has_bias: what they bring in its place has one too.
    """
    assert head.weight is not None
    names = [name, bias_of(name)] if has_bias else [name]
    tables = [lora_targets.rows.setdefault(each, RowTable(lora_targets.capacity)) for each in names]
    head.weight = AdaptedHead(head.weight, tables, lora_targets, ops)


def bias_of(head: str) -> str:
    """Where the biases lie that adapters bring with a head."""
    return f"{head}.bias"


def projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """Every projection within a model's blocks, by name."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, ColumnLinear | RowLinear):
            yield name, module
