"""Hunyuan V1, dense and with experts (arXiv 2411.02265): heads of q and k are normed after
RoPE, and there is a shared expert. Hunyuan V3: the norms before RoPE, experts routed as in
DeepSeek-V3.

Source: the published configurations of tencent/Hunyuan-7B-Instruct and Hunyuan-A13B-Instruct.
"""

from dataclasses import replace
from functools import partial

from banyan.base.json_types import is_list
from banyan.families.base import MAX_WIDTH, Biases, Family, GgufForm, HubForm
from banyan.families.experts import MAX_EXPERTS, corrected_with, gguf_softmax
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_CORRECTED_EXPERTS,
    HUB_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ExpertFacts, ModelConfig

_ATTENTION = {
    "model.layers.{}.self_attn.query_layernorm": "layers.{}.attention.q_norm",
    "model.layers.{}.self_attn.key_layernorm": "layers.{}.attention.k_norm",
}
_FEED_FORWARD = {
    "model.layers.{}.mlp.gate.wg": "layers.{}.mlp.router",
    "model.layers.{}.mlp.shared_mlp.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    "model.layers.{}.mlp.shared_mlp.up_proj": "layers.{}.mlp.shared.gate_up:up",
    "model.layers.{}.mlp.shared_mlp.down_proj": "layers.{}.mlp.shared.down",
}


def _stretched(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """A "dynamic" RoPE with alpha changes the base, independent of the length."""
    own = fields.part("rope_parameters") or fields.part("rope_scaling")
    if own is None or model_config.rope.kind != "dynamic" or not own.has("alpha"):
        return model_config
    alpha = own.number("alpha", 1.0, 1e6)
    theta = model_config.rope.theta * alpha ** (model_config.head_dim / (model_config.head_dim - 2))
    return replace(
        model_config, rope=replace(model_config.rope, kind="default", factor=1.0, theta=theta)
    )


def _one(fields: CheckpointFields, key: str, high: int) -> int:
    """One number; a list with one number per layer must hold equal numbers."""
    listed = fields.any(key)
    if not is_list(listed):
        return fields.integer(key, 1, high)
    first = listed[0] if listed else None
    if not isinstance(first, int) or not 1 <= first <= high or listed.count(first) != len(listed):
        raise fields.error(key, listed, f"one number from 1 to {high} for all layers")
    return first


def _experts(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    count = _one(fields, "num_experts", MAX_EXPERTS)
    inner = model_config.intermediate_size
    if fields.has("moe_intermediate_size"):
        inner = _one(fields, "moe_intermediate_size", MAX_WIDTH)
    shared = _one(fields, "num_shared_expert", 64) if fields.has("num_shared_expert") else 1
    experts = ExpertFacts(
        count,
        _one(fields, "moe_topk", count),
        inner,
        shared_inner=shared * model_config.intermediate_size,
    )
    return replace(_stretched(fields, model_config), experts=experts)


def _biases(fields: CheckpointFields) -> Biases:
    has_bias = fields.flag("attention_bias", default=False)
    return Biases(has_bias, has_bias)


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, experts=gguf_softmax(fields, model_config))


_HUB = HubForm(eps=1e-5, biases=_biases, more=_stretched)

HUNYUAN = Family(
    hub=_HUB,
    gguf=GgufForm("HunYuanDenseV1ForCausalLM"),
    names={
        "safetensors": NameMap(HUB_NAMES | _ATTENTION),
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM),
    },
    qk_norm="turned head",
)
HUNYUAN_MOE = Family(
    hub=replace(_HUB, more=_experts),
    gguf=GgufForm("HunYuanMoEV1ForCausalLM", more=_of_gguf),
    names={
        "safetensors": NameMap(HUB_NAMES | _ATTENTION | HUB_EXPERTS | _FEED_FORWARD),
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM | GGUF_EXPERTS),
    },
    qk_norm="turned head",
)

_V3_EXPERTS = {
    "model.layers.{}.mlp.router.gate": "layers.{}.mlp.router",
    "model.layers.{}.mlp.expert_bias": "layers.{}.mlp.router.correction",
    "model.layers.{}.mlp.e_score_correction_bias": "layers.{}.mlp.router.correction",
    **{name: place for name, place in _FEED_FORWARD.items() if ".shared_mlp." in name},
}
HUNYUAN_V3 = Family(
    hub=HubForm(
        eps=1e-5,
        head_dim=128,
        rope_theta=11_158_840.0,
        more=partial(
            corrected_with,
            keys={
                "num_experts": "n_routed_experts",
                "num_shared_experts": "n_shared_experts",
                "router_scaling_factor": "routed_scaling_factor",
            },
            scale=2.826,
        ),
    ),
    names={
        "safetensors": NameMap(
            HUB_NAMES | HUB_QK_NORM | HUB_CORRECTED_EXPERTS | _V3_EXPERTS,
            has_more_layers=True,
        )
    },
    qk_norm="head",
)
