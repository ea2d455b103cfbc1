"""Weight names in checkpoints and their places in the model."""

from collections.abc import Mapping
from dataclasses import dataclass

HUB_NAMES = {
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
    "score": "head",
}
"""Names that most families share in Hugging Face's form."""

GGUF_NAMES = {
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
}
"""Names that most families share in GGUF (gguf-py constants)."""

HUB_EACH_EXPERT = {
    "model.layers.{}.mlp.experts.{}.gate_proj": "layers.{}.mlp.experts.gate_up:gate{}",
    "model.layers.{}.mlp.experts.{}.up_proj": "layers.{}.mlp.experts.gate_up:up{}",
    "model.layers.{}.mlp.experts.{}.down_proj": "layers.{}.mlp.experts.down:{}",
}
HUB_STACKS = {
    "model.layers.{}.mlp.experts.gate_up_proj": "layers.{}.mlp.experts.gate_up:gate*+up*.weight",
    "model.layers.{}.mlp.experts.down_proj": "layers.{}.mlp.experts.down:*.weight",
}
"""Stacked experts, as transformers 5 saves them."""
HUB_EXPERTS = {
    "model.layers.{}.mlp.gate": "layers.{}.mlp.router",
    **HUB_EACH_EXPERT,
    **HUB_STACKS,
}
"""Names that most families of experts share in Hugging Face's form."""

HUB_CORRECTED_EXPERTS = HUB_EXPERTS | {
    "model.layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.mlp.router.correction",
    "model.layers.{}.mlp.shared_experts.gate_proj": "layers.{}.mlp.shared.gate_up:gate",
    "model.layers.{}.mlp.shared_experts.up_proj": "layers.{}.mlp.shared.gate_up:up",
    "model.layers.{}.mlp.shared_experts.down_proj": "layers.{}.mlp.shared.down",
}
"""Experts of families that follow DeepSeek."""

HUB_MTP = {
    "model.layers.{}.enorm": "layers.{}.token_norm",
    "model.layers.{}.hnorm": "layers.{}.state_norm",
    "model.layers.{}.eh_proj": "layers.{}.join",
    "model.layers.{}.shared_head.norm": "layers.{}.norm",
}
"""Weights of an MTP layer in addition to a decoder layer's (DeepSeek's names)."""

GGUF_MTP = {
    "blk.{}.nextn.enorm": "layers.{}.token_norm",
    "blk.{}.nextn.hnorm": "layers.{}.state_norm",
    "blk.{}.nextn.eh_proj": "layers.{}.join",
    "blk.{}.nextn.shared_head_norm": "layers.{}.norm",
}
"""The same in GGUF (gguf-py constants)."""

HUB_MIXTRAL_EXPERTS = {
    "model.layers.{}.block_sparse_moe.gate": "layers.{}.mlp.router",
    "model.layers.{}.block_sparse_moe.experts.{}.w1": "layers.{}.mlp.experts.gate_up:gate{}",
    "model.layers.{}.block_sparse_moe.experts.{}.w3": "layers.{}.mlp.experts.gate_up:up{}",
    "model.layers.{}.block_sparse_moe.experts.{}.w2": "layers.{}.mlp.experts.down:{}",
    "model.layers.{}.mlp.gate": "layers.{}.mlp.router",
    **HUB_STACKS,
}
"""Experts of families that follow Mixtral."""

HUB_GRANITE_EXPERTS = {
    "model.layers.{}.block_sparse_moe.router.layer": "layers.{}.mlp.router",
    "model.layers.{}.block_sparse_moe.router": "layers.{}.mlp.router",
    "model.layers.{}.block_sparse_moe.input_linear": "layers.{}.mlp.experts.gate_up:gate*+up*",
    "model.layers.{}.block_sparse_moe.output_linear": "layers.{}.mlp.experts.down:*",
    "model.layers.{}.block_sparse_moe.experts.{}.w1": "layers.{}.mlp.experts.gate_up:gate{}",
    "model.layers.{}.block_sparse_moe.experts.{}.w3": "layers.{}.mlp.experts.gate_up:up{}",
    "model.layers.{}.block_sparse_moe.experts.{}.w2": "layers.{}.mlp.experts.down:{}",
    **{name.replace(".mlp.", ".block_sparse_moe."): place for name, place in HUB_STACKS.items()},
}
"""Granite's experts: one tensor per layer, or one per expert in quantized checkpoints."""

