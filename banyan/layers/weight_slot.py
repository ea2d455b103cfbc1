"""Weight slots: which checkpoint tensors a layer takes, and how ranks shard them.

The loader fills slots.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from banyan.base.errors import ConfigError
from banyan.ops.stored import STORAGE_TYPES, StoredWeight
from banyan.parallel.groups import Group


@dataclass(frozen=True)
class ShardRule:
    """How ranks shard one checkpoint tensor.

    Attributes:
        dim: dimension that is cut; None = replicated.
        unit: values along `dim` that stay together (head_dim for heads).
        replicate: with fewer units than ranks, several ranks hold the same unit (kv heads).
    """

    dim: int | None = None
    unit: int = 1
    replicate: bool = False

    def span(self, size: int, group: Group) -> tuple[int, int]:
        """First and last + 1 index of this rank's part of `size` values."""
        units = size // self.unit
        if units % group.size == 0:
            share, first = units // group.size, group.rank * (units // group.size)
        elif self.replicate and group.size % units == 0:
            share, first = 1, group.rank * units // group.size
        else:
            raise ConfigError(
                f"{units} units of {self.unit} cannot be shared by {group.size} ranks",
                hint="choose a --tp that divides the heads, the kv heads and the inner width",
            )
        return first * self.unit, (first + share) * self.unit

    def cut(self, weight: StoredWeight, group: Group) -> StoredWeight:
        if self.dim is None or group.size == 1:
            return weight
        return weight.cut(self.dim, *self.span(weight.shape[self.dim], group))


@dataclass(frozen=True)
class RotaryRows:
    """Rows of a projection that the rotary embedding rotates, in every head.

    Attributes:
        head_dim: rows of a head.
        first, count: rows of a head that rotate.
    """

    head_dim: int
    first: int
    count: int


@dataclass(frozen=True)
class WeightSlot:
    """One weight of a layer, made of one checkpoint tensor per part.

    Attributes:
        shapes: part name -> shape in the checkpoint, in stacking order; "" names a single part.
        rules: part name -> how ranks shard it.
        group: the ranks that shard it.
        turning: parts whose outputs rotate; a checkpoint may store those rows in interleaved pairs.
        pieces: parts whose heads are split after sharding (`ColumnLinear`).
        elsewhere: parts that only other ranks take.
    """

    shapes: Mapping[str, tuple[int, ...]]
    rules: Mapping[str, ShardRule]
    group: Group = field(default_factory=Group)
    turning: Mapping[str, RotaryRows] = field(default_factory=dict)
    pieces: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()

    def keeps_blocks(self, part: str, weight: StoredWeight) -> bool:
        """Whether this rank's part of a quantised weight consists of whole blocks."""
        rule = self.rules[part]
        if rule.dim is None or self.group.size == 1 or rule.dim < len(weight.shape) - 1:
            return True
        values = STORAGE_TYPES[weight.type].values
        return not any(edge % values for edge in rule.span(weight.shape[rule.dim], self.group))


class Layer(nn.Module):
    """A module with its own weights, empty until the loader has filled every slot."""

    @abstractmethod
    def slots(self) -> dict[str, WeightSlot]:
        """Slot name ("weight", "bias") -> its declaration."""

    @abstractmethod
    def fill(self, slot: str, parts: list[StoredWeight]) -> None:
        """Take this rank's share of the parts, in stacking order."""


def single(shape: tuple[int, ...], rule: ShardRule | None = None) -> WeightSlot:
    """A slot of one checkpoint tensor."""
    return WeightSlot({"": shape}, {"": rule or ShardRule()})
