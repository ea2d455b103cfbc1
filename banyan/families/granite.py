"""Granite 3, dense and with experts: Llama with factors on embedding, residual, attention and
logits. A tensor holds all experts of a layer. Granite with windows (SWA): attention sinks, and some
layers do not rotate. HyperCLOVA X: the same factors, and norms after each block.

Source: the published configuration of ibm-granite/granite-3.x; GGUF architecture "granite".
"""

from dataclasses import replace
from functools import partial

from banyan.families.base import MAX_WIDTH, Family, GgufForm, HubForm, Kinds, window_where
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


def _of_shared(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """A shared expert of width 0 is none."""
    model_config = mixtral(fields, of_hub(fields, model_config))
    assert model_config.experts is not None
    shared = fields.integer("shared_intermediate_size", 0, MAX_WIDTH, default=0)
    return replace(model_config, experts=replace(model_config.experts, shared_inner=shared))


_SHARED = {
    "model.layers.{}.shared_mlp.input_linear": "layers.{}.mlp.shared.gate_up:gate+up",
    "model.layers.{}.shared_mlp.output_linear": "layers.{}.mlp.shared.down",
}
GRANITE_MOE_SHARED = Family(
    hub=HubForm(more=_of_shared),
    names={"safetensors": NameMap(HUB_NAMES | HUB_GRANITE_EXPERTS | _SHARED)},
)


def _swa_kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    """The first of every four layers has full attention."""
    return window_where(fields, num_layers, lambda layer: layer % 4 > 0)


def _swa(
    fields: CheckpointFields, model_config: ModelConfig, has_experts: bool = False
) -> ModelConfig:
    """A base of 0 in `layer_rope_theta` is a layer without rotation."""
    thetas = fields.listed("layer_rope_theta")
    bases = {each for each in thetas if each}
    if thetas and (len(thetas) != model_config.num_layers or len(bases) > 1):
        rule = f"{model_config.num_layers} numbers, 0 or one other"
        raise fields.error("layer_rope_theta", thetas, rule)
    base = fields.with_values({"theta": next(iter(bases), None)})
    theta = base.number("theta", 1.0, 1e12, default=model_config.rope.theta)
    model_config = (_of_shared if has_experts else of_hub)(fields, model_config)
    return replace(
        model_config,
        rope=replace(model_config.rope, theta=theta),
        unrotated=tuple(at for at, each in enumerate(thetas) if not each),
        attention_sinks=True,
    )


_SINKS = {"model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks.weight"}
GRANITE_SWA = Family(
    hub=HubForm(eps=1e-5, tied=True, kinds=_swa_kinds, more=_swa),
    names={"safetensors": NameMap(HUB_NAMES | _SINKS)},
)
GRANITE_MOE_SWA = Family(
    hub=HubForm(kinds=_swa_kinds, more=partial(_swa, has_experts=True)),
    names={"safetensors": NameMap(HUB_NAMES | HUB_GRANITE_EXPERTS | _SHARED | _SINKS)},
)


def _clova(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """The factor multiplies the logits."""
    default = {"attention_multiplier": model_config.head_dim**-0.5}
    has_scale = fields.has("attention_multiplier")
    model_config = of_hub(fields if has_scale else fields.with_values(default), model_config)
    return replace(
        model_config,
        logit_scale=1 / model_config.logit_scale,
        post_norm=fields.flag("use_post_norm", default=True),
    )


HYPERCLOVA_X = Family(
    hub=HubForm(more=_clova),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                "model.layers.{}.post_norm1": "layers.{}.attention_post_norm",
                "model.layers.{}.post_norm2": "layers.{}.mlp_post_norm",
            }
        )
    },
)
