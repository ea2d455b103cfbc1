"""Granite 3, dense and with experts: Llama with factors on embedding, residual, attention and
logits. A tensor holds all experts of a layer.

Source: the published configuration of ibm-granite/granite-3.x; GGUF architecture "granite".
"""

from dataclasses import replace

from banyan.families.base import Family, GgufForm, HubForm
from banyan.families.experts import gguf_softmax, mixtral
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    HUB_GRANITE_EXPERTS,
    HUB_NAMES,
    QK,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig


def of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(
        model_config,
        embedding_scale=fields.number("embedding_multiplier", 1e-6, 1e6, default=1.0),
        residual_scale=fields.number("residual_multiplier", 1e-6, 1e6, default=1.0),
        attention_scale=fields.number("attention_multiplier", 1e-9, 1e6, default=1.0),
        logit_scale=1 / fields.number("logits_scaling", 1e-6, 1e6, default=1.0),
    )


def of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """The same factors in a GGUF file."""
    default = model_config.head_dim**-0.5
    return replace(
        model_config,
        embedding_scale=fields.number("embedding_scale", 1e-6, 1e6, default=1.0),
        residual_scale=fields.number("residual_scale", 1e-6, 1e6, default=1.0),
        attention_scale=fields.number("attention.scale", 1e-9, 1e6, default=default),
        logit_scale=1 / fields.number("logit_scale", 1e-6, 1e6, default=1.0),
    )


def _of_gguf_experts(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(of_gguf(fields, model_config), experts=gguf_softmax(fields, model_config))


GRANITE = Family(
    hub=HubForm(more=of_hub),
    gguf=GgufForm("GraniteForCausalLM", more=of_gguf),
    names={
        "safetensors": NameMap(HUB_NAMES),
        "gguf": NameMap(GGUF_NAMES, paired=QK, rope_divisors="rope_freqs.weight"),
    },
)

GRANITE_MOE = Family(
    hub=HubForm(more=lambda fields, model_config: mixtral(fields, of_hub(fields, model_config))),
    gguf=GgufForm("GraniteMoeForCausalLM", more=_of_gguf_experts),
    names={
        "gguf": NameMap(GGUF_NAMES | GGUF_EXPERTS, paired=QK, rope_divisors="rope_freqs.weight"),
        "safetensors": NameMap(HUB_NAMES | HUB_GRANITE_EXPERTS),
    },
)
