"""Step-3.5, 3.7 (Flash): windows of more heads than the full layers have, a gate for each head,
bounds on the gated units of single layers, experts chosen by sigmoid scores with a correction.
Step-3: queries that are squeezed, normed and widened beside one head of keys and values
(arXiv 2507.19427), experts chosen by softmax scores. Of both that is the part for text.

Source: the published configurations of stepfun-ai/Step-3.5-Flash and stepfun-ai/step3, in their
makers' words and in those of transformers; GGUF architecture "step35" (Step-3.5).
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
from banyan.model_config.facts import Facts, shortest
from banyan.model_config.model_config import WINDOW, ExpertFacts, ModelConfig, RopeFacts

_MAX_LAYERS = 1024
_MAX_HEADS = 4096
_LIMIT = 1e6
_FULL, _WINDOW = "full_attention", "sliding_attention"


def _layers(facts: Facts) -> int:
    return facts.integer("num_hidden_layers", 1, _MAX_LAYERS)


def _by_layer(facts: Facts, key: str) -> list[object]:
    """One value for each layer; lists may speak of the layers for drafting too. [] = no list."""
    listed, count = facts.listed(key), _layers(facts)
    if listed and len(listed) not in (count, count + mtp_layers(facts)):
        raise facts.error(key, listed, f"a list of {count} values, one for each layer")
    return listed[:count]


def _counted(facts: Facts, *keys: str, most: int, default: int | None = None) -> int:
    """Under the first of the keys that is there."""
    key = next((key for key in keys if facts.has(key)), keys[0])
    return facts.integer(key, 1, most, default=default)


def _with_groups(facts: Facts) -> dict[str, object]:
    key = "num_attention_groups"
    return {"num_key_value_heads": facts.any(key)} if facts.has(key) else {}


def _respelled(facts: Facts) -> Mapping[str, object]:
    """Kinds, and what rotates, of the layers alone."""
    found, kinds = _with_groups(facts), _by_layer(facts, "layer_types")
    if kinds:
        found["layer_types"] = kinds
    own = facts.part("rope_parameters")
    if own is None or not (own.has(_FULL) or own.has(_WINDOW)):
        kinds = kinds or [_FULL] * _layers(facts)
        found["rope_parameters"] = {
            kind: _rope(facts, kinds, kind) for kind in (_FULL, _WINDOW) if kind in kinds
        }
    return found


def _rope(facts: Facts, kinds: list[object], kind: str) -> dict[str, object]:
    """Of the layers of a kind, which all rotate alike; only full ones are stretched."""
    rope: dict[str, object] = {"rope_type": "default"}
    named = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factors"}
    for ours, theirs in named.items():
        if not facts.has(theirs):
            continue
        value = facts.any(theirs)
        if is_list(value):
            listed = _by_layer(facts, theirs)
            mine = [each for each, of in zip(listed, kinds, strict=True) if of == kind]
            if any(each != mine[0] for each in mine):
                raise facts.error(theirs, value, f"one number for all layers of {kind}")
            value = mine[0]
        rope[ours] = value
    scaling = facts.any("rope_scaling")
    return rope | scaling if kind == _FULL and is_object(scaling) else rope


def _kinds(facts: Facts, num_layers: int) -> Kinds:
    if _WINDOW not in facts.listed("layer_types"):
        return (), 0
    if not facts.has("sliding_window"):
        raise facts.error("sliding_window", None, "a number of tokens")
    return window_where(facts, num_layers, lambda layer: False)


def _window_heads(facts: Facts, model_config: ModelConfig) -> int:
    """Of layers with windows; keys and values are alike in all."""
    key, other = "num_sliding_attention_heads", facts.part("attention_other_setting")
    heads = facts.integer(key, 1, _MAX_HEADS, default=model_config.num_heads)
    if not facts.has(key) and other is not None:
        heads = other.integer("num_attention_heads", 1, _MAX_HEADS, default=model_config.num_heads)
        alike = {
            "num_attention_groups": model_config.num_kv_heads,
            "head_dim": model_config.head_dim,
        }
        for name, value in alike.items():
            if other.has(name) and other.any(name) != value:
                raise other.error(name, other.any(name), f"{value}, as in all layers")
    if heads % model_config.num_kv_heads:
        raise facts.error(
            key, heads, f"a multiple of {model_config.num_kv_heads} key and value heads"
        )
    return heads if WINDOW in model_config.layer_kinds else 0


def _limits(facts: Facts, key: str) -> tuple[float, ...]:
    """0 where a layer has none."""
    found = list[float]()
    for value in _by_layer(facts, key):
        if value is None:
            found.append(0.0)
        elif isinstance(value, int | float) and value is not True and 0 <= value <= _LIMIT:
            found.append(float(value))
        else:
            raise facts.error(key, value, f"null or in [0, {_LIMIT:g}], for each layer")
    return tuple(found) if any(found) else ()


def _dense(facts: Facts, usual: range) -> tuple[int, ...]:
    """The layers without experts, from lists of kinds, of numbers, or a text of numbers.

    Args:
        usual: the layers that have experts where nothing is said.
    """
    count, kinds = _layers(facts), _by_layer(facts, "mlp_layer_types")
    if kinds:
        if not all(kind in ("dense", "sparse") for kind in kinds):
            raise facts.error("mlp_layer_types", kinds, "dense or sparse for each layer")
        return tuple(layer for layer in range(count) if kinds[layer] == "dense")
    key = "moe_layers_enum"
    sparse: object = facts.any(key)
    if isinstance(sparse, str):
        numbers = [text.strip() for text in sparse.split(",", MAX_EXPERTS) if text.strip()]
        if not all(text.isascii() and text.isdigit() and len(text) < 6 for text in numbers):
            raise facts.error(key, sparse, "numbers of layers")
        sparse = [int(text) for text in numbers]
    if sparse is None:
        sparse = list(usual)
    if not is_list(sparse) or not all(type(layer) is int for layer in sparse):
        raise facts.error(key, sparse, "numbers of layers")
    return tuple(layer for layer in range(count) if layer not in sparse)


def _experts(facts: Facts, usual: range) -> ExpertFacts:
    count = _counted(
        facts, "moe_num_experts", "n_routed_experts", "num_local_experts", most=MAX_EXPERTS
    )
    shared = next((k for k in ("share_expert_dim", "share_expert_dims") if facts.has(k)), None)
    return ExpertFacts(
        count,
        _counted(facts, "moe_top_k", "num_experts_per_tok", most=count),
        facts.integer("moe_intermediate_size", 1, MAX_WIDTH),
        dense_layers=_dense(facts, usual),
        shared_inner=facts.integer(shared or "share_expert_dim", 1, MAX_WIDTH),
    )


def _flash(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """Versions 3.5 and 3.7."""
    known = {"moe_router_activation": "sigmoid", "moe_dynamic_exp_p": 1, "use_rope_layers": []}
    for key, value in known.items():
        if facts.has(key) and facts.any(key) != value:
            raise facts.error(key, facts.any(key), repr(value))
    stretched = facts.listed("yarn_only_types")
    if facts.has("rope_scaling") and stretched and stretched != [_FULL]:
        raise facts.error("yarn_only_types", stretched, f"{_FULL} alone")
    experts = replace(
        _experts(facts, range(3, model_config.num_layers)),
        scoring="sigmoid",
        is_normalised=facts.flag("norm_expert_weight", default=True),
        scale=facts.number("moe_router_scaling_factor", 1e-6, 1e6, default=1.0),
        has_correction=facts.flag("use_moe_router_bias", default=True),
        limits=_limits(facts, "swiglu_limits"),
    )
    squared = facts.number("query_pre_attn_scalar", 1e-6, 1e9, default=model_config.head_dim)
    return replace(
        model_config,
        experts=experts,
        window_heads=_window_heads(facts, model_config),
        mlp_limits=_limits(facts, "swiglu_limits_shared"),
        has_head_gates=facts.flag("use_head_wise_attn_gate", default=True),
        attention_scale=squared**-0.5,
        num_mtp_layers=mtp_layers(facts),
    )


def _first_respelled(facts: Facts) -> Mapping[str, object]:
    key = "max_position_embedding"
    length = {"max_position_embeddings": facts.any(key)} if facts.has(key) else {}
    return _with_groups(facts) | length


def _first(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """Version 3, whose configuration gives the layers with experts by number."""
    if model_config.num_kv_heads != 1:
        raise facts.error(
            "num_attention_groups", model_config.num_kv_heads, "1 head of keys and values"
        )
    is_normalised = facts.flag("norm_expert_weight", default=False)
    experts = replace(_experts(facts, range(4, 60)), is_normalised=is_normalised)
    rank = facts.integer("share_q_dim", 1, MAX_WIDTH, default=2048)
    return replace(model_config, experts=experts, query_rank=rank)


def _gguf_list(facts: Facts, key: str, count: int) -> list[object]:
    """One value for each of the first layers; lists may speak of the layers for drafting too."""
    listed = facts.any(key)
    if not is_list(listed):
        return [listed] * count
    if len(listed) < count:
        raise facts.error(key, listed, f"a list of {count} values, one for each layer")
    return listed[:count]


def _gguf_respelled(facts: Facts) -> Mapping[str, object]:
    """The layers for drafting are counted as blocks; heads and kinds are listed layer by layer."""
    blocks = facts.integer("block_count", 1, _MAX_LAYERS)
    count = blocks - facts.integer("nextn_predict_layers", 0, blocks - 1, default=0)
    pattern = "attention.sliding_window_pattern"
    kinds = _gguf_list(facts, pattern, count)
    found: dict[str, object] = {"block_count": count, pattern: kinds}
    key = "attention.head_count"
    heads = _gguf_list(facts, key, count)
    for of_window, name in ((False, key), (True, f"{key}_swa")):
        mine = [
            each for each, is_window in zip(heads, kinds, strict=True) if is_window is of_window
        ]
        if any(each != mine[0] for each in mine):
            raise facts.error(key, heads, "one number for all layers of a kind")
        found[name] = mine[0] if mine else heads[0]
    groups = _gguf_list(facts, f"{key}_kv", count)
    if any(each != groups[0] for each in groups):
        raise facts.error(f"{key}_kv", groups, "one number for all layers")
    return found | {f"{key}_kv": groups[0]}


def _gguf_limits(facts: Facts, key: str, count: int) -> tuple[float, ...]:
    found = list[float]()
    for value in _gguf_list(facts, key, count) if facts.has(key) else ():
        if not isinstance(value, int | float) or not 0 <= value <= _LIMIT:
            raise facts.error(key, value, f"in [0, {_LIMIT:g}], for each layer")
        found.append(shortest(value))
    return tuple(found) if any(found) else ()


def _of_gguf(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """Full layers turn half of what the file says; it divides their frequencies alone."""
    turned = model_config.rotary_dim or model_config.head_dim
    if turned % 4:
        raise facts.error("rope.dimension_count", turned, "a multiple of 4, of which half rotates")
    if facts.integer("moe_every_n_layers", 1, _MAX_LAYERS, default=1) != 1:
        raise facts.error("moe_every_n_layers", facts.any("moe_every_n_layers"), "1")
    theta = facts.number("rope.freq_base_swa", 1.0, 1e12, default=model_config.rope.theta)
    of_window = facts.integer("rope.dimension_count_swa", 2, model_config.head_dim, default=turned)
    pairs = turned // 4
    rope = replace(
        model_config.rope,
        short_factor=model_config.rope.short_factor[:pairs],
        long_factor=model_config.rope.long_factor[:pairs],
    )
    heads = facts.integer("attention.head_count_swa", 1, _MAX_HEADS)
    if heads % model_config.num_kv_heads:
        rule = f"a multiple of {model_config.num_kv_heads} key and value heads"
        raise facts.error("attention.head_count", heads, rule)
    limits = _gguf_limits(facts, "swiglu_clamp_exp", model_config.num_layers)
    return replace(
        model_config,
        rope=rope,
        window_rope=RopeFacts(theta=theta, dim=of_window),
        rotary_dim=turned // 2,
        experts=replace(gguf_corrected(facts, model_config), limits=limits, group_best=1),
        window_heads=heads if WINDOW in model_config.layer_kinds else 0,
        mlp_limits=_gguf_limits(facts, "swiglu_clamp_shexp", model_config.num_layers),
        num_mtp_layers=facts.integer("nextn_predict_layers", 0, _MAX_LAYERS, default=0),
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
_SEES = (
    *("vision_model.", "vit_downsampler", "vit_large_projector."),
    *("model.vision_model.", "model.multi_modal_projector."),
)
"""Weights of what sees."""
_GATES = {"model.layers.{}.self_attn.g_proj": "layers.{}.attention.head_gates"}
_OWN = HUB_NAMES | HUB_QK_NORM | HUB_CORRECTED_EXPERTS | _GATES
"""How transformers 5 holds 3.7 and saves it when asked for its own form, but for a prefix."""

STEP3_FLASH = Family(
    hub=HubForm(
        eps=1e-5,
        head_dim=128,
        context=128000,
        biases=lambda facts: Biases(),
        kinds=_kinds,
        is_nested=True,
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
            | {
                name.replace("model.", "model.language_model.", 1): place
                for name, place in _OWN.items()
            },
            norm_offset=1.0,
            has_more_layers=True,
            unread=_SEES,
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
        biases=lambda facts: Biases(),
        is_nested=True,
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
            unread=_SEES,
        )
    },
)
