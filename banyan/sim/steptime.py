"""How long a step takes: the roofline of a model on a device.

A step moves every weight and every cached key and value that its rows read, and does two floating
operations per weight and token; the slower of the two decides (Williams et al., "Roofline", 2009).
"""

from dataclasses import dataclass
from typing import Protocol

from banyan.config.card import WINDOW, ModelCard
from banyan.messages.plan import StepPlan


class StepTime(Protocol):
    def seconds(self, plan: StepPlan) -> float:
        """Device time of one step."""
        ...


@dataclass(frozen=True)
class DeviceNumbers:
    """What a device reaches in practice."""

    bytes_per_s: float
    flops_per_s: float
    overhead_s: float = 0.0
    """Launch cost of a step, whatever its size."""


class Roofline:
    """Step time from the plain facts of a model.

    Args:
        weight_bytes, cache_bytes: bytes per stored weight and per cached key or value element.
    """

    def __init__(
        self,
        card: ModelCard,
        device: DeviceNumbers,
        weight_bytes: float = 2.0,
        cache_bytes: float = 2.0,
    ) -> None:
        self._card = card
        self._device = device
        attention = card.hidden_size * card.head_dim * 2 * (card.num_heads + card.num_kv_heads)
        mlp = sum(3 * card.hidden_size * card.inner_of(i) for i in range(card.num_layers))
        self._layer_weights = card.num_layers * attention + mlp
        self._head_weights = card.hidden_size * card.vocab_size
        self._weight_bytes = weight_bytes
        self._position_bytes = card.kept_per_token * cache_bytes
        self._position_flops = 4 * card.num_heads * card.head_dim
        self._full_layers = sum(card.kind_of(i) != WINDOW for i in range(card.num_layers))

    def seconds(self, plan: StepPlan) -> float:
        if not plan.rows:
            return self._device.overhead_s
        tokens = sum(row.count for row in plan.rows)
        reads = pairs = 0
        window_layers = self._card.num_layers - self._full_layers
        for row in plan.rows:
            end = row.start + row.count
            near = min(end, self._card.window + row.count)
            reads += end * self._full_layers + near * window_layers
            seen = row.start + (row.count + 1) / 2
            near_seen = min(seen, self._card.window)
            pairs += row.count * (seen * self._full_layers + near_seen * window_layers)
        weights = self._layer_weights + self._head_weights
        moved = weights * self._weight_bytes + reads * self._position_bytes
        flops = 2 * (self._layer_weights * tokens + self._head_weights * len(plan.rows))
        flops += pairs * self._position_flops
        return self._device.overhead_s + max(
            moved / self._device.bytes_per_s, flops / self._device.flops_per_s
        )
