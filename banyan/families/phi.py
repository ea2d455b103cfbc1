"""Phi-1, Phi-2: one layer norm feeds attention and feed-forward in parallel; biases everywhere.
Phi-3 (arXiv 2404.14219) and Phi-4: one tensor for q, k, v and one for gate and up. Phi-3.5-MoE:
layer norms with biases, and two experts per token, chosen by SparseMixer.

Source of Phi-3.5-MoE: the published configuration of microsoft/Phi-3.5-MoE-instruct.
"""

from dataclasses import replace

from banyan.families.base import GELU_TANH, Biases, Family, GgufForm, HubForm
from banyan.families.experts import mixtral_experts
from banyan.families.names import GGUF_NAMES, HUB_MIXTRAL_EXPERTS, HUB_NAMES, NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import ModelConfig


def _moe(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    experts = mixtral_experts(fields, model_config)
    if experts.per_token != 2:
        raise fields.error("num_experts_per_tok", experts.per_token, "2, which its router chooses")
    return replace(
        model_config,
        experts=replace(
            experts,
            scoring="sparsemixer",
            is_normalised=False,
            jitter=fields.number("router_jitter_noise", 0.0, 1.0, default=0.01),
        ),
        head_bias=fields.flag("lm_head_bias", default=False),
    )


def _moe_biases(fields: CheckpointFields) -> Biases:
    has_bias = fields.flag("attention_bias", default=False)
    return Biases(has_bias, has_bias)


PHI3 = Family(
    hub=HubForm(
        eps=1e-5,
        biases=lambda fields: Biases(),
        rope_kinds={"su": "longrope", "yarn": "longrope"},
    ),
    gguf=GgufForm("Phi3ForCausalLM"),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                "model.layers.{}.self_attn.qkv_proj": "layers.{}.attention.qkv:q+k+v",
                "model.layers.{}.mlp.gate_up_proj": "layers.{}.mlp.gate_up:gate+up",
            }
        ),
        "gguf": NameMap(
            GGUF_NAMES
            | {
                "blk.{}.attn_qkv": "layers.{}.attention.qkv:q+k+v",
                "blk.{}.ffn_up": "layers.{}.mlp.gate_up:gate+up",
            },
            # The RoPE fields of ModelConfig hold these two already.
            ignored=("rope_factors_long.weight", "rope_factors_short.weight"),
        ),
    },
)


def _of_hub(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    is_normed = fields.flag("qk_layernorm", default=False)
    return replace(model_config, head_bias=True, qk_norm="layer+bias" if is_normed else "")


def _of_gguf(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    return replace(model_config, head_bias=True)


PHI = Family(
    hub=HubForm(
        eps_key="layer_norm_eps",
        eps=1e-5,
        activation=GELU_TANH,
        rotary=0.5,
        biases=lambda fields: Biases(True, True, True),
        more=_of_hub,
    ),
    gguf=GgufForm("PhiForCausalLM", GELU_TANH, "attention.layer_norm_epsilon", more=_of_gguf),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | {
                "model.final_layernorm": "norm",
                "model.layers.{}.self_attn.dense": "layers.{}.attention.out",
                "model.layers.{}.self_attn.q_layernorm": "layers.{}.attention.q_norm",
                "model.layers.{}.self_attn.k_layernorm": "layers.{}.attention.k_norm",
                "model.layers.{}.mlp.fc1": "layers.{}.mlp.up",
                "model.layers.{}.mlp.fc2": "layers.{}.mlp.down",
            }
        ),
        "gguf": NameMap(
            GGUF_NAMES
            | {
                "blk.{}.attn_qkv": "layers.{}.attention.qkv:q+k+v",
                "blk.{}.ffn_up": "layers.{}.mlp.up",
            }
        ),
    },
    norm="layer+bias",
    parallel="one norm",
    gated=False,
)

_ROUTER = {"model.layers.{}.mlp.router": "layers.{}.mlp.router"}

PHI_MOE = Family(
    hub=HubForm(
        eps=1e-5, rope_theta=1e6, rope_kinds={"su": "longrope"}, biases=_moe_biases, more=_moe
    ),
    names={"safetensors": NameMap(HUB_NAMES | HUB_MIXTRAL_EXPERTS | _ROUTER)},
    norm="layer+bias",
)
