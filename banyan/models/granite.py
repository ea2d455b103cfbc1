"""Granite 3 (dense): Llama with factors on embedding, residual, attention and logits (the card's).

Source: the published configuration of ibm-granite/granite-3.x; GGUF architecture "granite".
"""

from banyan.models.spec import GGUF_NAMES, HUB_NAMES, QK, ArchSpec, NameMap

GRANITE = ArchSpec(
    names={
        "safetensors": NameMap(HUB_NAMES),
        "gguf": NameMap(GGUF_NAMES, paired=QK, rope_divisors="rope_freqs.weight"),
    }
)
