"""Adapters of experts and routers: where matrices go, whether they fit, and this rank's part.

Checkpoints store experts one by one (`experts.3.gate_proj`) or stacked: PEFT's `target_parameters`,
or three dimensions with the experts first (GGUF, and adapters that share outer matrices).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.families.names import NameMap
from banyan.layers.weight_slot import ShardRule
from banyan.lora.adapter_config import AdapterConfig, LowRank
from banyan.lora.layers import (
    expert_blocks,
)
from banyan.models.weights.names import WeightPlace, place_of
from banyan.moe.layer import ExpertWeights
from banyan.ops.lora import ExpertPart
from banyan.parallel.groups import Group

_STACK = re.compile(
    r"(?:.+\.)?layers\.(\d+)\.(?:.*\.)?experts\.(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)"
)
_PART = re.compile(r"(gate|up|)(\d+|\*)")
_PARTS_OF = {
    "gate_up_proj": ("gate", "up"),
    **dict.fromkeys(("gate_proj", "w1"), ("gate",)),
    **dict.fromkeys(("up_proj", "w3"), ("up",)),
    **dict.fromkeys(("down_proj", "w2"), ("",)),
}
"""Last part of a name -> parts of the projection."""
Found = dict[str, dict[int, list[ExpertPart]]]
"""Projection of experts -> local expert index -> its parts."""


@dataclass(frozen=True)
class ExpertSlot:
    """Shape and sharding of one projection of a layer's experts.

    Attributes:
        count: experts of the model.
        mine: experts of this rank.
        shape: outputs and inputs of each part of one expert.
    """

    count: int
    mine: tuple[int, ...]
    shape: tuple[int, int]
    parts: tuple[str, ...]
    rule: ShardRule
    group: Group

    @classmethod
    def of(cls, weights: ExpertWeights) -> "ExpertSlot":
        parts = weights.parts
        mine = tuple(weights.mine)
        return cls(weights.count, mine, weights.shape, parts, weights.rule, weights.group)


@dataclass(frozen=True)
class ExpertPlace:
    """Where matrices of experts go.

    Attributes:
        module: dotted name of the projection of experts.
        parts: parts of the projection, stacked.
        expert: number of the expert; None = all of them.
    """

    module: str
    parts: tuple[str, ...]
    expert: int | None

    @property
    def layer(self) -> int:
        return int(self.module.split(".")[1])


def expert_slots(model: nn.Module) -> dict[str, ExpertSlot]:
    found: dict[str, ExpertSlot] = {}
    for name, block in expert_blocks(model):
        for side in ("gate_up", "down"):
            weights = block.experts.gate_up if side == "gate_up" else block.experts.down
            found[f"{name}.experts.{side}"] = ExpertSlot.of(weights)
    return found


def module_place(name: str, names: NameMap) -> WeightPlace | None:
    """The place of an adapter's module. Newer models name an MoE block `mlp` where checkpoints have
    another name."""
    place = place_of(f"{name}.weight", names)
    if place is None and ".mlp." in name:
        place = place_of(f"{name.replace('.mlp.', '.block_sparse_moe.')}.weight", names)
    return place


def expert_place(name: str, names: NameMap) -> ExpertPlace | None:
    """The place of a projection of experts; None for other modules."""
    if match := _STACK.fullmatch(name):
        layer, last = match.groups()
        side = "down" if _PARTS_OF[last] == ("",) else "gate_up"
        return ExpertPlace(f"layers.{layer}.mlp.experts.{side}", _PARTS_OF[last], None)
    place = module_place(name, names)
    if place is None or not place.module.endswith((".experts.gate_up", ".experts.down")):
        return None
    matches = [_PART.fullmatch(part) for part in place.parts]
    assert all(matches), f"{name}: {place.parts}"
    parts = tuple(match[1] for match in matches if match)
    number = next(match[2] for match in matches if match)
    return ExpertPlace(place.module, parts, None if number == "*" else int(number))


def check_experts(place: ExpertPlace, slot: ExpertSlot, low_rank: LowRank) -> str:
    """Why matrices do not fit this projection; "" if they do."""
    if any(part not in slot.parts for part in place.parts):
        return "its experts have no gates"
    if low_rank.experts and low_rank.experts not in (1, slot.count):
        return f"it is of {low_rank.experts} experts, and the model has {slot.count}"
    if place.expert is None and not low_rank.experts:
        return "it is one projection, and the model has one for each expert"
    if place.expert is not None and (low_rank.experts or place.expert >= slot.count):
        return f"the model has {slot.count} experts, each with a projection of its own"
    outputs, inputs = slot.shape[0] * len(place.parts), slot.shape[1]
    if (outputs, inputs) != (low_rank.outputs, low_rank.inputs):
        return (
            f"it has {low_rank.inputs} inputs and {low_rank.outputs} outputs there, {inputs} and "
            f"{outputs} here"
        )
    return ""


def add_expert_parts(
    found: Found,
    place: ExpertPlace,
    slot: ExpertSlot,
    low_rank: LowRank,
    both: tuple[Tensor, Tensor],
    is_interleaved: bool,
) -> None:
    """Add this rank's part of some matrices to `found`.

    Args:
        both: down and up, as in the file.
        is_interleaved: outputs of gate and up alternate in one matrix.
    """
    inner = found.setdefault(place.module, {})
    for at, expert in enumerate(slot.mine):
        if place.expert not in (None, expert):
            continue
        down, up = _of_expert(low_rank, *both, expert)
        if slot.rule.dim == 1:
            down = down[:, slice(*slot.rule.span(slot.shape[1], slot.group))]
        for number, part in enumerate(place.parts):
            size, many = slot.shape[0], len(place.parts)
            rows = up[number * size : (number + 1) * size]
            if many > 1 and is_interleaved:
                rows = up[number::many]
            if slot.rule.dim == 0:
                rows = rows[slice(*slot.rule.span(size, slot.group))]
            which = 1 if part == "up" else 0
            own = ExpertPart(which, down.contiguous(), rows.contiguous(), low_rank.scale)
            inner.setdefault(at, []).append(own)


def _of_expert(low_rank: LowRank, down: Tensor, up: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """[rank, in] and [out, rank] of one expert."""
    if not low_rank.experts:
        return down, up
    if down.dim() == 3:
        mine = [whole[expert if len(whole) > 1 else 0] for whole in (down, up)]
        return mine[0], mine[1]
    rank = low_rank.rank
    return (
        down[expert * rank : (expert + 1) * rank],
        up.view(len(up), rank, -1)[:, :, expert],
    )


def lacking_experts(
    adapter_config: AdapterConfig, names: NameMap, slots: Mapping[str, ExpertSlot]
) -> Iterator[str]:
    """Names that the configuration claims and that have no tensors: stacks of whole layers, and
    single experts of a layer."""
    stacks, single = set[tuple[str, str]](), dict[tuple[str, str], set[int]]()
    for name in adapter_config.modules:
        place = expert_place(name, names)
        last = name.rpartition(".")[2]
        if place is None:
            continue
        if place.expert is None:
            stacks.add((place.module, last))
        elif last in adapter_config.targets:
            single.setdefault((place.module, last), set()).add(place.expert)
    for last in adapter_config.stacked:
        if last in _PARTS_OF:
            side = "down" if _PARTS_OF[last] == ("",) else "gate_up"
            for module in slots:
                if module.endswith(side) and (module, last) not in stacks:
                    yield f"{module} ({last})"
    for (module, last), there in single.items():
        count = slots[module].count if module in slots else 0
        yield from (f"{module} ({last} of expert {e})" for e in range(count) if e not in there)


def experts_mismatch(name: str, why: str, folder: str, made_for: str) -> ConfigError:
    return ConfigError(
        f"adapter {folder!r} is of another base: {printable(name, 100)}: {why}{made_for}",
        hint="serve the model that it was made for",
    )
