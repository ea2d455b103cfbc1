"""OLMo 2 (arXiv 2501.00656): norms only after each block; q and k are normed over all heads.
OLMoE (arXiv 2409.02060): experts, and norms as in Llama.
"""

from banyan.families.base import Family, GgufForm, HubForm
from banyan.families.experts import gguf_olmoe, olmoe
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_EXPERTS,
    HUB_NAMES,
    HUB_QK_NORM,
    NameMap,
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
