"""Step-3.5 and 3.7 (Flash): window layers with more heads than full layers, a gate per head,
clamped gated units in some layers, experts with corrected sigmoid scores. Step-3
(arXiv 2507.19427): low-rank queries with one KV head, experts with softmax scores. Vision towers
are not loaded.

Source: the published configurations of stepfun-ai/Step-3.5-Flash and stepfun-ai/step3, with their
makers' keys and with transformers' keys; GGUF architecture "step35" (Step-3.5).
"""

from collections.abc import Container, Mapping
from dataclasses import replace

from banyan.base.json_types import is_list, is_object
from banyan.families.base import (
    MAX_WIDTH,
    Biases,
    Family,
    GgufForm,
    HubForm,
    Kinds,
    window_where,
)
from banyan.families.experts import MAX_EXPERTS, gguf_corrected, mtp_layers
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_CORRECTED_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields, shortest
from banyan.model_config.model_config import WINDOW, ExpertFacts, ModelConfig, RopeFacts

_MAX_LAYERS = 1024
_MAX_HEADS = 4096
_LIMIT = 1e6
_FULL, _WINDOW = "full_attention", "sliding_attention"


def _layers(fields: CheckpointFields) -> int:
    return fields.integer("num_hidden_layers", 1, _MAX_LAYERS)


def _by_layer(fields: CheckpointFields, key: str) -> list[object]:
    """One value per layer, without MTP layers; [] = no list."""
    listed, count = fields.listed(key), _layers(fields)
    if listed and len(listed) not in (count, count + mtp_layers(fields)):
        raise fields.error(key, listed, f"a list of {count} values, one for each layer")
    return listed[:count]


def _counted(fields: CheckpointFields, *keys: str, most: int, default: int | None = None) -> int:
    """A number, under the first of the keys that is present."""
    key = next((key for key in keys if fields.has(key)), keys[0])
    return fields.integer(key, 1, most, default=default)


def _with_groups(fields: CheckpointFields) -> dict[str, object]:
    key = "num_attention_groups"
    return {"num_key_value_heads": fields.any(key)} if fields.has(key) else {}


def _respelled(fields: CheckpointFields) -> Mapping[str, object]:
    """Layer kinds and RoPE in the usual keys, without MTP layers."""
    found, kinds = _with_groups(fields), _by_layer(fields, "layer_types")
    if kinds:
        found["layer_types"] = kinds
    own = fields.part("rope_parameters")
    if own is None or not (own.has(_FULL) or own.has(_WINDOW)):
        kinds = kinds or [_FULL] * _layers(fields)
        found["rope_parameters"] = {
            kind: _rope(fields, kinds, kind) for kind in (_FULL, _WINDOW) if kind in kinds
        }
    return found


def _rope(fields: CheckpointFields, kinds: list[object], kind: str) -> dict[str, object]:
    """RoPE of the layers of one kind, which must be equal; only full layers are scaled."""
    rope: dict[str, object] = {"rope_type": "default"}
    named = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factors"}
    for ours, theirs in named.items():
        if not fields.has(theirs):
            continue
        value = fields.any(theirs)
        if is_list(value):
            listed = _by_layer(fields, theirs)
            mine = [each for each, of in zip(listed, kinds, strict=True) if of == kind]
            if any(each != mine[0] for each in mine):
                raise fields.error(theirs, value, f"one number for all layers of {kind}")
            value = mine[0]
        rope[ours] = value
    scaling = fields.any("rope_scaling")
    return rope | scaling if kind == _FULL and is_object(scaling) else rope


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    if _WINDOW not in fields.listed("layer_types"):
        return (), 0
    if not fields.has("sliding_window"):
        raise fields.error("sliding_window", None, "a number of tokens")
    return window_where(fields, num_layers, lambda layer: False)


