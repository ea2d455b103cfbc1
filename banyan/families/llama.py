"""Llama and its close relatives: the default of every form.

Llama 1–3 (arXiv 2407.21783), SmolLM, TinyLlama, Mistral. GGUF: gguf-py, architecture "llama".
Ministral 3 (published configurations of mistralai): the same with queries scaled by position.
Mixtral (arXiv 2401.04088): Llama's attention and experts; GGUF has it as "llama" too.
StarCoder2 (arXiv 2402.19173): layer norms with bias and a feed-forward block without a gate.
CWM: window layers. Helium: RoPE in pairs 2i, 2i + 1. Seed-OSS: bias on q, k, v.
SmolLM3: some layers do not rotate. Arcee: a feed-forward block without a gate, squared ReLU.
"""

from dataclasses import replace

from banyan.families.base import (
    GELU_TANH,
    MAX_LENGTH,
    Biases,
    Family,
    GgufForm,
    HubForm,
    limited,
    window_everywhere,
    without_logits,
)
from banyan.families.experts import gguf_mixtral, mixtral
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    HUB_MIXTRAL_EXPERTS,
    HUB_NAMES,
    QK,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig

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

MINISTRAL = Family(
    hub=HubForm(biases=lambda fields: Biases(), kinds=window_everywhere),
    names={"safetensors": NameMap(HUB_NAMES)},
)

HELIUM = Family(
    hub=HubForm(eps=1e-8, head_dim=128, rope_theta=1e5),
    names={"safetensors": NameMap(HUB_NAMES, paired=QK)},
)

CWM = Family(
    hub=HubForm(eps=1e-5, head_dim=128, rope_theta=1e6),
    names={"safetensors": NameMap(HUB_NAMES)},
)


def _seed_biases(fields: CheckpointFields) -> Biases:
    return Biases(
        fields.flag("attention_bias", default=True),
        fields.flag("attention_out_bias", default=False),
        fields.flag("mlp_bias", default=False),
    )


SEED_OSS = Family(
    hub=HubForm(head_dim=128, biases=_seed_biases),
    gguf=GgufForm("SeedOssForCausalLM"),
    names={
        "safetensors": NameMap(HUB_NAMES),
        "gguf": NameMap(GGUF_NAMES | {"blk.{}.post_attention_norm": "layers.{}.mlp_norm"}),
    },
)


def _still_layers(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Every fourth layer has no rotation, unless a list says which."""
    period = fields.integer("no_rope_layer_interval", 1, MAX_LENGTH, default=4)
    layers = range(model_config.num_layers)
    turns = fields.listed("no_rope_layers") or [int((at + 1) % period > 0) for at in layers]
    if len(turns) != len(layers) or any(each not in (0, 1) for each in turns):
        raise fields.error("no_rope_layers", turns, f"{len(layers)} of 0 and 1")
    return replace(model_config, unrotated=tuple(at for at in layers if not turns[at]))


SMOLLM3 = Family(
    hub=HubForm(tied=True, rope_theta=2e6, more=_still_layers),
    gguf=GgufForm("SmolLM3ForCausalLM", more=_still_layers),
    names={
        "safetensors": NameMap(HUB_NAMES),
        "gguf": NameMap(GGUF_NAMES, paired=QK),
    },
)

HUB_PLAIN = HUB_NAMES | {"model.layers.{}.mlp.up_proj": "layers.{}.mlp.up"}
GGUF_PLAIN = GGUF_NAMES | {"blk.{}.ffn_up": "layers.{}.mlp.up"}
"""Feed-forward blocks without a gate."""

ARCEE = Family(
    hub=HubForm(eps=1e-5, activation="relu2"),
    gguf=GgufForm("ArceeForCausalLM", "relu2"),
    names={
        "safetensors": NameMap(HUB_PLAIN),
        "gguf": NameMap(GGUF_PLAIN, paired=QK, rope_divisors="rope_freqs.weight"),
    },
    gated=False,
)
