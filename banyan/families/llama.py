"""Llama and its close relatives: the default of every form.

Llama 1–3 (arXiv 2407.21783), SmolLM, TinyLlama, Mistral. GGUF: gguf-py, architecture "llama".
Ministral 3 (published configurations of mistralai): the same with queries scaled by position.
Mixtral (arXiv 2401.04088): Llama's attention and experts; GGUF has it as "llama" too.
StarCoder2 (arXiv 2402.19173): layer norms with bias and a feed-forward block without a gate.
Cohere 2 (Command R7B, Command A): one norm feeds attention and feed-forward in parallel. Window
layers rotate in pairs 2i, 2i + 1; full layers have no position embedding at all. Source: the
published configuration of CohereForAI/c4ai-command-r7b.
OLMo 2 (arXiv 2501.00656): norms only after each block; q and k are normed over all heads.
OLMoE (arXiv 2409.02060): experts, and norms as in Llama.
"""

from dataclasses import replace
from functools import partial

from banyan.families.base import (
    GELU_TANH,
    MAX_LENGTH,
    Biases,
    Family,
    GgufForm,
    HubForm,
    full_at_every,
    limited,
    without_logits,
)
from banyan.families.experts import gguf_mixtral, gguf_olmoe, mixtral, olmoe
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_EXPERTS,
    HUB_MIXTRAL_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    QK,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig, RopeFacts

LLAMA = Family(
    gguf=GgufForm("LlamaForCausalLM", more=gguf_mixtral),
    names={
        "safetensors": NameMap(
            HUB_NAMES, ignored=("model.layers.{}.self_attn.rotary_emb.inv_freq",)
        ),
        "gguf": NameMap(GGUF_NAMES, paired=QK, rope_divisors="rope_freqs.weight"),
    },
)

LLAMA_BODY = replace(LLAMA, hub=HubForm(more=without_logits), gguf=None)
"""For embedding models and classifiers."""


def _within_plain_scale(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Queries are scaled by 1 + β·log(1 + ⌊position / length⌋), which is 1 below the length."""
    rope = fields.part("rope_parameters")
    if rope is None or not rope.number("llama_4_scaling_beta", 0.0, 1e3, default=0.0):
        return model_config
    length = rope.integer("original_max_position_embeddings", 1, MAX_LENGTH)
    return limited(model_config, length, "queries are not scaled by position")


MINISTRAL3 = Family(
    hub=HubForm(eps=1e-5, head_dim=128, more=_within_plain_scale),
    names={"safetensors": NameMap(HUB_NAMES)},
)


MIXTRAL = Family(
    hub=HubForm(eps=1e-5, rope_theta=1e6, more=mixtral),
    names={
        "safetensors": NameMap(HUB_NAMES | HUB_MIXTRAL_EXPERTS),
        "gguf": NameMap(GGUF_NAMES | GGUF_EXPERTS, paired=QK, rope_divisors="rope_freqs.weight"),
    },
)


def _biases(fields: CheckpointFields) -> Biases:
    has_bias = fields.flag("use_bias", default=True)
    return Biases(has_bias, has_bias, has_bias)


STARCODER2 = Family(
    hub=HubForm(eps_key="norm_epsilon", eps=1e-5, activation=GELU_TANH, tied=True, biases=_biases),
    gguf=GgufForm("Starcoder2ForCausalLM", GELU_TANH, "attention.layer_norm_epsilon"),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                "model.layers.{}.mlp.c_fc": "layers.{}.mlp.up",
                "model.layers.{}.mlp.c_proj": "layers.{}.mlp.down",
            }
        ),
        "gguf": NameMap(GGUF_NAMES | {"blk.{}.ffn_up": "layers.{}.mlp.up"}),
    },
    norm="layer+bias",
    gated=False,
)


def _positions_in_windows(
    fields: CheckpointFields, model_config: ModelConfig, default_scale: float
) -> ModelConfig:
    """Only window layers have a position embedding."""
    return replace(
        model_config,
        logit_scale=fields.number("logit_scale", 1e-6, 1e6, default=default_scale),
        rope=RopeFacts(kind="none"),
        window_rope=model_config.rope,
    )


COHERE2 = Family(
    hub=HubForm(
        eps_key="layer_norm_eps",
        eps=1e-5,
        tied=True,
        kinds=partial(full_at_every, period=4),
        more=partial(_positions_in_windows, default_scale=0.0625),
    ),
    gguf=GgufForm(
        "Cohere2ForCausalLM",
        eps_key="attention.layer_norm_epsilon",
        window_period=4,
        more=partial(_positions_in_windows, default_scale=1.0),
    ),
    names={
        "safetensors": NameMap(HUB_NAMES, paired=QK),
        "gguf": NameMap(GGUF_NAMES, paired=QK),
    },
    norm="layer",
    parallel=True,
)


OLMO2 = Family(
    hub=HubForm(eps=1e-5),
    gguf=GgufForm("Olmo2ForCausalLM"),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | HUB_QK_NORM
            | {
                "model.layers.{}.post_attention_layernorm": "layers.{}.attention_post_norm",
                "model.layers.{}.post_feedforward_layernorm": "layers.{}.mlp_post_norm",
            }
        ),
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

OLMOE = Family(
    hub=HubForm(eps=1e-5, more=olmoe),
    gguf=GgufForm("OlmoeForCausalLM", more=gguf_olmoe),
    names={
        "safetensors": NameMap(HUB_NAMES | HUB_QK_NORM | HUB_EXPERTS),
        "gguf": NameMap(GGUF_NAMES | GGUF_QK_NORM | GGUF_EXPERTS),
    },
    qk_norm="width",
)