def _window_heads(fields: CheckpointFields, model_config: ModelConfig) -> int:
    """Query heads of window layers; KV heads are the same in all layers."""
    key, other = "num_sliding_attention_heads", fields.part("attention_other_setting")
    heads = fields.integer(key, 1, _MAX_HEADS, default=model_config.num_heads)
    if not fields.has(key) and other is not None:
        heads = other.integer("num_attention_heads", 1, _MAX_HEADS, default=model_config.num_heads)
        alike = {
            "num_attention_groups": model_config.num_kv_heads,
            "head_dim": model_config.head_dim,
        }
        for name, value in alike.items():
            if other.has(name) and other.any(name) != value:
                raise other.error(name, other.any(name), f"{value}, as in all layers")
    if heads % model_config.num_kv_heads:
        raise fields.error(
            key, heads, f"a multiple of {model_config.num_kv_heads} key and value heads"
        )
    return heads if WINDOW in model_config.layer_kinds else 0


def _limits(fields: CheckpointFields, key: str) -> tuple[float, ...]:
    """Clamp by layer; 0 = none."""
    found = list[float]()
    for value in _by_layer(fields, key):
        if value is None:
            found.append(0.0)
        elif isinstance(value, int | float) and value is not True and 0 <= value <= _LIMIT:
            found.append(float(value))
        else:
            raise fields.error(key, value, f"null or in [0, {_LIMIT:g}], for each layer")
    return tuple(found) if any(found) else ()


def _dense(fields: CheckpointFields, usual: range) -> tuple[int, ...]:
    """The layers without experts, from a list of kinds, a list of numbers, or a text of numbers.

    Args:
        usual: default of the layers with experts.
    """
    count, kinds = _layers(fields), _by_layer(fields, "mlp_layer_types")
    if kinds:
        if not all(kind in ("dense", "sparse") for kind in kinds):
            raise fields.error("mlp_layer_types", kinds, "dense or sparse for each layer")
        return tuple(layer for layer in range(count) if kinds[layer] == "dense")
    key = "moe_layers_enum"
    sparse: object = fields.any(key)
    if isinstance(sparse, str):
        numbers = [text.strip() for text in sparse.split(",", MAX_EXPERTS) if text.strip()]
        if not all(text.isascii() and text.isdigit() and len(text) < 6 for text in numbers):
            raise fields.error(key, sparse, "numbers of layers")
        sparse = [int(text) for text in numbers]
    if sparse is None:
        sparse = list(usual)
    if not is_list(sparse) or not all(type(layer) is int for layer in sparse):
        raise fields.error(key, sparse, "numbers of layers")
    return tuple(layer for layer in range(count) if layer not in sparse)


def _experts(fields: CheckpointFields, usual: range) -> ExpertFacts:
    count = _counted(
        fields, "moe_num_experts", "n_routed_experts", "num_local_experts", most=MAX_EXPERTS
    )
    shared = next((k for k in ("share_expert_dim", "share_expert_dims") if fields.has(k)), None)
    return ExpertFacts(
        count,
        _counted(fields, "moe_top_k", "num_experts_per_tok", most=count),
        fields.integer("moe_intermediate_size", 1, MAX_WIDTH),
        dense_layers=_dense(fields, usual),
        shared_inner=fields.integer(shared or "share_expert_dim", 1, MAX_WIDTH),
    )


