"""Families whose feed-forward blocks are experts, and DeepSeek's latent attention.

Source: the documented fields and defaults of the families' configuration classes.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from banyan.model_config.facts import Facts, shortest
from banyan.model_config.model_config import ExpertFacts, LatentFacts, ModelConfig

MAX_EXPERTS = 1 << 16
_MAX_WIDTH = 1 << 20
_SOFTMAX, _SIGMOID = 1, 2
"""How GGUF numbers what makes scores of logits."""


def _count(facts: Facts, *keys: str) -> int:
    """Configurations name the number of experts in several ways."""
    key = next((key for key in keys if facts.has(key)), keys[0])
    return facts.integer(key, 1, MAX_EXPERTS)


def _per_token(facts: Facts, count: int, default: int | None = None) -> int:
    return facts.integer("num_experts_per_tok", 1, count, default=default)


def _inner(facts: Facts, key: str = "moe_intermediate_size") -> int:
    return facts.integer(key, 1, _MAX_WIDTH)


def mixtral(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, experts=mixtral_experts(facts, model_config))


def mixtral_experts(facts: Facts, model_config: ModelConfig) -> ExpertFacts:
    count = _count(facts, "num_local_experts")
    return ExpertFacts(count, _per_token(facts, count, 2), model_config.intermediate_size)


def olmoe(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    if facts.has("clip_qkv"):
        raise facts.error("clip_qkv", facts.any("clip_qkv"), "null: clipping is not supported")
    count = _count(facts, "num_experts", "num_local_experts")
    is_normalised = facts.flag("norm_topk_prob", default=False)
    per_token = _per_token(facts, count, 8)
    experts = ExpertFacts(
        count, per_token, model_config.intermediate_size, is_normalised=is_normalised
    )
    return replace(model_config, experts=experts)


def qwen_moe(
    facts: Facts, model_config: ModelConfig, has_shared: bool = False, is_normalised: bool = False
) -> ModelConfig:
    """Which layers have experts is told by a period and a list of exceptions."""
    count = _count(facts, "num_experts", "num_local_experts")
    period = facts.integer("decoder_sparse_step", 1, 1 << 16, default=1)
    plain = facts.listed("mlp_only_layers")
    shared = "shared_expert_intermediate_size"
    experts = ExpertFacts(
        count,
        _per_token(facts, count),
        _inner(facts),
        dense_layers=_where(model_config, lambda layer: layer in plain or (layer + 1) % period > 0),
        shared_inner=facts.integer(shared, 1, _MAX_WIDTH) if has_shared else 0,
        has_shared_gate=has_shared,
        is_normalised=facts.flag("norm_topk_prob", default=is_normalised),
    )
    return replace(model_config, experts=experts)


def deepseek_v2(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """Softmax scores; a group is as good as its best expert."""
    method = facts.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise facts.error("topk_method", method, "greedy or group_limited_greedy")
    is_normalised = facts.flag("norm_topk_prob", default=False)
    scale = 1.0 if is_normalised else _scale(facts, 1.0)
    experts = replace(
        _deepseek_experts(facts, model_config), is_normalised=is_normalised, scale=scale
    )
    if method == "greedy":
        experts = replace(experts, groups=1, top_groups=1)
    return replace(latent_of(facts, model_config), experts=experts)


def deepseek_v3(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    experts = corrected(facts, model_config, is_normalised=True, scale=2.5)
    return replace(
        latent_of(facts, model_config), experts=experts, num_mtp_layers=mtp_layers(facts)
    )


def mtp_layers(facts: Facts) -> int:
    """Layers behind the last one, which are for drafting."""
    return facts.integer("num_nextn_predict_layers", 0, 1 << 10, default=0)


def deepseek_v32(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """Version 3 with an indexer; which layers are dense may be listed."""
    model_config = deepseek_v3(facts, model_config)
    latent, experts = model_config.latent, model_config.experts
    assert latent is not None and experts is not None
    if not latent.query_rank:
        raise facts.error("q_lora_rank", None, "a whole number: the indexer reads squeezed queries")
    shared = [kind for kind in facts.listed("indexer_types") if kind != "full"]
    if shared or facts.integer("index_topk_freq", 1, 1 << 16, default=1) > 1:
        raise facts.error(
            "indexer_types", shared, '"full" for all: no layer takes the choice of another'
        )
    listed = facts.listed("mlp_layer_types")
    if listed:
        if len(listed) != model_config.num_layers or not all(
            kind in ("dense", "sparse") for kind in listed
        ):
            raise facts.error(
                "mlp_layer_types", listed, f"{model_config.num_layers} of dense, sparse"
            )
        dense = _where(model_config, lambda layer: listed[layer] == "dense")
        experts = replace(experts, dense_layers=dense)
    latent = replace(
        latent,
        index_heads=facts.integer("index_n_heads", 1, 4096),
        index_dim=facts.integer("index_head_dim", latent.rope_dim + 1, _MAX_WIDTH),
        index_top=facts.integer("index_topk", 1, 1 << 26),
    )
    return replace(model_config, latent=latent, experts=experts)


def glm_dsa(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """Its latents are normed with another eps than the stream."""
    model_config = deepseek_v32(facts, model_config)
    assert model_config.latent is not None
    return replace(model_config, latent=replace(model_config.latent, norm_eps=1e-6))


def corrected(
    facts: Facts, model_config: ModelConfig, is_normalised: bool, scale: float
) -> ExpertFacts:
    """Sigmoid scores with a correction; a group is as good as its two best experts (DeepSeek-V3,
    arXiv 2412.19437).

    Args:
        is_normalised, scale: the family's defaults.
    """
    for key, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if facts.text(key, default=known) != known:
            raise facts.error(key, facts.any(key), known)
    experts = replace(
        _deepseek_experts(facts, model_config),
        scoring="sigmoid",
        is_normalised=facts.flag("norm_topk_prob", default=is_normalised),
        scale=_scale(facts, scale),
        group_best=2,
        has_correction=True,
    )
    if experts.groups > 1 and experts.count // experts.groups < experts.group_best:
        raise facts.error("n_group", experts.groups, f"at most {experts.count // 2}")
    return experts


def _scale(facts: Facts, default: float) -> float:
    return facts.number("routed_scaling_factor", 1e-6, 1e6, default=default)


def _deepseek_experts(facts: Facts, model_config: ModelConfig) -> ExpertFacts:
    count = _count(facts, "n_routed_experts", "num_local_experts")
    inner = _inner(facts)
    first = facts.integer("first_k_dense_replace", 0, model_config.num_layers, default=0)
    period = facts.integer("moe_layer_freq", 1, 1 << 16, default=1)
    groups = facts.integer("n_group", 1, count, default=1)
    if count % groups:
        raise facts.error("n_group", groups, f"a divisor of {count} experts")
    return ExpertFacts(
        count,
        _per_token(facts, count),
        inner,
        dense_layers=_where(model_config, lambda layer: layer < first or layer % period > 0),
        shared_inner=facts.integer("n_shared_experts", 0, MAX_EXPERTS, default=0) * inner,
        groups=groups,
        top_groups=facts.integer("topk_group", 1, groups, default=1),
    )


def _where(model_config: ModelConfig, is_dense: Callable[[int], bool]) -> tuple[int, ...]:
    return tuple(layer for layer in range(model_config.num_layers) if is_dense(layer))


def latent_of(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    latent = LatentFacts(
        query_rank=facts.integer("q_lora_rank", 1, _MAX_WIDTH) if facts.has("q_lora_rank") else 0,
        rank=facts.integer("kv_lora_rank", 1, _MAX_WIDTH),
        plain_dim=facts.integer("qk_nope_head_dim", 1, _MAX_WIDTH),
        rope_dim=facts.integer("qk_rope_head_dim", 2, _MAX_WIDTH),
        value_dim=facts.integer("v_head_dim", 1, _MAX_WIDTH),
    )
    if latent.rope_dim % 2:
        raise facts.error("qk_rope_head_dim", latent.rope_dim, "even, so that it can be paired")
    return _with_latent(model_config, latent)


def _with_latent(model_config: ModelConfig, latent: LatentFacts) -> ModelConfig:
    rope, head_dim = model_config.rope, latent.plain_dim + latent.rope_dim
    sharpness = 1.0  # YaRN's, which is for q and k alike (DeepSeek-V2, section 3.1.4)
    if rope.kind != "default" and rope.mscale_all_dim and rope.factor > 1:
        sharpness = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return replace(
        model_config,
        latent=latent,
        head_dim=head_dim,
        rotary_dim=latent.rope_dim,
        attention_scale=head_dim**-0.5 * sharpness**2,
    )


def gguf_mixtral(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """Mixtral's files call themselves "llama", with a number of experts."""
    if not _has_experts(facts):
        return model_config
    experts = gguf_experts(facts, model_config, is_normalised=True)
    return replace(model_config, architecture="MixtralForCausalLM", experts=experts)


