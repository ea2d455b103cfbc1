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
from banyan.model_config.facts import Facts
from banyan.model_config.model_config import ModelConfig


def of_hub(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    return replace(
        model_config,
        embedding_scale=facts.number("embedding_multiplier", 1e-6, 1e6, default=1.0),
        residual_scale=facts.number("residual_multiplier", 1e-6, 1e6, default=1.0),
        attention_scale=facts.number("attention_multiplier", 1e-9, 1e6, default=1.0),
        logit_scale=1 / facts.number("logits_scaling", 1e-6, 1e6, default=1.0),
    )


def of_gguf(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    """The same factors in a GGUF file."""
    default = model_config.head_dim**-0.5
    return replace(
        model_config,
        embedding_scale=facts.number("embedding_scale", 1e-6, 1e6, default=1.0),
        residual_scale=facts.number("residual_scale", 1e-6, 1e6, default=1.0),
        attention_scale=facts.number("attention.scale", 1e-9, 1e6, default=default),
        logit_scale=1 / facts.number("logit_scale", 1e-6, 1e6, default=1.0),
    )


def _of_gguf_experts(facts: Facts, model_config: ModelConfig) -> ModelConfig:
    return replace(of_gguf(facts, model_config), experts=gguf_softmax(facts, model_config))


GRANITE = Family(
    hub=HubForm(more=of_hub),
    gguf=GgufForm("GraniteForCausalLM", more=of_gguf),
    names={
        "safetensors": NameMap(HUB_NAMES),
        "gguf": NameMap(GGUF_NAMES, paired=QK, rope_divisors="rope_freqs.weight"),
    },
)

GRANITE_MOE = Family(
    hub=HubForm(more=lambda facts, model_config: mixtral(facts, of_hub(facts, model_config))),
    gguf=GgufForm("GraniteMoeForCausalLM", more=_of_gguf_experts),
    names={
        "gguf": NameMap(GGUF_NAMES | GGUF_EXPERTS, paired=QK, rope_divisors="rope_freqs.weight"),
        "safetensors": NameMap(HUB_NAMES | HUB_GRANITE_EXPERTS),
    },
)
