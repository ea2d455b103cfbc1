"""Makes the model files that the peers need. Runs in the environment of the transformers peer.

convert.py hf MODEL.gguf FOLDER           dequantised to float32 safetensors, with its tokenizer
convert.py dummy TOKENIZER_FOLDER FOLDER  random weights in the shape of Qwen3-0.6B, bfloat16
convert.py gguf FOLDER TOKENIZER.gguf OUT.gguf BF16|Q8_0|Q4_0
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

# Settings the file formats and benchmarks share with Qwen3-0.6B.
_QWEN3 = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def to_hf(source: str, folder: str) -> None:
    """The weights go through a fresh model: one read from GGUF cannot be saved."""
    path = Path(source)
    where = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fresh.load_state_dict(model.state_dict())
    fresh.tie_weights()
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, **where).save_pretrained(folder)


def to_dummy(tokenizer_folder: str, folder: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**_QWEN3), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)


def to_gguf(folder: str, tokenizer_gguf: str, out: str, kind: str) -> None:
    """A Qwen3 folder with the tokenizer of another GGUF, its vocabulary padded."""
    config = json.loads((Path(folder) / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "qwen3")
    writer.add_name(Path(folder).name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, gguf.GGUFReader(tokenizer_gguf), config["vocab_size"])
    with safe_open(Path(folder) / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a mapping)
            if name != "lm_head.weight":
                _add_tensor(writer, name, tensors.get_tensor(name), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, source: gguf.GGUFReader, vocab_size: int) -> None:
    def field(name: str) -> object:
        return source.fields[f"tokenizer.ggml.{name}"].contents()

    tokens, types = list(field("tokens")), list(field("token_type"))
    padding = range(vocab_size - len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(field("pre") if "tokenizer.ggml.pre" in source.fields else "smollm")
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in padding])
    writer.add_token_types(types + [gguf.TokenType.UNUSED for _ in padding])
    writer.add_token_merges(field("merges"))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    stem = name.removesuffix(".weight")
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    target = f"{prefix}{_GGUF_NAMES[stem]}.weight"
    if tensor.dim() == 1:
        writer.add_tensor(target, tensor.float().numpy())
        return
    quantised = gguf.GGMLQuantizationType[kind]
    if kind == "BF16":
        raw = tensor.contiguous().view(torch.int16).numpy().view(np.uint8)
        writer.add_tensor(target, raw.reshape(tensor.shape[0], -1), raw_dtype=quantised)
    else:
        raw = gguf.quants.quantize(tensor.float().numpy(), quantised)
        writer.add_tensor(target, raw, raw_dtype=quantised)


if __name__ == "__main__":
    {"hf": to_hf, "dummy": to_dummy, "gguf": to_gguf}[sys.argv[1]](*sys.argv[2:])
