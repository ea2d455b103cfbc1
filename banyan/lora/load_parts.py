"""This rank's parts of an adapter: experts and routers; rows of the embedding and the head; DoRA's
scales, which need base weights.

Checkpoints store experts one by one (`experts.3.gate_proj`) or stacked: PEFT's `target_parameters`,
or three dimensions with the experts first (GGUF, and adapters that share outer matrices).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.families.names import NameMap
from banyan.layers.embedding import Logits
from banyan.layers.linear import ColumnLinear
from banyan.layers.weight_slot import ShardRule, WeightSlot
from banyan.lora.adapter_config import AdapterConfig, LowRank
from banyan.lora.layers import (
    expert_blocks,
)
from banyan.lora.targets import HEADS, own_outputs
from banyan.model_config.model_config import ModelConfig
from banyan.models.bert import ClassHead, EncoderLM
from banyan.models.decoder import DecoderLM
from banyan.models.weights.loader import tensors_of
from banyan.models.weights.names import WeightPlace, place_of
from banyan.moe.layer import ExpertWeights
from banyan.ops.lora import (
    GAIN,
    LOOKED_UP,
    PRODUCT,
    SOME_LOOKED_UP,
    SOME_OUTPUTS,
    ExpertPart,
    RowPart,
)
from banyan.ops.stored import RawTensor, StoredWeight
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


_, DENSE, OUT = HEADS
BODY = "model."
"""Name prefix that a model without a head leaves out."""
MERGE = "merge the adapter into the weights"
RESIZE = "resize the base, save it with the adapter's tokenizer, and serve that"


@dataclass(frozen=True)
class VocabularyShare:
    """The ids of the vocabulary on this rank: first … last − 1.

    Attributes:
        scale: factor on rows of the embedding.
    """

    first: int
    last: int
    scale: float = 1.0


def shares_of(model: DecoderLM | EncoderLM) -> dict[str, VocabularyShare]:
    """Shares of the embedding and the head, whose ids may be classes. An encoder's head can have
    two projections."""
    embedding = model.embedding
    found = {
        "embedding": VocabularyShare(embedding.share.first, embedding.share.last, embedding.scale),
    }
    if isinstance(model.head, Logits):
        found["head"] = VocabularyShare(model.head.share.first, model.head.share.last)
    if isinstance(model.head, ColumnLinear):
        found["head"] = VocabularyShare(0, len(model.model_config.labels))
    if isinstance(model.head, ClassHead):
        found[DENSE] = VocabularyShare(0, model.model_config.hidden_size)
        found[OUT] = VocabularyShare(0, len(model.model_config.labels))
    return found


def check_tokens(model_config: ModelConfig, count: int) -> None:
    """ConfigError, without the adapter's name, if `count` tokens are more than the base model
    has."""
    if count > model_config.vocab_size:
        raise ConfigError(
            f"it adds {count - model_config.vocab_size} tokens to the {model_config.vocab_size} "
            "of the base: texts "
            "and logits have the base's, the same for all requests",
            hint=RESIZE,
        )


def check_end(
    model_config: ModelConfig, module: str, is_whole: bool, rows: int, width: int
) -> None:
    """Check the shape of a change to the embedding or the head.

    Args:
        rows, width: shape of the weight that the adapter was made for.

    Raises:
        ConfigError: without the adapter's name, which the caller adds.
    """
    if module == DENSE:
        if (rows, width) != (model_config.hidden_size, model_config.hidden_size):
            raise ConfigError(
                f"it is of another base: {width} values to {rows} there, "
                f"{model_config.hidden_size} to as "
                "many here",
                hint="serve the model that it was made for",
            )
        return
    if module in ("head", OUT) and model_config.labels:
        _check_classes(model_config, rows, width)
        return
    if module == "head" and model_config.has_normed_head:
        raise ConfigError("the model norms the columns of its head", hint=MERGE)
    if module == "head" and is_whole and model_config.head_bias:
        raise ConfigError("the head has a bias, which it does not bring", hint=MERGE)
    if width == model_config.hidden_size:
        check_tokens(model_config, rows)
        if is_whole and rows < model_config.vocab_size:
            raise ConfigError(
                f"it has {rows} tokens and the base {model_config.vocab_size}, as the base was "
                "cut to the "
                "words of its tokenizer before (resize_token_embeddings): texts and logits have "
                "the base's, the same for all requests",
                hint=RESIZE,
            )
    if (rows, width) != (model_config.vocab_size, model_config.hidden_size):
        raise ConfigError(
            f"it is of another base: {rows} tokens of width {width} there, "
            f"{model_config.vocab_size} of "
            f"{model_config.hidden_size} here",
            hint="serve the model that it was made for",
        )


def _check_classes(model_config: ModelConfig, classes: int, width: int) -> None:
    if (classes, width) == (len(model_config.labels), model_config.hidden_size):
        return
    raise ConfigError(
        f"it scores {classes} classes from {width} values, the base {len(model_config.labels)} "
        "from "
        f"{model_config.hidden_size}",
        hint="serve the model that it was made for, saved with as many classes (num_labels)",
    )


def end_part(
    module: str, share: VocabularyShare, down: Tensor, up: Tensor, scale: float
) -> RowPart:
    """down: [rank, in], up: [out, rank]; for the embedding the ids are the inputs."""
    mine = slice(share.first, share.last)
    if module == "embedding":
        ids = down.float().t()[mine].contiguous()
        wide = (up.float().t() * (scale * share.scale)).contiguous()
        return RowPart(LOOKED_UP, ids, wide, first=share.first)
    return RowPart(PRODUCT, down.float().contiguous(), (up.float()[mine].t() * scale).contiguous())


def whole_part(module: str, share: VocabularyShare, weight: Tensor) -> RowPart:
    """weight: [ids, width], replaces the base model's."""
    mine = (weight[share.first : share.last].float() * share.scale).contiguous()
    kind = LOOKED_UP if module == "embedding" else PRODUCT
    return RowPart(kind, mine, first=share.first, replaces=True)


