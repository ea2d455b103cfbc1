"""gpt-oss (arXiv 2508.10925): windows in every other layer, attention sinks (a learned logit per
head), and experts with biases and a clamped gated unit.

Source: the published configuration of openai/gpt-oss-20b; GGUF architecture "gpt-oss".
"""

from dataclasses import replace

from banyan.families.base import Biases, Family, GgufForm, HubForm, Kinds, window_where
from banyan.families.experts import gguf_experts, mixtral_experts
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    HUB_EACH_EXPERT,
    HUB_NAMES,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ExpertFacts, ModelConfig

_ALPHA, _LIMIT = 1.702, 7.0


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    return window_where(fields, num_layers, lambda layer: layer % 2 == 0)


def _of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    limit = fields.number("swiglu_limit", 1e-3, 1e6, default=_LIMIT)
    alpha = fields.number("swiglu_alpha", 1e-3, 1e3, default=_ALPHA)
    return _with_experts(model_config, mixtral_experts(fields, model_config), limit, alpha)


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """YaRN's ramp is not truncated to whole dimensions; GGUF has no key for it."""
    model_config = replace(model_config, rope=replace(model_config.rope, truncate=False))
    return _with_experts(
        model_config, gguf_experts(fields, model_config, is_normalised=True), _LIMIT, _ALPHA
    )


def _with_experts(
    model_config: ModelConfig, experts: ExpertFacts, limit: float, alpha: float
) -> ModelConfig:
    experts = replace(experts, has_bias=True, limit=limit, alpha=alpha)
    return replace(model_config, experts=experts, attention_sinks=True)


def _biases(fields: CheckpointFields) -> Biases:
    has_bias = fields.flag("attention_bias", default=True)
    return Biases(has_bias, has_bias)


GPT_OSS = Family(
    hub=HubForm(
        eps=1e-5, head_dim=64, rope_theta=150000.0, biases=_biases, kinds=_kinds, more=_of_hub
    ),
    gguf=GgufForm("GptOssForCausalLM", window_period=2, more=_of_gguf),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | HUB_EACH_EXPERT
            | {
                "model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks.weight",
                "model.layers.{}.mlp.router": "layers.{}.mlp.router",
                "model.layers.{}.mlp.experts.gate_proj": "layers.{}.mlp.experts.gate_up:gate*",
                "model.layers.{}.mlp.experts.up_proj": "layers.{}.mlp.experts.gate_up:up*",
                "model.layers.{}.mlp.experts.down_proj": "layers.{}.mlp.experts.down:*",
            },
            has_gates_between=True,
        ),
        "gguf": NameMap(
            GGUF_NAMES
            | GGUF_EXPERTS
            | {
                "blk.{}.post_attention_norm": "layers.{}.mlp_norm",
                "blk.{}.attn_sinks": "layers.{}.attention.sinks",
            }
        ),
    },
)