def _flash(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Add the fields of Step-3.5 and 3.7."""
    known = {"moe_router_activation": "sigmoid", "moe_dynamic_exp_p": 1, "use_rope_layers": []}
    for key, value in known.items():
        if fields.has(key) and fields.any(key) != value:
            raise fields.error(key, fields.any(key), repr(value))
    stretched = fields.listed("yarn_only_types")
    if fields.has("rope_scaling") and stretched and stretched != [_FULL]:
        raise fields.error("yarn_only_types", stretched, f"{_FULL} alone")
    experts = replace(
        _experts(fields, range(3, model_config.num_layers)),
        scoring="sigmoid",
        is_normalised=fields.flag("norm_expert_weight", default=True),
        scale=fields.number("moe_router_scaling_factor", 1e-6, 1e6, default=1.0),
        has_correction=fields.flag("use_moe_router_bias", default=True),
        limits=_limits(fields, "swiglu_limits"),
    )
    squared = fields.number("query_pre_attn_scalar", 1e-6, 1e9, default=model_config.head_dim)
    return replace(
        model_config,
        experts=experts,
        window_heads=_window_heads(fields, model_config),
        mlp_limits=_limits(fields, "swiglu_limits_shared"),
        has_head_gates=fields.flag("use_head_wise_attn_gate", default=True),
        attention_scale=squared**-0.5,
        num_mtp_layers=mtp_layers(fields),
    )


def _first_respelled(fields: CheckpointFields) -> Mapping[str, object]:
    key = "max_position_embedding"
    length = {"max_position_embeddings": fields.any(key)} if fields.has(key) else {}
    return _with_groups(fields) | length


def _first(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Add the fields of Step-3, which lists the layers with experts by number."""
    if model_config.num_kv_heads != 1:
        raise fields.error(
            "num_attention_groups", model_config.num_kv_heads, "1 head of keys and values"
        )
    is_normalised = fields.flag("norm_expert_weight", default=False)
    experts = replace(_experts(fields, range(4, 60)), is_normalised=is_normalised)
    rank = fields.integer("share_q_dim", 1, MAX_WIDTH, default=2048)
    return replace(model_config, experts=experts, query_rank=rank)


def _gguf_list(fields: CheckpointFields, key: str, count: int) -> list[object]:
    """One value for each of the first `count` layers; lists may include MTP layers."""
    listed = fields.any(key)
    if not is_list(listed):
        return [listed] * count
    if len(listed) < count:
        raise fields.error(key, listed, f"a list of {count} values, one for each layer")
    return listed[:count]


def _gguf_respelled(fields: CheckpointFields) -> Mapping[str, object]:
    """Subtract MTP layers from the blocks; merge per-layer lists of heads and kinds."""
    blocks = fields.integer("block_count", 1, _MAX_LAYERS)
    count = blocks - fields.integer("nextn_predict_layers", 0, blocks - 1, default=0)
    pattern = "attention.sliding_window_pattern"
    kinds = _gguf_list(fields, pattern, count)
    found: dict[str, object] = {"block_count": count, pattern: kinds}
    key = "attention.head_count"
    heads = _gguf_list(fields, key, count)
    for of_window, name in ((False, key), (True, f"{key}_swa")):
        mine = [
            each for each, is_window in zip(heads, kinds, strict=True) if is_window is of_window
        ]
        if any(each != mine[0] for each in mine):
            raise fields.error(key, heads, "one number for all layers of a kind")
        found[name] = mine[0] if mine else heads[0]
    groups = _gguf_list(fields, f"{key}_kv", count)
    if any(each != groups[0] for each in groups):
        raise fields.error(f"{key}_kv", groups, "one number for all layers")
    return found | {f"{key}_kv": groups[0]}


def _gguf_limits(fields: CheckpointFields, key: str, count: int) -> tuple[float, ...]:
    found = list[float]()
    for value in _gguf_list(fields, key, count) if fields.has(key) else ():
        if not isinstance(value, int | float) or not 0 <= value <= _LIMIT:
            raise fields.error(key, value, f"in [0, {_LIMIT:g}], for each layer")
        found.append(shortest(value))
    return tuple(found) if any(found) else ()


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Full layers rotate half of rope.dimension_count; divisors apply to full layers only."""
    turned = model_config.rotary_dim or model_config.head_dim
    if turned % 4:
        raise fields.error("rope.dimension_count", turned, "a multiple of 4: half of it rotates")
    if fields.integer("moe_every_n_layers", 1, _MAX_LAYERS, default=1) != 1:
        raise fields.error("moe_every_n_layers", fields.any("moe_every_n_layers"), "1")
    theta = fields.number("rope.freq_base_swa", 1.0, 1e12, default=model_config.rope.theta)
    of_window = fields.integer("rope.dimension_count_swa", 2, model_config.head_dim, default=turned)
    pairs = turned // 4
    rope = replace(
        model_config.rope,
        short_factor=model_config.rope.short_factor[:pairs],
        long_factor=model_config.rope.long_factor[:pairs],
    )
    heads = fields.integer("attention.head_count_swa", 1, _MAX_HEADS)
    if heads % model_config.num_kv_heads:
        rule = f"a multiple of {model_config.num_kv_heads} key and value heads"
        raise fields.error("attention.head_count", heads, rule)
    limits = _gguf_limits(fields, "swiglu_clamp_exp", model_config.num_layers)
    return replace(
        model_config,
        rope=rope,
        window_rope=RopeFacts(theta=theta, dim=of_window),
        rotary_dim=turned // 2,
        experts=replace(gguf_corrected(fields, model_config), limits=limits, group_best=1),
        window_heads=heads if WINDOW in model_config.layer_kinds else 0,
        mlp_limits=_gguf_limits(fields, "swiglu_clamp_shexp", model_config.num_layers),
        num_mtp_layers=fields.integer("nextn_predict_layers", 0, _MAX_LAYERS, default=0),
    )


def _of_tensors(names: Container[str], model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, has_head_gates="blk.0.attn_gate.weight" in names)


_NAMES = HUB_NAMES | {
    "model.layers.{}.moe.gate": "layers.{}.mlp.router",
    "model.layers.{}.moe.gate_proj": "layers.{}.mlp.experts.gate_up:gate*",
    "model.layers.{}.moe.up_proj": "layers.{}.mlp.experts.gate_up:up*",
    "model.layers.{}.moe.down_proj": "layers.{}.mlp.experts.down:*",
    "model.layers.{}.share_expert.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    "model.layers.{}.share_expert.up_proj": "layers.{}.mlp.shared.gate_up:up",
    "model.layers.{}.share_expert.down_proj": "layers.{}.mlp.shared.down",
}
_GATES = {"model.layers.{}.self_attn.g_proj": "layers.{}.attention.head_gates"}
_OWN = HUB_NAMES | HUB_QK_NORM | HUB_CORRECTED_EXPERTS | _GATES
"""Names of 3.7 as transformers 5 saves it."""

STEP3_FLASH = Family(
    hub=HubForm(
        eps=1e-5,
        head_dim=128,
        context=128000,
        biases=lambda fields: Biases(),
        kinds=_kinds,
        respelled=_respelled,
        more=_flash,
    ),
    gguf=GgufForm(
        "Step3p5ForCausalLM",
        respelled=_gguf_respelled,
        has_divisors=True,
        more=_of_gguf,
        of_tensors=_of_tensors,
    ),
    names={
        "gguf": NameMap(
            GGUF_NAMES
            | GGUF_QK_NORM
            | GGUF_EXPERTS
            | {"blk.{}.attn_gate": "layers.{}.attention.head_gates"},
            ignored=("rope_freqs.weight",),
            has_more_layers=True,
        ),
        "safetensors": NameMap(
            _NAMES
            | HUB_QK_NORM
            | _GATES
            | {"model.layers.{}.moe.router_bias": "layers.{}.mlp.router.correction"}
            | _OWN,
            norm_offset=1.0,
            has_more_layers=True,
        ),
    },
    qk_norm="head",
)

STEP3 = Family(
    hub=HubForm(
        eps=1e-5,
        head_dim=256,
        rope_theta=5e5,
        context=65536,
        biases=lambda fields: Biases(),
        respelled=_first_respelled,
        more=_first,
    ),
    names={
        "safetensors": NameMap(
            _NAMES
            | {
                "model.layers.{}.self_attn.inter_norm": "layers.{}.attention.query_norm",
                "model.layers.{}.self_attn.wq": "layers.{}.attention.query",
            },
        )
    },
)
