"""Llama and its relatives (Llama 1–3, SmolLM, TinyLlama, Mistral): only names differ from the card.

Llama 3: arXiv 2407.21783. GGUF names: gguf-py constants, architecture "llama".
"""

from banyan.models.spec import ArchSpec, NameMap

_SAFETENSORS = NameMap(
    modules={
        "model.embed_tokens": "embedding",
        "model.layers.{}.input_layernorm": "layers.{}.attention_norm",
        "model.layers.{}.self_attn.q_proj": "layers.{}.attention.qkv:q",
        "model.layers.{}.self_attn.k_proj": "layers.{}.attention.qkv:k",
        "model.layers.{}.self_attn.v_proj": "layers.{}.attention.qkv:v",
        "model.layers.{}.self_attn.o_proj": "layers.{}.attention.out",
        "model.layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
        "model.layers.{}.mlp.gate_proj": "layers.{}.mlp.gate_up:gate",
        "model.layers.{}.mlp.up_proj": "layers.{}.mlp.gate_up:up",
        "model.layers.{}.mlp.down_proj": "layers.{}.mlp.down",
        "model.norm": "norm",
        "lm_head": "head",
    },
    ignored=("model.layers.{}.self_attn.rotary_emb.inv_freq",),
)

_GGUF = NameMap(
    modules={
        "token_embd": "embedding",
        "blk.{}.attn_norm": "layers.{}.attention_norm",
        "blk.{}.attn_q": "layers.{}.attention.qkv:q",
        "blk.{}.attn_k": "layers.{}.attention.qkv:k",
        "blk.{}.attn_v": "layers.{}.attention.qkv:v",
        "blk.{}.attn_output": "layers.{}.attention.out",
        "blk.{}.ffn_norm": "layers.{}.mlp_norm",
        "blk.{}.ffn_gate": "layers.{}.mlp.gate_up:gate",
        "blk.{}.ffn_up": "layers.{}.mlp.gate_up:up",
        "blk.{}.ffn_down": "layers.{}.mlp.down",
        "output_norm": "norm",
        "output": "head",
    },
    paired=("layers.{}.attention.qkv:q", "layers.{}.attention.qkv:k"),
    rope_divisors="rope_freqs.weight",
)

LLAMA = ArchSpec(names={"safetensors": _SAFETENSORS, "gguf": _GGUF})
