"""Projections beside which adapters may lie: what a rank holds of them, and the weight that adds
them. A model that is built without adapters has none of this.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from banyan.layers.linear import ColumnLinear, RowLinear
from banyan.layers.slot import WeightSlot
from banyan.ops.adapters import AdapterTable, AdapterTokens
from banyan.ops.api import Ops
from banyan.ops.packed import PackedLinear

Projection = ColumnLinear | RowLinear


class AdapterSeats:
    """The tables of one rank by projection, and the tokens of the step that is being computed.

    Args:
        max_rank: highest rank of an adapter.
        capacity: highest number of one.
        targets: last parts of the projections' names in checkpoints; () = every projection.
    """

    def __init__(self, max_rank: int, capacity: int, targets: Sequence[str] = ()) -> None:
        self.max_rank = max_rank
        self.capacity = capacity
        self.targets = () if "all" in targets else tuple(targets)
        self.tables: dict[str, AdapterTable] = {}
        """By the projection's name in the model."""
        self.slots: dict[str, WeightSlot] = {}
        """Shapes and cuts of every projection that could have a table."""
        self.tokens = AdapterTokens(1)
        """Of the step at hand; what is recorded keeps those of its recording."""

    def wrap(self, name: str, projection: Projection, ops: Ops) -> None:
        """Let adapters lie beside a filled projection; weights that come later find the same
        ones."""
        self.seat(name)
        assert projection.weight is not None
        projection.weight = Adapted(projection.weight, self.tables[name], self, ops)

    def seat(self, name: str) -> None:
        """Make room for what adapters bring for a projection."""
        if name not in self.tables:
            slot = self.slots[name]
            width = self.max_rank * len(slot.shapes)
            self.tables[name] = AdapterTable(_own_inputs(slot), width, self.capacity)


class Adapted:
    """A packed weight with the adapters beside it."""

    def __init__(
        self, weight: PackedLinear, table: AdapterTable, seats: AdapterSeats, ops: Ops
    ) -> None:
        self._weight = weight
        self._table = table
        self._seats = seats
        self._ops = ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out = self._weight(x, bias)
        self._ops.adapt(out, x, self._table, self._seats.tokens)
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
