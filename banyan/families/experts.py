"""Readers of mixture-of-experts and latent-attention fields, shared by families.

Source: the documented fields and defaults of the families' configuration classes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from banyan.model_config.checkpoint_fields import CheckpointFields, shortest
from banyan.model_config.model_config import ExpertFacts, LatentFacts, ModelConfig

MAX_EXPERTS = 1 << 16
_MAX_WIDTH = 1 << 20
_SOFTMAX, _SIGMOID = 1, 2
"""GGUF's numbers of the scoring functions."""


def _count(fields: CheckpointFields, *keys: str) -> int:
    """The number of experts, under the first of the keys that is present."""
    key = next((key for key in keys if fields.has(key)), keys[0])
    return fields.integer(key, 1, MAX_EXPERTS)


def _per_token(fields: CheckpointFields, count: int, default: int | None = None) -> int:
    return fields.integer("num_experts_per_tok", 1, count, default=default)


def _inner(fields: CheckpointFields, key: str = "moe_intermediate_size") -> int:
    return fields.integer(key, 1, _MAX_WIDTH)


def mixtral(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, experts=mixtral_experts(fields, model_config))


def mixtral_experts(fields: CheckpointFields, model_config: ModelConfig) -> ExpertFacts:
    count = _count(fields, "num_local_experts")
    return ExpertFacts(count, _per_token(fields, count, 2), model_config.intermediate_size)