GGUF_EXPERTS = {
    "blk.{}.ffn_gate_inp": "layers.{}.mlp.router",
    "blk.{}.exp_probs_b.bias": "layers.{}.mlp.router.correction",
    "blk.{}.ffn_gate_exps": "layers.{}.mlp.experts.gate_up:gate*",
    "blk.{}.ffn_up_exps": "layers.{}.mlp.experts.gate_up:up*",
    "blk.{}.ffn_down_exps": "layers.{}.mlp.experts.down:*",
    "blk.{}.ffn_gate.{}": "layers.{}.mlp.experts.gate_up:gate{}",
    "blk.{}.ffn_up.{}": "layers.{}.mlp.experts.gate_up:up{}",
    "blk.{}.ffn_down.{}": "layers.{}.mlp.experts.down:{}",
    "blk.{}.ffn_gate_shexp": "layers.{}.mlp.shared.gate_up:gate",
    "blk.{}.ffn_up_shexp": "layers.{}.mlp.shared.gate_up:up",
    "blk.{}.ffn_down_shexp": "layers.{}.mlp.shared.down",
    "blk.{}.ffn_gate_inp_shexp": "layers.{}.mlp.shared_gate",
}
"""Names that families of experts share in GGUF; the oldest files have a tensor per expert."""

HUB_QK_NORM = {
    "model.layers.{}.self_attn.q_norm": "layers.{}.attention.q_norm",
    "model.layers.{}.self_attn.k_norm": "layers.{}.attention.k_norm",
}
GGUF_QK_NORM = {
    "blk.{}.attn_q_norm": "layers.{}.attention.q_norm",
    "blk.{}.attn_k_norm": "layers.{}.attention.k_norm",
}
QK = ("layers.{}.attention.qkv:q", "layers.{}.attention.qkv:k")


@dataclass(frozen=True)
class NameMap:
    """Checkpoint names of one format.

    Attributes:
        modules: name without its last part and with {} for every number -> module of DecoderLM,
            "module:part" when several tensors make one weight, "module:part+part" when one tensor
            holds several parts over one another, "*" in a part when the tensor's first dimension
            counts the experts. A name with its last part -> "module.slot".
        ignored: names, {} for every number, that the model does not need.
        unread: prefixes of names that the model does not need.
        optional_part: part of a module's name that is dropped if the model has no such module.
        has_more_layers: the checkpoint has MTP layers after the model's, which are not read.
        has_gates_between: a tensor holds all experts with gate and up rows interleaved
            (`models/weights/checkpoint_layouts.py`).
        has_inputs_first: stacks of experts are [experts, in, out].
        paired: modules ("module:part") whose rows are in interleaved RoPE pairs.
        rope_divisors: tensor with divisors of the RoPE frequencies; "" = none.
        norm_offset: added to every norm weight (Gemma stores them minus one).
        is_rms_offset: only weights of RMSNorms get it.
        grouped: names, {} for every number, whose rows are q, k and v of one KV head after another
            (`models/weights/checkpoint_layouts.py`).
        shards: `grouped` rows are q, v and k of one of so many shards after another; 0 = of one
            KV head.
        transposed: names whose matrices are [in, out].
    """

    modules: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    paired: tuple[str, ...] = ()
    rope_divisors: str = ""
    norm_offset: float = 0.0
    is_rms_offset: bool = False
    grouped: tuple[str, ...] = ()
    shards: int = 0
    transposed: tuple[str, ...] = ()
    has_more_layers: bool = False
    unread: tuple[str, ...] = ()
    optional_part: str = ""
    has_gates_between: bool = False
    has_inputs_first: bool = False
