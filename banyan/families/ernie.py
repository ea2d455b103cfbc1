"""ERNIE 4.5, dense and with experts: Llama with RoPE in pairs 2i, 2i + 1; experts have softmax
scores with a correction bias.

Source: the published configurations of baidu/ERNIE-4.5-0.3B-PT and ERNIE-4.5-21B-A3B-PT.
"""

from dataclasses import replace

from banyan.families.base import MAX_WIDTH, Biases, Family, GgufForm, HubForm
from banyan.families.experts import MAX_EXPERTS, gguf_softmax
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    HUB_CORRECTED_EXPERTS,
    HUB_NAMES,
    QK,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ExpertFacts, ModelConfig


def _biases(fields: CheckpointFields) -> Biases:
    has_bias = fields.flag("use_bias", default=False)
    return Biases(has_bias, has_bias, has_bias)


def _experts(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    if model_config.mlp_bias:
        raise fields.error("use_bias", True, "false: experts with biases are not supported")
    count = fields.integer("moe_num_experts", 1, MAX_EXPERTS)
    inner = fields.integer("moe_intermediate_size", 1, MAX_WIDTH)
    every = fields.integer("moe_layer_interval", 1, 1 << 16, default=1)
    first = fields.integer("moe_layer_start_index", 0, 1 << 16, default=1)
    last = fields.integer("moe_layer_end_index", -1, 1 << 16, default=-1)
    last = model_config.num_layers if last < 0 else last
    layers = range(model_config.num_layers)
    experts = ExpertFacts(
        count,
        fields.integer("moe_k", 1, count, default=min(6, count)),
        inner,
        dense_layers=tuple(i for i in layers if (i + 1) % every or not first <= i <= last),
        shared_inner=fields.integer("moe_num_shared_experts", 0, MAX_EXPERTS, default=2) * inner,
        has_correction=True,
    )
    return replace(model_config, experts=experts)


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """The file's width of the shared experts is not used: each is as wide as an expert."""
    experts = gguf_softmax(fields, model_config)
    every = fields.integer("interleave_moe_layer_step", 1, 1 << 16, default=1)
    layers = range(model_config.num_layers)
    dense = tuple(i for i in layers if i in experts.dense_layers or (i + 1) % every)
    shared = fields.integer("expert_shared_count", 0, MAX_EXPERTS, default=0)
    experts = replace(
        experts, dense_layers=dense, shared_inner=shared * experts.inner, has_correction=True
    )
    return replace(model_config, experts=experts)


_HUB = HubForm(eps=1e-5, tied=True, rope_theta=5e5, biases=_biases)

ERNIE45 = Family(
    hub=replace(_HUB, head_dim=128),
    gguf=GgufForm("Ernie4_5ForCausalLM"),
    names={
        "safetensors": NameMap(HUB_NAMES, paired=QK),
        "gguf": NameMap(GGUF_NAMES, paired=QK),
    },
)
ERNIE45_MOE = Family(
    hub=replace(_HUB, more=_experts),
    gguf=GgufForm("Ernie4_5_MoeForCausalLM", more=_of_gguf),
    names={
        "gguf": NameMap(GGUF_NAMES | GGUF_EXPERTS, paired=QK),
        "safetensors": NameMap(
            HUB_NAMES
            | HUB_CORRECTED_EXPERTS
            | {
                f"model.layers.{{}}.mlp.{gate}moe_statics.e_score_correction_bias": (
                    "layers.{}.mlp.router.correction"
                )
                for gate in ("", "gate.")
            },
            paired=QK,
            has_more_layers=True,
        ),
    },
)
