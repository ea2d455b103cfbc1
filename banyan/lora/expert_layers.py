"""Experts and routers beside which adapters may lie: a pair of a token and an expert goes through
what the token's adapter has for that expert.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from banyan.lora.targets import LoRATargets
from banyan.moe.layer import ExpertBlock, Experts, ExpertWeights
from banyan.ops.experts_api import PackedExperts
from banyan.ops.lora_experts import ExpertSides, ExpertTable


class AdaptedExperts:
    """Packed experts with the adapters beside them."""

    def __init__(
        self,
        packed: PackedExperts,
        gate_up: ExpertTable,
        down: ExpertTable,
        lora_targets: LoRATargets,
    ) -> None:
        self._packed, self._lora_targets = packed, lora_targets
        self._gate_up, self._down = gate_up, down

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, sides: ExpertSides | None = None
    ) -> Tensor:
        assert sides is None
        own = ExpertSides(self._gate_up, self._down, self._lora_targets.tokens_of(gathers=True))
        return self._packed(x, ids, weights, own)

    def apart(self, x: Tensor, ids: Tensor) -> Tensor:
        raise AssertionError("experts with adapters lie in their order (lora/rules.py)")

    def parts(self, at: int) -> list[Tensor]:
        return self._packed.parts(at)

    def put(self, at: int, parts: list[Tensor]) -> None:
        self._packed.put(at, parts)


def expert_blocks(model: nn.Module) -> Iterator[tuple[str, ExpertBlock]]:
    """Every block of experts, by name."""
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, ExpertBlock):
            yield name, module


def seat_experts(name: str, experts: Experts, lora_targets: LoRATargets) -> None:
    """Make room for what adapters bring for a layer's experts."""
    for side, weights in (("gate_up", experts.gate_up), ("down", experts.down)):
        width = lora_targets.max_rank * len(weights.parts)
        lora_targets.experts.setdefault(
            f"{name}.{side}",
            ExpertTable(
                own_inputs(weights),
                len(weights.mine),
                width,
                lora_targets.capacity,
                lora_targets.is_rounded,
            ),
        )


def wrap_experts(name: str, experts: Experts, lora_targets: LoRATargets) -> None:
    """Let adapters lie beside filled experts; weights that come later find the same ones."""
    seat_experts(name, experts, lora_targets)
    assert experts.packed is not None
    gate_up, down = (lora_targets.experts[f"{name}.{side}"] for side in ("gate_up", "down"))
    experts.packed = AdaptedExperts(experts.packed, gate_up, down, lora_targets)


def own_inputs(weights: ExpertWeights) -> int:
    """Inputs of a projection of experts on this rank."""
    size = weights.shape[1]
    first, last = weights.rule.span(size, weights.group) if weights.rule.dim == 1 else (0, size)
    return last - first
