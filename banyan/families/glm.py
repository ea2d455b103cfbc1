"""GLM (GLM-4-9B): RoPE on half of each head, in pairs 2i, 2i + 1, and bias on q, k, v.
GLM-4 (0414): the same with norms before and after each block.
GLM-4.5, 4.6 (arXiv 2508.06471): Llama's norms, and experts routed as in DeepSeek-V3. Solar Open:
the same with experts in every layer.

Source: the published configurations of THUDM/GLM-4-9B-0414 and zai-org/GLM-4.5; GGUF architecture
"glm4".
"""

from dataclasses import replace
from functools import partial

from banyan.families.base import Biases, Family, GgufForm, HubForm, MTPForm
from banyan.families.experts import (
    corrected,
    corrected_with,
    gguf_corrected,
    mtp_layers,
    without_mtp_layers,
)
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_MTP,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_CORRECTED_EXPERTS,
    HUB_MTP,
    HUB_NAMES,
    HUB_QK_NORM,
    QK,
    NameMap,
)
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig


def _of_experts(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    """Only the largest models norm q and k."""
    is_normed = fields.flag("use_qk_norm", default=False)
    experts = corrected(fields, model_config, is_normalised=True, scale=1.0)
    mtp = mtp_layers(fields)
    return replace(
        model_config, experts=experts, qk_norm="head" if is_normed else "", num_mtp_layers=mtp
    )


def _of_gguf_experts(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    model_config = without_mtp_layers(fields, model_config)
    return replace(model_config, experts=gguf_corrected(fields, model_config))


GLM4 = Family(
    hub=HubForm(
        eps=1.5625e-7,
        head_dim=128,
        rotary=0.5,
        biases=lambda fields: Biases(qkv=fields.flag("attention_bias", default=True)),
    ),
    gguf=GgufForm("Glm4ForCausalLM"),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                "model.layers.{}.mlp.gate_up_proj": "layers.{}.mlp.gate_up:gate+up",
                "model.layers.{}.post_self_attn_layernorm": "layers.{}.attention_post_norm",
                "model.layers.{}.post_mlp_layernorm": "layers.{}.mlp_post_norm",
            },
            paired=QK,
        ),
        "gguf": NameMap(
            GGUF_NAMES
            | {
                "blk.{}.attn_qkv": "layers.{}.attention.qkv:q+k+v",
                "blk.{}.ffn_up": "layers.{}.mlp.gate_up:gate+up",
                "blk.{}.post_attention_norm": "layers.{}.attention_post_norm",
                "blk.{}.post_ffw_norm": "layers.{}.mlp_post_norm",
            },
            paired=QK,
            rope_divisors="rope_freqs.weight",
        ),
    },
    post_norm=True,
)

GLM = replace(
    GLM4,
    gguf=None,
    names={
        "safetensors": NameMap(
            HUB_NAMES | {"model.layers.{}.mlp.gate_up_proj": "layers.{}.mlp.gate_up:gate+up"},
            paired=QK,
        )
    },
    post_norm=False,
)

_GGUF_OF_EXPERTS = (
    GGUF_NAMES | GGUF_QK_NORM | GGUF_EXPERTS | {"blk.{}.post_attention_norm": "layers.{}.mlp_norm"}
)
GLM4_MOE = Family(
    hub=HubForm(
        eps=1e-5,
        rotary=0.5,
        biases=lambda fields: Biases(qkv=fields.flag("attention_bias", default=False)),
        more=_of_experts,
    ),
    gguf=GgufForm("Glm4MoeForCausalLM", may_norm_heads=True, more=_of_gguf_experts),
    names={
        "safetensors": NameMap(
            HUB_NAMES | HUB_QK_NORM | HUB_CORRECTED_EXPERTS, has_more_layers=True
        ),
        "gguf": NameMap(_GGUF_OF_EXPERTS, has_more_layers=True),
    },
    mtp=MTPForm(
        {
            "safetensors": (
                "model.layers.{}.",
                NameMap(HUB_NAMES | HUB_QK_NORM | HUB_CORRECTED_EXPERTS | HUB_MTP),
            ),
            "gguf": ("blk.{}.", NameMap(_GGUF_OF_EXPERTS | GGUF_MTP)),
        }
    ),
)

SOLAR_OPEN = Family(
    hub=HubForm(
        eps=1e-5,
        head_dim=128,
        rope_theta=1e6,
        inner_keys=("intermediate_size", "moe_intermediate_size"),
        more=partial(corrected_with, keys={}, scale=1.0),
    ),
    names={"safetensors": NameMap(HUB_NAMES | HUB_CORRECTED_EXPERTS)},
)
