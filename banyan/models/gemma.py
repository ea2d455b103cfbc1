"""Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786).

Norms before and after each block. Hugging Face's form stores norm weights minus one, GGUF does not.
"""

from banyan.models.spec import (
    GGUF_NAMES,
    GGUF_QK_NORM,
    HUB_NAMES,
    HUB_QK_NORM,
    ArchSpec,
    NameMap,
)

_HUB = HUB_NAMES | {
    "model.layers.{}.post_attention_layernorm": "layers.{}.attention_post_norm",
    "model.layers.{}.pre_feedforward_layernorm": "layers.{}.mlp_norm",
    "model.layers.{}.post_feedforward_layernorm": "layers.{}.mlp_post_norm",
}
_GGUF = GGUF_NAMES | {
    "blk.{}.post_attention_norm": "layers.{}.attention_post_norm",
    "blk.{}.post_ffw_norm": "layers.{}.mlp_post_norm",
}

GEMMA2 = ArchSpec(
    names={"safetensors": NameMap(_HUB, norm_offset=1.0), "gguf": NameMap(_GGUF)}, post_norm=True
)

GEMMA3 = ArchSpec(
    names={
        "safetensors": NameMap(_HUB | HUB_QK_NORM, norm_offset=1.0),
        "gguf": NameMap(_GGUF | GGUF_QK_NORM),
    },
    post_norm=True,
    qk_norm="head",
)
