"""Loads a model: streams the checkpoint's tensors to the layers and accounts for every one of them.

Every tensor is used or known to be unneeded, and every slot is filled; otherwise the error shows
the first five names.
"""

import difflib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from banyan.base.errors import ConfigError, ModelError
from banyan.base.log import logger, printable
from banyan.base.torch_parts import complete_torch
from banyan.families import FAMILIES
from banyan.families.names import NameMap
from banyan.families.nested import NESTED
from banyan.formats.gguf import growths, kept_bytes
from banyan.layers.build import Build
from banyan.layers.norm import LayerNorm, RMSNorm
from banyan.layers.weight_slot import Layer, WeightSlot
from banyan.model_config.media import MEL, PATCHES
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import Model
from banyan.models.bert import EncoderLM
from banyan.models.decoder import DecoderLM
from banyan.models.mtp import DraftLM
from banyan.models.towers.sound import SoundTower
from banyan.models.towers.vision import VisionTower
from banyan.models.weights.checkpoint_layouts import (
    with_heads_of_keys,
    with_numbered_blocks,
    with_outputs_first,
    with_plain_experts,
    with_plain_states,
    with_rows_by_part,
    with_whole_expansions,
)
from banyan.models.weights.names import WeightPlace, is_ignored, place_of
from banyan.models.weights.quant import open_method
from banyan.models.weights.quant.base import Stored, restored
from banyan.models.weights.quant.fp8 import with_plain_floats
from banyan.models.weights.reader import Transform, read_tensors, tensor_types
from banyan.models.whisper import WhisperLM
from banyan.ops.api import Ops
from banyan.ops.bind import BoundOps
from banyan.ops.stored import RawTensor, StoredWeight

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")

log = logger(__name__)


class BlockWatch(Protocol):
    """Notified when the weights of a block are loaded, so that they can be moved elsewhere
    (offloading)."""

    def begin(self, model: Model) -> None:
        """Called with the model before any weight is loaded."""
        ...

    def filled(self, layer: int) -> None:
        """All weights of a block are loaded."""
        ...


_SHOWN = 5
_DUMMY_STD = 0.02
_DUMMY_DRAWN = 4_194_301
"""Random numbers per tensor; a larger tensor repeats them. A prime, so that no two rows are
equal."""


