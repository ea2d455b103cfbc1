"""Llama and its relatives (Llama 1–3, SmolLM, TinyLlama, Mistral): the default of every form.

Llama 3: arXiv 2407.21783. GGUF names: gguf-py constants, architecture "llama".
"""

from dataclasses import replace

from banyan.families.base import Family, GgufForm, HubForm, without_logits
from banyan.families.experts import gguf_mixtral
from banyan.families.names import GGUF_NAMES, HUB_NAMES, QK, NameMap

LLAMA = Family(
    gguf=GgufForm("LlamaForCausalLM", more=gguf_mixtral),
    names={
        "safetensors": NameMap(
            HUB_NAMES, ignored=("model.layers.{}.self_attn.rotary_emb.inv_freq",)
        ),
        "gguf": NameMap(GGUF_NAMES, paired=QK, rope_divisors="rope_freqs.weight"),
    },
)

LLAMA_BODY = replace(LLAMA, hub=HubForm(more=without_logits), gguf=None)
"""For embedding models and classifiers."""
