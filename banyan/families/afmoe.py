"""AFMoE (Arcee's Trinity): norms before and after each block, a gate on every dimension of a head's
output, windows in three of four layers, which alone rotate, and experts routed as in DeepSeek-V3.

Source: the published configuration of arcee-ai/Trinity-Mini.
"""

from dataclasses import replace

from banyan.families.base import MAX_LENGTH, Biases, Family, HubForm, Kinds, window_where
from banyan.families.experts import corrected_with
from banyan.families.names import HUB_CORRECTED_EXPERTS, HUB_NAMES, HUB_QK_NORM, NameMap
from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.model_config.model_config import FULL, ModelConfig

_KEYS = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "route_scale": "routed_scaling_factor",
    "num_dense_layers": "first_k_dense_replace",
}


def _kinds(fields: CheckpointFields, num_layers: int) -> Kinds:
    period = fields.integer("global_attn_every_n_layers", 1, MAX_LENGTH, default=4)
    return window_where(fields, num_layers, lambda layer: (layer + 1) % period > 0)


def _more(fields: CheckpointFields, model_config: ModelConfig) -> ModelConfig:
    layers = range(model_config.num_layers)
    is_scaled = fields.flag("mup_enabled", default=False)
    return replace(
        corrected_with(fields, model_config, _KEYS, scale=1.0),
        embedding_scale=model_config.hidden_size**0.5 if is_scaled else 1.0,
        unrotated=tuple(layer for layer in layers if model_config.kind_of(layer) == FULL),
        has_wide_gates=True,
    )


_LAYER = "model.layers.{}."
AFMOE = Family(
    hub=HubForm(
        eps=1e-5,
        head_dim=128,
        biases=lambda fields: Biases(*[fields.flag("attention_bias", default=False)] * 2),
        kinds=_kinds,
        more=_more,
    ),
    names={
        "safetensors": NameMap(
            HUB_NAMES
            | HUB_QK_NORM
            | HUB_CORRECTED_EXPERTS
            | {
                _LAYER + "post_attention_layernorm": "layers.{}.attention_post_norm",
                _LAYER + "pre_mlp_layernorm": "layers.{}.mlp_norm",
                _LAYER + "post_mlp_layernorm": "layers.{}.mlp_post_norm",
                _LAYER + "self_attn.gate_proj": "layers.{}.attention.wide_gates",
                _LAYER + "mlp.router.gate": "layers.{}.mlp.router",
                _LAYER + "mlp.expert_bias": "layers.{}.mlp.router.correction",
            }
        )
    },
    post_norm=True,
    qk_norm="head",
)
