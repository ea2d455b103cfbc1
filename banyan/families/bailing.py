"""BailingMoE (Ling, Ring): Llama's attention, and experts with shared experts.

Version 1 has softmax scores. Version 2 routes as DeepSeek-V3 and norms each head of q and k.

Source: the published configurations of inclusionAI/Ling-lite-1.5 and inclusionAI/Ling-mini-2.0.
"""

from dataclasses import replace

from banyan.families.base import MAX_WIDTH, Biases, Family, GgufForm, HubForm
from banyan.families.experts import (
    MAX_EXPERTS,
    gguf_corrected,
    gguf_softmax,
    without_mtp_layers,
)
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_CORRECTED_EXPERTS,
    HUB_NAMES,
    QK,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ExpertFacts, ModelConfig

_NAMES = (
    HUB_NAMES
    | HUB_CORRECTED_EXPERTS
    | {
        "model.word_embeddings": "embedding",
        "model.layers.{}.attention.query_key_value": "layers.{}.attention.qkv:q+k+v",
        "model.layers.{}.attention.dense": "layers.{}.attention.out",
        "model.layers.{}.attention.query_layernorm": "layers.{}.attention.q_norm",
        "model.layers.{}.attention.key_layernorm": "layers.{}.attention.k_norm",
        "model.layers.{}.mlp.gate.expert_bias": "layers.{}.mlp.router.correction",
    }
)


def _experts(fields: CheckpointFields, model_config: ModelConfig) -> ExpertFacts:
    count = fields.integer("num_experts", 1, MAX_EXPERTS)
    inner = fields.integer("moe_intermediate_size", 1, MAX_WIDTH)
    shared = fields.integer("num_shared_experts", 0, MAX_EXPERTS, default=0)
    width = fields.integer("moe_shared_expert_intermediate_size", 1, MAX_WIDTH, default=inner)
    first = fields.integer("first_k_dense_replace", 0, model_config.num_layers, default=0)
    return ExpertFacts(
        count,
        fields.integer("num_experts_per_tok", 1, count),
        inner,
        dense_layers=tuple(range(first)),
        shared_inner=shared * width,
        is_normalised=fields.flag("norm_topk_prob", default=True),
    )


def _first(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    is_normed = fields.flag("norm_head", default=False)
    return replace(model_config, experts=_experts(fields, model_config), has_normed_head=is_normed)


def _second(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    score = fields.text("score_function", default="sigmoid")
    if score != "sigmoid":
        raise fields.error("score_function", score, "sigmoid")
    experts = _experts(fields, model_config)
    groups = fields.integer("n_group", 1, experts.count, default=1)
    if experts.count % groups or (groups > 1 and experts.count // groups < 2):
        raise fields.error("n_group", groups, f"a divisor of {experts.count} experts, two to each")
    experts = replace(
        experts,
        scoring="sigmoid",
        groups=groups,
        top_groups=fields.integer("topk_group", 1, groups, default=1),
        group_best=2,
        scale=fields.number("routed_scaling_factor", 1e-6, 1e6, default=1.0),
        has_correction=fields.flag("moe_router_enable_expert_bias", default=True),
    )
    is_normed = fields.flag("use_qk_norm", default=True)
    return replace(model_config, experts=experts, qk_norm="head" if is_normed else "")


def _biases(fields: CheckpointFields) -> Biases:
    return Biases(
        fields.flag("use_qkv_bias", default=False), fields.flag("use_bias", default=False)
    )


def _first_of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """GGUF files store a normed LM head already normed."""
    return replace(model_config, experts=gguf_softmax(fields, model_config))


def _second_of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Converters write the width of one shared expert, or of all of them together."""
    model_config = without_mtp_layers(fields, model_config)
    experts = gguf_corrected(fields, model_config)
    whole = fields.integer("expert_shared_count", 0, MAX_EXPERTS, default=0) * experts.inner
    if fields.integer("expert_shared_feed_forward_length", 0, MAX_WIDTH, default=0) == whole:
        experts = replace(experts, shared_inner=whole)
    return replace(model_config, experts=experts)


_HUB = HubForm(eps=1e-5, biases=_biases, more=_first)

BAILING_MOE = Family(
    hub=_HUB,
    gguf=GgufForm("BailingMoeForCausalLM", more=_first_of_gguf),
    names={
        "safetensors": NameMap(_NAMES),
        "gguf": NameMap(GGUF_NAMES | GGUF_EXPERTS, paired=QK, rope_divisors="rope_freqs.weight"),
    },
)
BAILING_MOE_V2 = Family(
    hub=replace(_HUB, rotary=0.5, more=_second),
    gguf=GgufForm("BailingMoeV2ForCausalLM", may_norm_heads=True, more=_second_of_gguf),
    names={
        "safetensors": NameMap(_NAMES, has_more_layers=True),
        "gguf": NameMap(
            GGUF_NAMES
            | GGUF_QK_NORM
            | GGUF_EXPERTS
            | {"blk.{}.attn_qkv": "layers.{}.attention.qkv:q+k+v"},
            has_more_layers=True,
        ),
    },
)
