"""Mixtral (arXiv 2401.04088): Llama's attention and experts. Its GGUF files have the architecture
"llama" (`llama.py`).
"""

from banyan.families.base import Family, HubForm
from banyan.families.experts import mixtral
from banyan.families.names import (
    GGUF_EXPERTS,
    GGUF_NAMES,
    HUB_MIXTRAL_EXPERTS,
    HUB_NAMES,
    QK,
    NameMap,
)

MIXTRAL = Family(
    hub=HubForm(eps=1e-5, rope_theta=1e6, more=mixtral),
    names={
        "safetensors": NameMap(HUB_NAMES | HUB_MIXTRAL_EXPERTS),
        "gguf": NameMap(GGUF_NAMES | GGUF_EXPERTS, paired=QK, rope_divisors="rope_freqs.weight"),
    },
)