def olmoe(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    if fields.has("clip_qkv"):
        raise fields.error("clip_qkv", fields.any("clip_qkv"), "null: clipping is not supported")
    count = _count(fields, "num_experts", "num_local_experts")
    is_normalised = fields.flag("norm_topk_prob", default=False)
    per_token = _per_token(fields, count, 8)
    experts = ExpertFacts(
        count, per_token, model_config.intermediate_size, is_normalised=is_normalised
    )
    return replace(model_config, experts=experts)


def qwen_moe(
    fields: CheckpointFields,
    model_config: ModelConfig,
    has_shared: bool = False,
    is_normalised: bool = False,
) -> ModelConfig:
    """A period and a list of exceptions name the layers with experts."""
    count = _count(fields, "num_experts", "num_local_experts")
    period = fields.integer("decoder_sparse_step", 1, 1 << 16, default=1)
    plain = fields.listed("mlp_only_layers")
    shared = "shared_expert_intermediate_size"
    experts = ExpertFacts(
        count,
        _per_token(fields, count),
        _inner(fields),
        dense_layers=_where(model_config, lambda layer: layer in plain or (layer + 1) % period > 0),
        shared_inner=fields.integer(shared, 1, _MAX_WIDTH) if has_shared else 0,
        has_shared_gate=has_shared,
        is_normalised=fields.flag("norm_topk_prob", default=is_normalised),
    )
    return replace(model_config, experts=experts)


def deepseek_v2(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Softmax scores; a group's score is its best expert's."""
    method = fields.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", method, "greedy or group_limited_greedy")
    is_normalised = fields.flag("norm_topk_prob", default=False)
    scale = 1.0 if is_normalised else _scale(fields, 1.0)
    experts = replace(
        _deepseek_experts(fields, model_config), is_normalised=is_normalised, scale=scale
    )
    if method == "greedy":
        experts = replace(experts, groups=1, top_groups=1)
    return replace(latent_of(fields, model_config), experts=experts)


def deepseek_v3(
    fields: CheckpointFields, model_config: ModelConfig, scale: float = 2.5
) -> ModelConfig:
    experts = corrected(fields, model_config, is_normalised=True, scale=scale)
    dense = dense_of(fields, model_config, experts.dense_layers)
    experts = replace(experts, dense_layers=dense)
    return replace(
        latent_of(fields, model_config), experts=experts, num_mtp_layers=mtp_layers(fields)
    )


def mtp_layers(fields: CheckpointFields) -> int:
    """Number of MTP layers."""
    return fields.integer("num_nextn_predict_layers", 0, 1 << 10, default=0)


def deepseek_v32(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """DeepSeek-V3 with an indexer; the dense layers may be listed."""
    model_config = deepseek_v3(fields, model_config)
    latent, experts = model_config.latent, model_config.experts
    assert latent is not None and experts is not None
    if not latent.query_rank:
        raise fields.error(
            "q_lora_rank", None, "a whole number: the indexer reads low-rank queries"
        )
    shared = [kind for kind in fields.listed("indexer_types") if kind != "full"]
    if shared or fields.integer("index_topk_freq", 1, 1 << 16, default=1) > 1:
        raise fields.error(
            "indexer_types", shared, '"full" for all: no layer takes the choice of another'
        )
    latent = replace(
        latent,
        index_heads=fields.integer("index_n_heads", 1, 4096),
        index_dim=fields.integer("index_head_dim", latent.rope_dim + 1, _MAX_WIDTH),
        index_top=fields.integer("index_topk", 1, 1 << 26),
    )
    return replace(model_config, latent=latent, experts=experts)


def glm_dsa(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """The norms of the latents have a different eps."""
    model_config = deepseek_v32(fields, model_config)
    assert model_config.latent is not None
    return replace(model_config, latent=replace(model_config.latent, norm_eps=1e-6))


def corrected(
    fields: CheckpointFields, model_config: ModelConfig, is_normalised: bool, scale: float
) -> ExpertFacts:
    """Sigmoid scores with a correction bias; a group's score is the sum of its two best experts
    (DeepSeek-V3, arXiv 2412.19437).

    Args:
        is_normalised, scale: the family's defaults.
    """
    for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.text(key, default=known) != known:
            raise fields.error(key, fields.any(key), known)
    experts = replace(
        _deepseek_experts(fields, model_config),
        scoring="sigmoid",
        is_normalised=fields.flag("norm_topk_prob", default=is_normalised),
        scale=_scale(fields, scale),
        group_best=2,
        has_correction=True,
    )
    if experts.groups > 1 and experts.count // experts.groups < experts.group_best:
        raise fields.error("n_group", experts.groups, f"at most {experts.count // 2}")
    return experts


def _scale(fields: CheckpointFields, default: float) -> float:
    return fields.number("routed_scaling_factor", 1e-6, 1e6, default=default)


def _deepseek_experts(fields: CheckpointFields, model_config: ModelConfig) -> ExpertFacts:
    count = _count(fields, "n_routed_experts", "num_local_experts")
    inner = _inner(fields)
    first = fields.integer("first_k_dense_replace", 0, model_config.num_layers, default=0)
    period = fields.integer("moe_layer_freq", 1, 1 << 16, default=1)
    groups = fields.integer("n_group", 1, count, default=1)
    if count % groups:
        raise fields.error("n_group", groups, f"a divisor of {count} experts")
    return ExpertFacts(
        count,
        _per_token(fields, count),
        inner,
        dense_layers=_where(model_config, lambda layer: layer < first or layer % period > 0),
        shared_inner=fields.integer("n_shared_experts", 0, MAX_EXPERTS, default=0) * inner,
        groups=groups,
        top_groups=fields.integer("topk_group", 1, groups, default=1),
    )


def dense_of(
    fields: CheckpointFields, model_config: ModelConfig, default: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The layers that `mlp_layer_types` calls dense; the default without the list."""
    listed = fields.listed("mlp_layer_types")
    if not listed:
        return default
    is_known = all(kind in ("dense", "sparse") for kind in listed)
    if len(listed) != model_config.num_layers or not is_known:
        raise fields.error("mlp_layer_types", listed, f"{model_config.num_layers} of dense, sparse")
    return _where(model_config, lambda layer: listed[layer] == "dense")


def corrected_with(
    fields: CheckpointFields, model_config: ModelConfig, keys: Mapping[str, str], scale: float
) -> ModelConfig:
    """Experts routed as in DeepSeek-V3, under keys of the family's own.

    Args:
        keys: the family's key -> DeepSeek's.
        scale: default of the factor on the scores.
    """
    given = {usual: fields.any(own) for own, usual in keys.items() if fields.has(own)}
    experts = corrected(fields.with_values(given), model_config, is_normalised=True, scale=scale)
    dense = dense_of(fields, model_config, experts.dense_layers)
    return replace(model_config, experts=replace(experts, dense_layers=dense))


def _where(model_config: ModelConfig, is_dense: Callable[[int], bool]) -> tuple[int, ...]:
    return tuple(layer for layer in range(model_config.num_layers) if is_dense(layer))


def latent_of(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    latent = LatentFacts(
        query_rank=fields.integer("q_lora_rank", 1, _MAX_WIDTH) if fields.has("q_lora_rank") else 0,
        rank=fields.integer("kv_lora_rank", 1, _MAX_WIDTH),
        plain_dim=fields.integer("qk_nope_head_dim", 1, _MAX_WIDTH),
        rope_dim=fields.integer("qk_rope_head_dim", 2, _MAX_WIDTH),
        value_dim=fields.integer("v_head_dim", 1, _MAX_WIDTH),
    )
    if latent.rope_dim % 2:
        raise fields.error("qk_rope_head_dim", latent.rope_dim, "even, so that it can be paired")
    return _with_latent(model_config, latent)


def _with_latent(model_config: ModelConfig, latent: LatentFacts) -> ModelConfig:
    rope, head_dim = model_config.rope, latent.plain_dim + latent.rope_dim
    sharpness = 1.0  # YaRN's factor, applied to both q and k (DeepSeek-V2, section 3.1.4)
    if rope.kind != "default" and rope.mscale_all_dim and rope.factor > 1:
        sharpness = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return replace(
        model_config,
        latent=latent,
        head_dim=head_dim,
        rotary_dim=latent.rope_dim,
        attention_scale=head_dim**-0.5 * sharpness**2,
    )


def gguf_mixtral(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Mixtral's GGUF files use architecture "llama" with a number of experts."""
    if not _has_experts(fields):
        return model_config
    experts = gguf_experts(fields, model_config, is_normalised=True)
    return replace(model_config, architecture="MixtralForCausalLM", experts=experts)


def gguf_olmoe(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    key = "attention.clamp_kqv"
    if fields.has(key):
        raise fields.error(key, fields.any(key), "absent: clipping is not supported")
    return replace(model_config, experts=gguf_experts(fields, model_config, is_normalised=False))


def gguf_qwen2_moe(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    shared = fields.integer("expert_shared_feed_forward_length", 1, _MAX_WIDTH)
    experts = gguf_experts(fields, model_config, is_normalised=False)
    return replace(
        model_config, experts=replace(experts, shared_inner=shared, has_shared_gate=True)
    )


def gguf_qwen3_moe(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, experts=gguf_experts(fields, model_config, is_normalised=True))


def gguf_deepseek(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Files of V2 (softmax scores) and V3 (corrected sigmoid scores) are both "deepseek2"."""
    model_config = without_mtp_layers(fields, model_config)
    scoring = fields.integer("expert_gating_func", 0, 2, default=_SOFTMAX)
    is_third = scoring == _SIGMOID
    experts = (
        gguf_corrected(fields, model_config)
        if is_third
        else gguf_softmax(fields, model_config, False)
    )
    if experts.is_normalised and not is_third:
        experts = replace(experts, scale=1.0)
    name = f"DeepseekV{3 if is_third else 2}ForCausalLM"
    rope = model_config.rope
    logarithm = fields.number("rope.scaling.yarn_log_multiplier", 0.0, 1e3, default=0.0)
    sharpness = shortest(logarithm * 10)
    if rope.kind == "yarn" and sharpness:
        rope = replace(rope, mscale=sharpness, mscale_all_dim=sharpness)
    latent = _gguf_latent(fields)
    return _with_latent(
        replace(model_config, architecture=name, experts=experts, rope=rope), latent
    )


def gguf_latent_of(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return _with_latent(model_config, _gguf_latent(fields))


def _gguf_latent(fields: CheckpointFields) -> LatentFacts:
    """Newer files have separate keys for the head widths (…_mla)."""
    rope_dim = fields.integer("rope.dimension_count", 2, _MAX_WIDTH)
    own = "_mla" if fields.has("attention.key_length_mla") else ""
    head_dim = fields.integer(f"attention.key_length{own}", rope_dim + 1, _MAX_WIDTH)
    query = "attention.q_lora_rank"
    return LatentFacts(
        query_rank=fields.integer(query, 0, _MAX_WIDTH) if fields.has(query) else 0,
        rank=fields.integer("attention.kv_lora_rank", 1, _MAX_WIDTH),
        plain_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer(f"attention.value_length{own}", 1, _MAX_WIDTH),
    )


def gguf_softmax(
    fields: CheckpointFields, model_config: ModelConfig, is_normalised: bool = True
) -> ExpertFacts:
    """Experts with softmax scores; shared experts, dense first layers and groups are optional.

    Args:
        is_normalised: default if the file has no such key.
    """
    experts = gguf_experts(fields, model_config, is_normalised)
    first = fields.integer("leading_dense_block_count", 0, model_config.num_layers, default=0)
    groups = fields.integer("expert_group_count", 1, experts.count, default=1)
    if experts.count % groups:
        raise fields.error("expert_group_count", groups, f"a divisor of {experts.count} experts")
    width = "expert_shared_feed_forward_length"
    shared = fields.integer("expert_shared_count", 0, MAX_EXPERTS, default=int(fields.has(width)))
    return replace(
        experts,
        dense_layers=tuple(range(first)),
        shared_inner=shared * fields.integer(width, 0, _MAX_WIDTH, default=experts.inner),
        scale=shortest(fields.number("expert_weights_scale", 0.0, 1e6, default=1.0)) or 1.0,
        groups=groups,
        top_groups=fields.integer("expert_group_used_count", 1, groups, default=1),
    )


def gguf_corrected(
    fields: CheckpointFields, model_config: ModelConfig, is_normalised: bool = True
) -> ExpertFacts:
    """Experts as in DeepSeek-V3: sigmoid scores with a correction bias."""
    scoring = fields.integer("expert_gating_func", 0, 2, default=_SIGMOID)
    if scoring != _SIGMOID:
        raise fields.error("expert_gating_func", scoring, f"{_SIGMOID}, sigmoid")
    experts = replace(
        gguf_softmax(fields, model_config, is_normalised),
        scoring="sigmoid",
        group_best=2,
        has_correction=True,
    )
    if experts.groups > 1 and experts.count // experts.groups < experts.group_best:
        raise fields.error("expert_group_count", experts.groups, f"at most {experts.count // 2}")
    return experts


def without_mtp_layers(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """GGUF files count MTP layers in block_count: subtract them."""
    most = model_config.num_layers - 1
    more = fields.integer("nextn_predict_layers", 0, most, default=0)
    return replace(model_config, num_layers=model_config.num_layers - more, num_mtp_layers=more)


def _has_experts(fields: CheckpointFields) -> bool:
    return fields.integer("expert_count", 0, MAX_EXPERTS, default=0) > 0


def gguf_experts(
    fields: CheckpointFields, model_config: ModelConfig, is_normalised: bool
) -> ExpertFacts:
    count = fields.integer("expert_count", 1, MAX_EXPERTS)
    return ExpertFacts(
        count,
        fields.integer("expert_used_count", 1, count),
        fields.integer(
            "expert_feed_forward_length", 1, _MAX_WIDTH, default=model_config.intermediate_size
        ),
        is_normalised=fields.flag("expert_weights_norm", default=is_normalised),
    )
