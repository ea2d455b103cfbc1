"""Loads an adapter: reads its tensors and cuts this rank's part for each layer of the model.

An adapter fits completely or is refused: `lora/fit.py`.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.families import FAMILIES
from banyan.formats.gguf import GGUFFile
from banyan.formats.mapped import MappedFile
from banyan.formats.safetensors import SafetensorsFile
from banyan.layers.build import Build
from banyan.layers.weight_slot import WeightSlot
from banyan.lora.adapter_config import (
    KINDS,
    AdapterConfig,
)
from banyan.lora.adapter_files import read_adapter
from banyan.lora.fit import Base, FitCheck, with_full_names
from banyan.lora.layers import (
    EXPANSION_SUFFIX,
    Projection,
    bias_of,
    declare_experts,
    declare_heads,
    enable_experts,
    enable_heads,
    projections,
    wrap,
    wrap_ends,
    wrap_head,
)
from banyan.lora.load_parts import (
    DENSE,
    OUT,
    Found,
    Gains,
    add_expert_parts,
    base_weights,
    bias_part,
    end_part,
    expert_slots,
    own_rows,
    shares_of,
    token_part,
    whole_part,
)
from banyan.lora.targets import HEAD, LoRATargets
from banyan.model_config.model_config import LatentFacts, ModelConfig
from banyan.models.base import Model
from banyan.models.bert import ClassHead, EncoderLM
from banyan.models.decoder import DecoderLM
from banyan.models.weights.names import WeightPlace
from banyan.models.weights.reader import as_tensor
from banyan.ops.api import Ops
from banyan.ops.lora import MAX_PARTS, AdapterPart, RowPart
from banyan.ops.stored import StoredWeight

_DIGEST_BYTES = 16
_BLOCK = 1 << 20
_LATENT = ("squeeze", "query", "latent", "out")
"""Projections of latent attention that are plain matrix products."""
_SHORT = 64
"""Context length of a model that is never run."""


@dataclass(frozen=True)
class LoadedAdapter:
    """Attributes:
    parts: projection of the model -> this rank's matrices.
    experts: the same for projections of experts, by expert.
    rows: changes to whole rows, by projection, "embedding" or a head.
    digest: hash of the files; the same on every rank.
    """

    parts: Mapping[str, list[AdapterPart]]
    experts: Found
    rows: Mapping[str, RowPart]
    digest: str
    rank: int


def enable_lora(model: Model, lora_targets: LoRATargets, ops: Ops) -> None:
    """Wrap the layers of a loaded model that adapters may change."""
    assert isinstance(model, DecoderLM | EncoderLM)
    for name, projection in _open(model, lora_targets):
        wrap(lora_targets, name, projection, ops)
    enable_heads(model, lora_targets, ops)
    enable_experts(model, lora_targets)
    wrap_ends(lora_targets, model.embedding, model.head, ops)
    if HEAD in lora_targets.kinds and isinstance(model.head, ClassHead):
        wrap_head(lora_targets, DENSE, model.head.dense, ops, has_bias=True)
        wrap_head(lora_targets, OUT, model.head.out, ops, has_bias=True)


def base_without_weights(model_config: ModelConfig, ops: Ops) -> Base:
    """What adapters of a model must fit, without loading its weights."""
    model: DecoderLM | EncoderLM
    if model_config.is_encoder:
        model = EncoderLM(model_config, Build(ops))
    else:
        model = DecoderLM(
            model_config, FAMILIES.load(model_config.architecture), Build(ops), _SHORT
        )
    lora_targets = LoRATargets(max_rank=1, capacity=0, kinds=KINDS)
    for name, _ in _open(model, lora_targets):
        lora_targets.add_table(name)
    declare_heads(model, lora_targets)
    declare_experts(model, lora_targets)
    return base_of(model, lora_targets)


def _open(
    model: DecoderLM | EncoderLM, lora_targets: LoRATargets
) -> Iterator[tuple[str, Projection]]:
    """The projections that adapters may change. The sizes of all others are recorded too."""
    named = _named(model.model_config)
    for name, projection in projections(model):
        if stems := named.get(_template(name), ()):
            lora_targets.slots[name] = projection.slots()["weight"]
            if not lora_targets.targets or any(stem in lora_targets.targets for stem in stems):
                yield name, projection


def base_of(model: Model, lora_targets: LoRATargets) -> Base:
    """What adapters of `model` must fit, after its tables have been created."""
    assert isinstance(model, DecoderLM | EncoderLM)
    return Base(
        model.model_config, model.stage, lora_targets, shares_of(model), expert_slots(model)
    )


def load_adapter(path: str, base: Base) -> LoadedAdapter:
    """Load this rank's part of an adapter.

    Raises:
        ConfigError: it cannot be served, or does not fit the model.
    """
    adapter_config = with_full_names(read_adapter(path, base.lora_targets.max_rank), base)
    fit = FitCheck(base, adapter_config)
    found: dict[str, list[AdapterPart]] = {}
    rows: dict[str, RowPart] = {}
    scaled: dict[str, tuple[WeightPlace, Tensor, Tensor]] = {}
    experts: Found = {}
    with _opened(adapter_config) as file:
        for name, low_rank in adapter_config.modules.items():
            if (at := fit.expert_place(name, low_rank)) is not None:
                if at.layer in base.stage:
                    both = tuple(_stored(file, tensor, adapter_config) for tensor in low_rank.names)
                    dense = both[0].dense, both[1].dense
                    slot = base.experts[at.module]
                    add_expert_parts(experts, at, slot, low_rank, dense, fit.is_interleaved)
                continue
            place = fit.place_of(name, low_rank)
            if place is None:
                continue  # of a layer that another rank has
            down, up = (_stored(file, tensor, adapter_config) for tensor in low_rank.names)
            if place.module in base.shares:
                share = base.shares[place.module]
                both = (down.dense, up.dense)
                rows[place.module] = end_part(place.module, share, *both, low_rank.scale)
                continue
            slot = base.lora_targets.slots[place.module]
            if place.module.endswith(EXPANSION_SUFFIX):
                assert base.model_config.latent is not None
                facts = (base.model_config.latent, down, up, low_rank.scale)
                found.update(head_parts(place.module, slot, *facts))
                continue
            mine = _parts(slot, place, down, up, low_rank.scale)
            found.setdefault(place.module, []).extend(mine)
            if low_rank.magnitude:
                change = low_rank.scale * (up.dense.float() @ down.dense.float())
                length = _stored(file, low_rank.magnitude, adapter_config).dense.float()
                scaled[f"{name}.weight"] = (place, change, length)
        for name, whole in adapter_config.saved.items():
            place = fit.place_of_whole(name, whole)
            if not whole.is_copy:
                weight = _stored(file, whole.name, adapter_config).dense
                rows[place.module] = whole_part(place.module, base.shares[place.module], weight)
                if whole.bias:
                    bias = _stored(file, whole.bias, adapter_config).dense
                    rows[bias_of(place.module)] = bias_part(bias)
        for name, tokens in adapter_config.tokens.items():
            weight = _stored(file, tokens.name, adapter_config).dense
            for end in fit.ends_of(name, tokens):
                part = token_part(end, base.shares[end], weight, tokens.ids)
                rows |= {} if part is None else {end: part}
    fit.check_claims()
    rows |= _gains(adapter_config, base, scaled)
    return LoadedAdapter(found, experts, rows, _digest(adapter_config), adapter_config.rank)


def _gains(
    adapter_config: AdapterConfig,
    base: Base,
    scaled: Mapping[str, tuple[WeightPlace, Tensor, Tensor]],
) -> dict[str, RowPart]:
    """Scales that bring the rows of weight plus update to the adapter's magnitudes (DoRA).

    Args:
        scaled: name of a weight -> its place, the adapter's update, the magnitudes.
    """
    if not scaled:
        return {}
    gains = Gains(base.lora_targets.slots, base.lora_targets.biases)
    for name, weight in base_weights(
        base.model_config, set(scaled), printable(adapter_config.path, 200)
    ):
        place, change, length = scaled[name]
        gains.add(place, length / (weight + change).norm(dim=1))
    return gains.parts()


def check_numbers(adapter_config: AdapterConfig) -> None:
    """ConfigError if a number of the adapter is not finite."""
    with _opened(adapter_config) as file:
        for low_rank in adapter_config.modules.values():
            for tensor in filter(None, (*low_rank.names, low_rank.magnitude)):
                _stored(file, tensor, adapter_config)
        for other in (*adapter_config.saved.values(), *adapter_config.tokens.values()):
            _stored(file, other.name, adapter_config)
        for whole in adapter_config.saved.values():
            if whole.bias:
                _stored(file, whole.bias, adapter_config)


def _opened(adapter_config: AdapterConfig) -> MappedFile:
    if adapter_config.format == "gguf":
        return GGUFFile.open(adapter_config.weights, has_words=False)
    return SafetensorsFile.open(adapter_config.weights)


def _stored(file: MappedFile, name: str, adapter_config: AdapterConfig) -> StoredWeight:
    """Copied to memory, as the file may be overwritten while the adapter is used."""
    tensor = file.tensors[name]
    raw = as_tensor(file.bytes_of(name)).clone()
    stored = StoredWeight.from_bytes(tensor.type, tensor.shape, raw)
    if wrong := int((~stored.dense.isfinite()).sum()):
        raise ConfigError(
            f"adapter {printable(adapter_config.path, 200)!r}: {wrong:,} numbers of "
            f"{printable(name, 120)} are not finite (NaN or infinite)",
            hint="its training has failed, or the file is damaged",
        )
    return stored


def check_fit(adapter_config: AdapterConfig, base: Base) -> None:
    """ConfigError with the reason if an adapter does not fit a model."""
    adapter_config = with_full_names(adapter_config, base)
    fit = FitCheck(base, adapter_config)
    for name, low_rank in adapter_config.modules.items():
        if fit.expert_place(name, low_rank) is None:
            fit.place_of(name, low_rank)
    for name, whole in adapter_config.saved.items():
        fit.place_of_whole(name, whole)
    for name, tokens in adapter_config.tokens.items():
        fit.ends_of(name, tokens)
    fit.check_claims()


def _named(model_config: ModelConfig) -> dict[str, list[str]]:
    """Projections of blocks that take adapters, with {} for the layer -> last parts of their names
    in checkpoints."""
    names = FAMILIES.load(model_config.architecture).names["safetensors"]
    found: dict[str, list[str]] = {}
    for template, target in names.modules.items():
        module = target.partition(":")[0]
        is_latent = model_config.latent is not None and ".attention." in module
        if is_latent and module.rpartition(".")[2] not in _LATENT:
            continue
        if module.startswith("layers.{}.") and module.count("{}") == 1:
            found.setdefault(module, []).append(template.rpartition(".")[2])
    return found


def _template(module: str) -> str:
    """ "layers.3.mlp.down" -> "layers.{}.mlp.down"."""
    first, _, rest = module.split(".", 2)
    return f"{first}.{{}}.{rest}"


def _parts(
    slot: WeightSlot, place: WeightPlace, down: StoredWeight, up: StoredWeight, scale: float
) -> list[AdapterPart]:
    """This rank's part of a projection's matrices, by part of the projection."""
    found: list[AdapterPart] = []
    for part, first, rows in own_rows(slot, place, up):
        rule = slot.rules[part]
        matrix = rule.cut(down, slot.group) if rule.dim == 1 else down
        found.append(AdapterPart(first, matrix.dense.contiguous(), rows.dense.contiguous(), scale))
    assert len(found) <= MAX_PARTS
    return found


def _digest(adapter_config: AdapterConfig) -> str:
    """Hash of configuration and weights: equal hashes mean equal outputs."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in adapter_config.files:
        with Path(name).open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def head_parts(
    module: str,
    slot: WeightSlot,
    facts: LatentFacts,
    down: StoredWeight,
    up: StoredWeight,
    scale: float,
) -> Iterator[tuple[str, list[AdapterPart]]]:
    """Matrices for this rank's heads of `kv_b_proj`, by table.

    Latent attention (MLA) absorbs the keys' matrix into the queries and the values' matrix into the
    output, so both are separate per head. The keys' matrix is used transposed, and so are the
    adapter's.

    down: [rank, latent]; up: [heads · (plain_dim + value_dim), rank].
    """
    mine = slot.rules[""].cut(up, slot.group).dense
    heads = mine.view(-1, facts.plain_dim + facts.value_dim, mine.shape[1])
    shared = down.dense.contiguous()
    turned = shared.t().contiguous()
    for head, both in enumerate(heads):
        keys, values = both.split([facts.plain_dim, facts.value_dim])
        yield f"{module}.into.{head}", [AdapterPart(0, keys.t().contiguous(), turned, scale)]
        yield f"{module}.back.{head}", [AdapterPart(0, shared, values.contiguous(), scale)]
