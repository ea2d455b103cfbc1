"""Phi-3 (arXiv 2404.14219) and Phi-4, which have one tensor for q, k, v and one for gate and up."""

from banyan.families.base import Biases, Family, GgufForm, HubForm
from banyan.families.names import GGUF_NAMES, HUB_NAMES, NameMap

PHI3 = Family(
    hub=HubForm(
        eps=1e-5,
        biases=lambda facts: Biases(),
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
            # The card holds these two already.
            ignored=("rope_factors_long.weight", "rope_factors_short.weight"),
        ),
    },
)
