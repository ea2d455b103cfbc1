"""Converts checkpoints of transformers to the names and orders of GGUF."""

import gguf
import numpy as np
import torch

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, slot = name.rpartition(".")
    if stem in fixed:
        return f"{fixed[stem]}.{slot}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{slot}"


def interleave(values: np.ndarray, head_dim: int) -> np.ndarray:
    """The row order in which GGUF files keep q and k of the llama family."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def convert(model, path, type_name, divisors=None, describe=None):
    """Write a transformers Llama as GGUF; the model takes the rounded weights itself."""
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType[type_name]
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight" and tied:
            continue
        values = parameter.detach().numpy()
        if parameter.dim() > 1:
            raw = gguf.quantize(values, kind)
            parameter.data.copy_(torch.from_numpy(gguf.dequantize(raw, kind)))
        is_paired = ".q_proj." in name or ".k_proj." in name
        values = interleave(values, model.config.head_dim) if is_paired else values
        if parameter.dim() > 1:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    if describe is not None:
        describe(model.config, "llama", writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