def gguf_olmoe(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    key = "attention.clamp_kqv"
    if facts.has(key):
        raise facts.error(key, facts.any(key), "absent: clipping is not supported")
    return replace(model_config, experts=gguf_experts(facts, model_config, is_normalised=False))


def gguf_qwen2_moe(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    shared = facts.integer("expert_shared_feed_forward_length", 1, _MAX_WIDTH)
    experts = gguf_experts(facts, model_config, is_normalised=False)
    return replace(
        model_config, experts=replace(experts, shared_inner=shared, has_shared_gate=True)
    )


def gguf_qwen3_moe(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, experts=gguf_experts(facts, model_config, is_normalised=True))


def gguf_deepseek(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """V2 scores by softmax, V3 by sigmoid with a correction; files of both are "deepseek2"."""
    model_config = without_drafting_layers(facts, model_config)
    scoring = facts.integer("expert_gating_func", 0, 2, default=_SOFTMAX)
    is_third = scoring == _SIGMOID
    experts = (
        gguf_corrected(facts, model_config)
        if is_third
        else gguf_softmax(facts, model_config, False)
    )
    if experts.is_normalised and not is_third:
        experts = replace(experts, scale=1.0)
    name = f"DeepseekV{3 if is_third else 2}ForCausalLM"
    rope = model_config.rope
    logarithm = facts.number("rope.scaling.yarn_log_multiplier", 0.0, 1e3, default=0.0)
    sharpness = shortest(logarithm * 10)
    if rope.kind == "yarn" and sharpness:
        rope = replace(rope, mscale=sharpness, mscale_all_dim=sharpness)
    latent = _gguf_latent(facts)
    return _with_latent(
        replace(model_config, architecture=name, experts=experts, rope=rope), latent
    )


def gguf_latent_of(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    return _with_latent(model_config, _gguf_latent(facts))


def _gguf_latent(facts: Facts) -> LatentFacts:
    """Newer files give the widths of heads under keys of their own, beside those of the latent."""
    rope_dim = facts.integer("rope.dimension_count", 2, _MAX_WIDTH)
    own = "_mla" if facts.has("attention.key_length_mla") else ""
    head_dim = facts.integer(f"attention.key_length{own}", rope_dim + 1, _MAX_WIDTH)
    query = "attention.q_lora_rank"
    return LatentFacts(
        query_rank=facts.integer(query, 0, _MAX_WIDTH) if facts.has(query) else 0,
        rank=facts.integer("attention.kv_lora_rank", 1, _MAX_WIDTH),
        plain_dim=head_dim - rope_dim,
        rope_dim=rope_dim,
        value_dim=facts.integer(f"attention.value_length{own}", 1, _MAX_WIDTH),
    )


def gguf_softmax(
    facts: Facts, model_config: ModelConfig, is_normalised: bool = True
) -> ExpertFacts:
    """Experts beside a block for every token, behind dense layers, in groups: each as far as the
    file tells of it.

    Args:
        is_normalised: where the file does not say.
    """
    experts = gguf_experts(facts, model_config, is_normalised)
    first = facts.integer("leading_dense_block_count", 0, model_config.num_layers, default=0)
    groups = facts.integer("expert_group_count", 1, experts.count, default=1)
    if experts.count % groups:
        raise facts.error("expert_group_count", groups, f"a divisor of {experts.count} experts")
    width = "expert_shared_feed_forward_length"
    shared = facts.integer("expert_shared_count", 0, MAX_EXPERTS, default=int(facts.has(width)))
    return replace(
        experts,
        dense_layers=tuple(range(first)),
        shared_inner=shared * facts.integer(width, 0, _MAX_WIDTH, default=experts.inner),
        scale=shortest(facts.number("expert_weights_scale", 0.0, 1e6, default=1.0)) or 1.0,
        groups=groups,
        top_groups=facts.integer("expert_group_used_count", 1, groups, default=1),
    )


def gguf_corrected(
    facts: Facts, model_config: ModelConfig, is_normalised: bool = True
) -> ExpertFacts:
    """Those of families that follow DeepSeek-V3's: sigmoid scores with a correction."""
    scoring = facts.integer("expert_gating_func", 0, 2, default=_SIGMOID)
    if scoring != _SIGMOID:
        raise facts.error("expert_gating_func", scoring, f"{_SIGMOID}, sigmoid")
    experts = replace(
        gguf_softmax(facts, model_config, is_normalised),
        scoring="sigmoid",
        group_best=2,
        has_correction=True,
    )
    if experts.groups > 1 and experts.count // experts.groups < experts.group_best:
        raise facts.error("expert_group_count", experts.groups, f"at most {experts.count // 2}")
    return experts


def without_drafting_layers(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """A file counts the layers that are for drafting among its blocks."""
    most = model_config.num_layers - 1
    more = facts.integer("nextn_predict_layers", 0, most, default=0)
    return replace(model_config, num_layers=model_config.num_layers - more, num_mtp_layers=more)


def _has_experts(facts: Facts) -> bool:
    return facts.integer("expert_count", 0, MAX_EXPERTS, default=0) > 0


def gguf_experts(facts: Facts, model_config: ModelConfig, is_normalised: bool) -> ExpertFacts:
    count = facts.integer("expert_count", 1, MAX_EXPERTS)
    return ExpertFacts(
        count,
        facts.integer("expert_used_count", 1, count),
        facts.integer(
            "expert_feed_forward_length", 1, _MAX_WIDTH, default=model_config.intermediate_size
        ),
        is_normalised=facts.flag("expert_weights_norm", default=is_normalised),
    )