def bias_part(bias: Tensor) -> RowPart:
    """bias: [outputs], of a replaced weight, whose own bias is left out."""
    shifts = bias.float().contiguous()
    return RowPart(GAIN, torch.ones_like(shifts), shifts=shifts)


def token_part(
    module: str, share: VocabularyShare, weight: Tensor, ids: Sequence[int]
) -> RowPart | None:
    """weight: [tokens, width], replaces the base model's rows of these ids; None if this rank has
    none of them."""
    mine = sorted((token, at) for at, token in enumerate(ids) if share.first <= token < share.last)
    if not mine:
        return None
    rows = (weight[[at for _, at in mine]].float() * share.scale).contiguous()
    if module == "embedding":
        return RowPart(SOME_LOOKED_UP, rows, ids=torch.tensor([token for token, _ in mine]))
    outputs = torch.tensor([token - share.first for token, _ in mine])
    return RowPart(SOME_OUTPUTS, rows, ids=outputs)


def own_rows(
    slot: WeightSlot, place: WeightPlace, whole: StoredWeight
) -> Iterator[tuple[str, int, StoredWeight]]:
    """This rank's rows of a matrix over a projection's outputs: for each part its name, its first
    output on this rank, and its rows."""
    firsts, first = {}, 0
    for part, shape in slot.shapes.items():
        rule = slot.rules[part]
        begin, end = rule.span(shape[0], slot.group) if rule.dim == 0 else (0, shape[0])
        firsts[part], first = first, first + end - begin
    start = 0
    for part in place.parts:
        rule, size = slot.rules[part], slot.shapes[part][0]
        rows = whole.cut(0, start, start + size)
        start += size
        if part in place.paired:
            turned = slot.turning[part]
            rows = rows.pair_halves(turned.head_dim, turned.first, turned.count)
        rows = rule.cut(rows, slot.group) if rule.dim == 0 else rows
        rows = rows.by_piece(slot.pieces[part]) if part in slot.pieces else rows
        yield part, firsts[part], rows


class Gains:
    """DoRA's scales of one adapter by projection."""

    def __init__(self, slots: Mapping[str, WeightSlot], biases: Mapping[str, Tensor | None]):
        self._slots = slots
        self._biases = biases
        self._found: dict[str, Tensor] = {}

    def add(self, place: WeightPlace, gain: Tensor) -> None:
        """gain: [outputs], in the checkpoint's order."""
        slot = self._slots[place.module]
        if place.module not in self._found:
            self._found[place.module] = torch.ones(sum(own_outputs(slot)))
        stored = StoredWeight.from_tensor(gain.float().unsqueeze(1))
        for _, first, rows in own_rows(slot, place, stored):
            mine = rows.dense.flatten()
            self._found[place.module][first : first + len(mine)] = mine

    def parts(self) -> dict[str, RowPart]:
        return {name: self._part(name, gain) for name, gain in self._found.items()}

    def _part(self, name: str, gain: Tensor) -> RowPart:
        """The bias is added by the projection and must not be scaled."""
        bias = self._biases.get(name)
        shifts = torch.zeros_like(gain) if bias is None else (1 - gain) * bias.float()
        return RowPart(GAIN, gain, shifts=shifts)


def base_weights(
    model_config: ModelConfig, names: set[str], folder: str
) -> Iterator[tuple[str, Tensor]]:
    """Weights of the base model's checkpoint by name, one after another, [out, in] fp32.

    Raises:
        ConfigError: some are missing.
    """
    lacking = set(names)
    for short, tensor in tensors_of(model_config):
        is_bare = model_config.pooling is not None and short not in lacking
        name = f"{BODY}{short}" if is_bare else short
        if name in lacking and not isinstance(tensor, RawTensor):
            lacking.remove(name)
            yield name, tensor.dense.float()
    if lacking:
        first = printable(min(lacking), 120)
        raise ConfigError(
            f"adapter {folder!r}: DoRA needs the base's own weights, and its files have no {first}",
            hint=f"serve the checkpoint that it was made for, or {MERGE}",
        )
