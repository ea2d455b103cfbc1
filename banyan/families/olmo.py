"""OLMo 1 (arXiv 2402.00838): layer norms without weights, and q, k, v may be clamped.
OLMo 2 (arXiv 2501.00656): norms only after each block; q and k are normed over all heads.
OLMo 3: the same with windows in three of four layers, which keep the plain RoPE.
OLMoE (arXiv 2409.02060): experts, and norms as in Llama. FlexOlmo: experts, and norms as in OLMo 2.
"""

from dataclasses import replace
from functools import partial

from banyan.families.base import Biases, Family, GgufForm, HubForm, full_at_every
from banyan.families.experts import gguf_olmoe, olmoe
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    QK,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig, RopeFacts

_POST_NORMS = HUB_NAMES | {
    "model.layers.{}.post_attention_layernorm": "layers.{}.attention_post_norm",
    "model.layers.{}.post_feedforward_layernorm": "layers.{}.mlp_post_norm",
}


def limit_of(fields: CheckpointFields, key: str = "clip_qkv") -> float:
    """The clamp of q, k and v; 0 = none."""
    return fields.number(key, 1e-6, 1e6) if fields.has(key) else 0.0


def _clamped(fields: CheckpointFields, model_config: ModelConfig, key: str) -> ModelConfig:
    return replace(model_config, qkv_limit=limit_of(fields, key), norm_eps=1e-5)


def _attention_biases(fields: CheckpointFields) -> Biases:
    has_bias = fields.flag("attention_bias", default=False)
    return Biases(has_bias, has_bias)


OLMO = Family(
    hub=HubForm(biases=_attention_biases, more=partial(_clamped, key="clip_qkv")),
    gguf=GgufForm(
        "OlmoForCausalLM",
        eps_key="attention.layer_norm_epsilon",
        more=partial(_clamped, key="attention.clamp_kqv"),
    ),
    names={
        "safetensors": NameMap(HUB_NAMES),
        "gguf": NameMap(GGUF_NAMES, paired=QK),
    },
    norm="bare layer",
)

OLMO2 = Family(
    hub=HubForm(eps=1e-5),
    gguf=GgufForm("Olmo2ForCausalLM"),
    names={
        "safetensors": NameMap(_POST_NORMS | HUB_QK_NORM),
        "gguf": NameMap(
            GGUF_NAMES
            | GGUF_QK_NORM
            | {
                "blk.{}.post_attention_norm": "layers.{}.attention_post_norm",
                "blk.{}.post_ffw_norm": "layers.{}.mlp_post_norm",
            }
        ),
    },
    pre_norm=False,
    post_norm=True,
    qk_norm="width",
)


def _plain_in_windows(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """A scaled RoPE concerns full layers only."""
    if model_config.window_rope is not None or not model_config.window:
        return model_config
    return replace(model_config, window_rope=RopeFacts(theta=model_config.rope.theta))


OLMO3 = replace(
    OLMO2,
    hub=HubForm(
        eps=1e-5,
        rope_theta=5e5,
        kinds=partial(full_at_every, period=4),
        more=_plain_in_windows,
    ),
    gguf=None,
)

OLMOE = Family(
    hub=HubForm(eps=1e-5, more=olmoe),
    gguf=GgufForm("OlmoeForCausalLM", more=gguf_olmoe),
    names={
        "safetensors": NameMap(HUB_NAMES | HUB_QK_NORM | HUB_EXPERTS),
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM | GGUF_EXPERTS),
    },
    qk_norm="width",
)

FLEX_OLMO = replace(
    OLMO2,
    hub=HubForm(rope_theta=5e5, more=olmoe),
    gguf=None,
    names={"safetensors": NameMap(_POST_NORMS | HUB_QK_NORM | HUB_EXPERTS)},
)