def load_model(
    model_config: ModelConfig,
    build: Build,
    load_format: str = "auto",
    seed: int = 0,
    served_length: int = 0,
    is_mapped: bool = True,
    transforms: Sequence[Transform] = (),
    watch: BlockWatch | None = None,
) -> Model:
    """Build this rank's part of a model and load its weights.

    Args:
        load_format: "auto" reads the checkpoint; "dummy" draws random weights from `seed`.
        served_length: longest request in tokens; 0 = the model's context length.
        is_mapped: False reads files into memory instead of mapping them.
        transforms: functions applied to the checkpoint's tensors, in order
            (--custom-weight-loader).
        watch: notified when a block is loaded.

    Raises:
        ModelError: missing, unknown or mis-shaped tensors, unreadable files.
        ConfigError: an unknown architecture or load format, or ranks that cannot shard the model.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"unknown load format {load_format!r}", hint=f"choose: {', '.join(LOAD_FORMATS)}"
        )
    if load_format not in ("auto", "dummy", model_config.format):
        raise ConfigError(
            f"load format {load_format!r} was asked for, {model_config.path!r} is "
            f"{model_config.format}",
            hint="leave it at auto",
        )
    family = FAMILIES.load(model_config.architecture)
    model: DecoderLM | EncoderLM | WhisperLM
    if model_config.num_segments:
        model = EncoderLM(model_config, build)
    elif model_config.architecture == "WhisperForCausalLM":
        model = WhisperLM(model_config, build)
    else:
        model = DecoderLM(model_config, family, build, served_length)
    if watch is not None:
        watch.begin(model)
    if load_format == "dummy":
        fill_dummy(model, build, seed, watch)
    else:
        tensors = tensors_of(model_config, is_mapped, transforms, ops=build.ops)
        filling = Filling(model, family.names[model_config.format], watch)
        filling.run(tensors)
        _log_towers(model_config)
        if build.device.type == "cpu" and build.ops.recorder is not None:
            for line in growths(filling.stored_bytes, filling.kept_bytes):
                log.info("%s", line)
    return model.eval()


def tensors_of(
    model_config: ModelConfig,
    is_mapped: bool = True,
    transforms: Sequence[Transform] = (),
    beginning: str = "",
    ops: Ops | None = None,
) -> Iterator[tuple[str, Stored]]:
    """The tensors of a checkpoint as models take them: whole weights under their names.

    Args:
        beginning: only tensors whose names start with it.
        ops: kernels of the target device, which may round activations if the checkpoint asks for
            it, and multiply 8-bit floats; None = neither.

    Raises:
        ModelError: unreadable files.
    """
    tensors = read_tensors(model_config, is_mapped)
    text_name = NESTED[model_config.outer].text_name if model_config.outer else str
    tensors = (
        (name, tensor)
        for name, tensor in tensors
        if (its := text_name(name)) is not None and its.startswith(beginning)
    )
    if model_config.quant is not None:
        tensors = _unquantized(tensors, model_config, ops)
    elif model_config.format == "gguf":
        tensors = _of_gguf(tensors, model_config)
    if model_config.outer:  # only now: settings of quantisation use the checkpoint's names
        tensors = ((text_name(name) or name, tensor) for name, tensor in tensors)
    if model_config.architecture in FAMILIES:
        names, outer = _names_of(model_config), model_config.outer
        if names.has_gates_between:
            tensors = with_plain_experts(tensors)
        if names.grouped or names.transposed:
            tensors = with_rows_by_part(tensors, model_config, names)
        if names.has_inputs_first or (outer and NESTED[outer].may_turn_stacks):
            tensors = with_outputs_first(tensors, model_config)
    if model_config.shared is not None:
        tensors = with_numbered_blocks(tensors, model_config)
    for transform in transforms:
        tensors = transform(tensors)
    kept = ops.kept_floats if isinstance(ops, BoundOps) else ()
    return with_plain_floats(tensors, kept)


def load_tower(
    model_config: ModelConfig,
    build: Build,
    load_format: str = "auto",
    seed: int = 0,
    is_mapped: bool = True,
    transforms: Sequence[Transform] = (),
    kind: str = PATCHES,
) -> VisionTower | SoundTower:
    """Build this rank's part of a tower of a multimodal model and load its weights.

    Args: as for `load_model`; the model config has a `media`.
        kind: of the contents that the tower reads.

    Raises:
        ModelError: missing, unknown or mis-shaped tensors, unreadable files.
    """
    form = NESTED[model_config.outer]
    tower: VisionTower | SoundTower
    if kind == MEL:
        tower, names, others = SoundTower(model_config, build), form.sound, form.tower
    else:
        tower, names, others = VisionTower(model_config, build), form.tower, form.sound
    assert names is not None
    if load_format == "dummy":
        fill_dummy(tower, build, seed)
    else:
        tensors = _tower_tensors(model_config, is_mapped, transforms, build.ops)
        if others is not None:
            tensors = ((n, t) for n, t in tensors if place_of(n, others) is None)
        Filling(tower, names).run(_of_blocks(tensors, names, tower.blocks))
    return tower.eval()


def _tower_tensors(
    model_config: ModelConfig, is_mapped: bool, transforms: Sequence[Transform], ops: Ops
) -> Iterator[tuple[str, Stored]]:
    """The tensors of the tower, without "model." in front of their names."""
    tower_name = NESTED[model_config.outer].tower_name
    tensors = (
        (name, tensor)
        for name, tensor in read_tensors(model_config, is_mapped)
        if tower_name(name) is not None
    )
    if model_config.quant is not None:
        tensors = _unquantized(tensors, model_config, ops)
    tensors = ((tower_name(name) or name, tensor) for name, tensor in tensors)
    for transform in transforms:
        tensors = transform(tensors)
    kept = ops.kept_floats if isinstance(ops, BoundOps) else ()
    return with_plain_floats(tensors, kept)


def _of_blocks(
    tensors: Iterator[tuple[str, Stored]], names: NameMap, blocks: int
) -> Iterator[tuple[str, Stored]]:
    """Without the blocks after the one whose outputs are the features, and with parameters that
    are stored as a batch of one as they are."""
    for name, tensor in tensors:
        place = place_of(name, names)
        is_block = place is not None and place.module.startswith("layers.")
        if place is not None and is_block and block_of(place.module) >= blocks:
            continue
        if isinstance(tensor, StoredWeight) and not name.endswith((".weight", ".bias")):
            while tensor.shape[:1] == (1,):
                tensor = tensor.at(0)
        yield name, tensor


def _unquantized(
    tensors: Iterator[tuple[str, Stored]], model_config: ModelConfig, ops: Ops | None
) -> Iterator[tuple[str, Stored]]:
    """Weights of a quantised checkpoint as their method describes them."""
    assert model_config.quant is not None
    rounded = ops.rounded_types if isinstance(ops, BoundOps) else ()
    method = open_method(model_config.quant, model_config.path, rounded)
    return restored(tensors, tensor_types(model_config), method, model_config.quant.method)


def _of_gguf(
    tensors: Iterator[tuple[str, Stored]], model_config: ModelConfig
) -> Iterator[tuple[str, Stored]]:
    if model_config.latent is not None:
        tensors = with_whole_expansions(tensors)
    if model_config.state is not None:
        tensors = with_plain_states(tensors, model_config.state)
        if model_config.state.is_tiled:
            tensors = with_heads_of_keys(tensors, model_config.state)
    return tensors


def _log_towers(model_config: ModelConfig) -> None:
    """Log how many weights of a multimodal checkpoint are left out."""
    if not model_config.outer or model_config.media is not None:
        return
    nested = NESTED[model_config.outer]
    names = tensor_types(model_config)
    left = [name for name in names if nested.text_name(name) is None]
    log.info(
        "%s is served as a text model, %s: %d of its %d weights are left out (%s)",
        model_config.outer,
        model_config.architecture,
        len(left),
        len(names),
        ", ".join(prefix.rstrip(".") for prefix in nested.towers),
    )


def _names_of(model_config: ModelConfig) -> NameMap:
    return FAMILIES.load(model_config.architecture).names[model_config.format]


def rows_of(tensors: Iterator[tuple[str, Stored]], wanted: str, rows: int, most: int) -> object:
    """The first rows of a tensor as nested lists of numbers.

    Raises:
        ConfigError: no tensor has the name, or there are more than `most` numbers.
    """
    names: list[str] = []
    for name, tensor in tensors:
        names.append(name)
        if name != wanted:
            continue
        shape = (min(rows, tensor.shape[0]), *tensor.shape[1:]) if tensor.shape else ()
        if math.prod(shape) > most:
            raise ConfigError(
                f"{math.prod(shape)} numbers are {list(shape)} of it; at most {most} are returned",
                hint="send a smaller truncate_size",
            )
        weight = _weight(name, tensor)
        return (weight.cut(0, 0, shape[0]) if shape else weight).dense.float().tolist()
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    raise ConfigError(
        f"no tensor of the checkpoint is called {printable(wanted, 120)!r}",
        hint=f"near are: {_first(near)}" if near else f"it has: {_first(names)}",
    )


class Filling:
    """One pass over a checkpoint that fills a model."""

    def __init__(
        self,
        model: DecoderLM | EncoderLM | WhisperLM | DraftLM | VisionTower | SoundTower,
        names: NameMap,
        watch: BlockWatch | None = None,
    ) -> None:
        self.model = model
        self.watch = watch
        self.names = names
        self.unpacked: list[str] = []
        self.layers = {
            name: module for name, module in model.named_modules() if isinstance(module, Layer)
        }
        self.open: dict[tuple[str, str], WeightSlot] = {
            (name, slot): declared
            for name, layer in self.layers.items()
            for slot, declared in layer.slots().items()
        }
        self.declared = dict(self.open)
        self.open_of_block = Counter(block_of(name) for name, _ in self.open)
        whole = range(model.model_config.num_layers)
        self.stage = model.stage if isinstance(model, DecoderLM) else whole
        self.waiting: dict[tuple[str, str], dict[str, StoredWeight]] = {}
        self.unknown: list[str] = []
        self.stored_bytes: Counter[str] = Counter()
        self.kept_bytes: Counter[str] = Counter()

    def run(self, tensors: Iterator[tuple[str, Stored]]) -> None:
        for name, tensor in tensors:
            if name == self.names.rope_divisors:
                self._divide(_weight(name, tensor))
                continue
            place = self._place_of(name)
            if place is not None and place.module == "head" and self._is_needless_head():
                continue
            for part, mine in _by_expert(place, tensor):
                self._offer(name, part, mine)
        self._settle()

    def _offer(self, name: str, place: WeightPlace | None, tensor: Stored) -> None:
        """Take a tensor, unless it belongs to other ranks or is not needed."""
        if place is not None and self._is_elsewhere(place):
            return
        if place is None or not self._is_open(place):
            is_known = is_ignored(name, self.names, self.model.model_config.num_layers)
            if not is_known and not self._is_empty_bias(place, tensor):
                self.unknown.append(name)
            return
        self._take(name, place, _weight(name, tensor))

    def _is_empty_bias(self, place: WeightPlace | None, tensor: Stored) -> bool:
        """A bias of zeros for a projection without bias; some quantisers write one for every
        weight."""
        if place is None or place.slot != "bias" or isinstance(tensor, RawTensor):
            return False
        has_weight = (place.module, "weight") in self.declared
        has_bias = (place.module, "bias") in self.declared
        return has_weight and not has_bias and not bool(tensor.dense.any())

    def _place_of(self, name: str) -> WeightPlace | None:
        """The place of a tensor. Embedding models may be stored without the prefix of their
        body."""
        place, alone = place_of(name, self.names), self.names.optional_part
        if alone and place is not None and place.module not in self.layers:
            return replace(place, module=place.module.replace(alone, "", 1))
        if place is None and self.model.model_config.pooling is not None:
            place = place_of(f"model.{name}", self.names)
        return place

    def _is_needless_head(self) -> bool:
        """A copy of the embedding (tied head), or the head of an embedding model."""
        model_config = self.model.model_config
        return model_config.tie_embeddings or (
            model_config.pooling is not None and not model_config.labels
        )

    def _is_open(self, place: WeightPlace) -> bool:
        """Whether the model has this slot with these parts, and none of them is loaded yet."""
        key = (place.module, place.slot)
        filled = self.waiting.get(key, {})
        return key in self.open and all(
            part in self.open[key].shapes and part not in filled for part in place.parts
        )

    def _is_elsewhere(self, place: WeightPlace) -> bool:
        """Whether other ranks take it."""
        layer, beyond = (
            block_of(place.module),
            self.model.model_config.num_layers,
        )  # later layers are MTP layers
        if 0 <= layer < beyond and layer not in self.stage:
            return True
        slot = self.declared.get((place.module, place.slot))
        return slot is not None and all(part in slot.elsewhere for part in place.parts)

    def _divide(self, divisors: StoredWeight) -> None:
        """Divide the plain RoPE frequencies; if the model config knows the rule, it has done so
        already."""
        assert isinstance(self.model, DecoderLM)
        for rope, rotary in self.model.rotaries.items():
            if rope.kind == "default":
                rotary.divide(divisors.dense)

    def _take(self, name: str, place: WeightPlace, tensor: StoredWeight) -> None:
        shapes = self.open[place.module, place.slot].shapes
        declared = [shapes[part] for part in place.parts]
        whole = (sum(shape[0] for shape in declared), *declared[0][1:])
        if whole == (1, *tensor.shape):
            tensor = tensor.as_row
        elif tensor.shape == (1, *whole):
            tensor = tensor.at(0)
        if place.module != "embedding" or self.model.model_config.tie_embeddings:
            self.stored_bytes[tensor.type] += tensor.raw.numel()
            self.kept_bytes[tensor.type] += kept_bytes(tensor.type, tensor.shape)
        if tensor.shape != whole:
            raise ModelError(
                f"tensor {printable(name)!r} has shape {list(tensor.shape)}, the model's "
                f"configuration asks for {list(whole)}",
                hint="the weights and the configuration do not belong together",
            )
        start, turning = 0, self.open[place.module, place.slot].turning
        for part, shape in zip(place.parts, declared, strict=True):
            mine = tensor if len(declared) == 1 else tensor.cut(0, start, start + shape[0])
            start += shape[0]
            if part in place.paired:
                turned = turning[part]
                mine = mine.pair_halves(turned.head_dim, turned.first, turned.count)
            self._hand_over(place.module, place.slot, part, mine)
        if place.module == "embedding" and self.model.model_config.tie_embeddings:
            self._hand_over("head", place.slot, "", tensor)

    def _hand_over(self, module: str, slot: str, part: str, tensor: StoredWeight) -> None:
        """Fill a slot of a layer as soon as all its parts are loaded."""
        key, layer = (module, slot), self.layers[module]
        if not self.open[key].keeps_blocks(part, tensor):
            self.unpacked.append(f"{module}.{slot}")
        kinds = RMSNorm if self.names.is_rms_offset else RMSNorm | LayerNorm
        if self.names.norm_offset and slot == "weight" and isinstance(layer, kinds):
            tensor = StoredWeight.from_tensor(tensor.dense.float() + self.names.norm_offset)
        parts = self.waiting.setdefault(key, {})
        parts[part] = tensor
        shapes = self.open[key].shapes
        if len(parts) == len(shapes):
            layer.fill(slot, [parts[part] for part in shapes])
            del self.open[key], self.waiting[key]
            block = block_of(module)
            self.open_of_block[block] -= 1
            if self.watch is not None and block >= 0 and not self.open_of_block[block]:
                self.watch.filled(block)

    def _settle(self) -> None:
        if self.unpacked:
            log.warning(
                "%d quantised weights are unpacked to fp32, because ranks share them within a "
                "block: %s",
                len(self.unpacked),
                _first(self.unpacked),
            )
        if self.unknown:
            raise ModelError(
                f"{len(self.unknown)} tensors of the checkpoint have no place in "
                f"{self.model.model_config.architecture}: {_first(self.unknown)}",
                hint="the configuration does not describe these weights, or the family differs",
            )
        missing = [
            ".".join((module, slot)) + (f" ({part})" if part else "")
            for (module, slot), declared in self.open.items()
            for part in declared.shapes
            if part not in self.waiting.get((module, slot), {})
        ]
        if missing:
            raise ModelError(
                f"the checkpoint lacks {len(missing)} weights of "
                f"{self.model.model_config.architecture}: {_first(missing)}",
                hint="a file of the checkpoint is missing, or the configuration asks for too much",
            )


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name) for name in names[:_SHOWN]) + more


def block_of(module: str) -> int:
    """The number of the block that a module is in; -1 = none."""
    first, _, rest = module.partition(".")
    return int(rest.partition(".")[0]) if first == "layers" else -1


def fill_dummy(
    model: DecoderLM | EncoderLM | WhisperLM | DraftLM | VisionTower | SoundTower,
    build: Build,
    seed: int,
    watch: BlockWatch | None = None,
) -> None:
    """Fill with random weights of the checkpoint's shapes: norms around one, others small, ties
    kept."""
    complete_torch()  # which random generators need
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...], mean: float) -> StoredWeight:
        if build.device.type == "meta":
            return StoredWeight.from_tensor(
                torch.empty(shape, dtype=build.dtype, device=build.device)
            )
        count = math.prod(shape)
        drawn = torch.empty(min(count, _DUMMY_DRAWN)).normal_(mean, _DUMMY_STD, generator=generator)
        drawn = drawn.to(build.dtype)
        if count > len(drawn):
            drawn = drawn.repeat(-(-count // len(drawn)))[:count]
        return StoredWeight.from_tensor(drawn.view(shape))

    embedding: list[StoredWeight] = []
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, Layer)]
    open_of_block = Counter(block_of(name) for name, _ in layers)
    for name, module in layers:
        for slot, declared in module.slots().items():
            if name == "head" and model.model_config.tie_embeddings:
                module.fill(slot, embedding)
                continue
            is_norm = isinstance(module, RMSNorm | LayerNorm) and slot == "weight"
            mean = 1.0 if is_norm else 0.0
            parts = [random(shape, mean) for shape in declared.shapes.values()]
            embedding = parts if name == "embedding" else embedding
            module.fill(slot, parts)
        block = block_of(name)
        open_of_block[block] -= 1
        if watch is not None and block >= 0 and not open_of_block[block]:
            watch.filled(block)


def _weight(name: str, tensor: Stored) -> StoredWeight:
    """Raises:
    ModelError: raw numbers that no quantisation method has turned into a weight.
    """
    if isinstance(tensor, RawTensor):
        raise ModelError(
            f"tensor {printable(name)!r} holds numbers of type {tensor.type}, which are no "
            "weights by themselves",
            hint="the checkpoint is quantised and its config.json lacks "
            "quantization_config, or that does not describe this tensor",
        )
    return tensor


def _by_expert(
    place: WeightPlace | None, tensor: Stored
) -> Iterator[tuple[WeightPlace | None, Stored]]:
    """The places of a tensor that stacks experts ("*" in a part), each with its slice; other
    tensors are yielded unchanged."""
    is_stacked = place is not None and any("*" in part for part in place.parts)
    if place is None or not is_stacked or isinstance(tensor, RawTensor) or len(tensor.shape) < 2:
        yield place, tensor
        return
    for expert in range(tensor.shape[0]):
        parts, paired = (
            tuple(part.replace("*", str(expert)) for part in named)
            for named in (place.parts, place.paired)
        )
        yield replace(place, parts=parts, paired=paired), tensor.at(expert)
