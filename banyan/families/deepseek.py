"""DeepSeek-V2 (arXiv 2405.04434) and V3 / R1 (arXiv 2412.19437): latent attention and experts.

The first layers have plain feed-forward blocks; layers past the last one are for drafting.
"""

from dataclasses import replace

from banyan.families.base import Family, HubForm
from banyan.families.experts import deepseek_v2, deepseek_v3
from banyan.families.names import HUB_EXPERTS, HUB_NAMES, NameMap

_ATTENTION = {
    "model.layers.{}.self_attn.q_proj": "layers.{}.attention.query",
    "model.layers.{}.self_attn.q_a_proj": "layers.{}.attention.squeeze",
    "model.layers.{}.self_attn.q_a_layernorm": "layers.{}.attention.query_norm",
    "model.layers.{}.self_attn.q_b_proj": "layers.{}.attention.query",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa": "layers.{}.attention.latent",
    "model.layers.{}.self_attn.kv_a_layernorm": "layers.{}.attention.latent_norm",
    "model.layers.{}.self_attn.kv_b_proj": "layers.{}.attention.expansion",
}
_FEED_FORWARD = {
    "model.layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.mlp.router.correction",
    "model.layers.{}.mlp.shared_experts.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    "model.layers.{}.mlp.shared_experts.up_proj": "layers.{}.mlp.shared.gate_up:up",
    "model.layers.{}.mlp.shared_experts.down_proj": "layers.{}.mlp.shared.down",
}

DEEPSEEK_V2 = Family(
    hub=HubForm(head_dim=64, more=deepseek_v2),
    names={
        "safetensors": NameMap(
            HUB_NAMES | HUB_EXPERTS | _ATTENTION | _FEED_FORWARD,
            paired=("layers.{}.attention.query", "layers.{}.attention.latent"),
            has_more_layers=True,
        )
    },
)

DEEPSEEK_V3 = replace(DEEPSEEK_V2, hub=HubForm(head_dim=64, more=deepseek_v3))
