"""GLM-4 (0414): norms before and after each block, half of each head rotates, in pairs 2i, 2i + 1.

Source: the published configuration of THUDM/GLM-4-9B-0414; GGUF architecture "glm4".
"""

from banyan.families.base import Biases, Family, GgufForm, HubForm
from banyan.families.names import GGUF_NAMES, HUB_NAMES, QK, NameMap

GLM4 = Family(
    hub=HubForm(
        eps=1.5625e-7,
        head_dim=128,
        rotary=0.5,
        biases=lambda facts: Biases(qkv=facts.flag("attention_bias", default=True)),
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
