"""GGUF files of random 4-bit weights in the shapes of published models of experts, cut in depth: to
measure, not to talk to.

    python -m benchmarks.random_experts qwen3-30b-a3b FILE [LAYERS]
    python -m benchmarks.random_experts deepseek-v2-lite FILE [LAYERS]
"""

import sys
from collections.abc import Callable

import gguf
import numpy as np

Q4 = gguf.GGMLQuantizationType.Q4_0
Q8 = gguf.GGMLQuantizationType.Q8_0
VOCAB, DIM = 32000, 2048


class RandomFile:
    """A GGUF file whose tensors are drawn as they are asked for."""

    def __init__(self, path: str, architecture: str, layers: int, vocab: int = VOCAB) -> None:
        self.vocab = vocab
        self.writer = gguf.GGUFWriter(path, architecture)
        self.random = np.random.default_rng(1)
        writer = self.writer
        writer.add_name(f"random {architecture}")
        writer.add_context_length(32768)
        writer.add_embedding_length(DIM)
        writer.add_block_count(layers)
        writer.add_layer_norm_rms_eps(1e-6)
        self._add_tokenizer()
        self.quantised("token_embd.weight", vocab, DIM)
        self.quantised("output.weight", vocab, DIM)
        self.ones("output_norm.weight", DIM)

    def _add_tokenizer(self) -> None:
        """Bytes, one pair of them, and words that no text has."""
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        letters = [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))]
        tokens = [*letters, letters[0] + letters[1]]
        types = [gguf.TokenType.NORMAL] * len(tokens)
        rest = self.vocab - len(tokens)
        tokens += [f"[PAD{i}]" for i in range(rest)]
        types += [gguf.TokenType.UNUSED] * rest
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("gpt-2")
        self.writer.add_token_list(tokens)
        self.writer.add_token_types(types)
        self.writer.add_token_merges([f"{letters[0]} {letters[1]}"])
        self.writer.add_eos_token_id(1)
        self.writer.add_bos_token_id(0)
        self.writer.add_add_bos_token(False)

    def ones(self, name: str, size: int) -> None:
        self.writer.add_tensor(name, np.ones(size, np.float32))

    def floats(self, name: str, *shape: int) -> None:
        values = self.random.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        self.writer.add_tensor(name, values)

    def quantised(self, name: str, *shape: int, kind: gguf.GGMLQuantizationType = Q4) -> None:
        """Blocks of random bits, their scales such that a product keeps its size."""
        size = 18 if kind == Q4 else 34
        spread = 4.6 if kind == Q4 else 74.0  # of the numbers in a block
        blocks = self.random.integers(0, 256, (*shape[:-1], shape[-1] // 32, size), np.uint8)
        scale = np.float16(shape[-1] ** -0.5 / spread)
        blocks[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
        raw = blocks.reshape(*shape[:-1], -1)
        self.writer.add_tensor(name, raw, raw_dtype=kind)

    def experts(self, block: str, count: int, inner: int) -> None:
        self.floats(f"{block}.ffn_gate_inp.weight", count, DIM)
        self.quantised(f"{block}.ffn_gate_exps.weight", count, inner, DIM)
        self.quantised(f"{block}.ffn_up_exps.weight", count, inner, DIM)
        self.quantised(f"{block}.ffn_down_exps.weight", count, DIM, inner)

    def dense(self, block: str, inner: int, of: str = "") -> None:
        self.quantised(f"{block}.ffn_gate{of}.weight", inner, DIM)
        self.quantised(f"{block}.ffn_up{of}.weight", inner, DIM)
        self.quantised(f"{block}.ffn_down{of}.weight", DIM, inner)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def qwen3(path: str, layers: int, experts: int = 128, inner: int = 768) -> None:
    file, heads, kv_heads, head_dim = RandomFile(path, "qwen3moe", layers), 32, 4, 128
    writer = file.writer
    writer.add_feed_forward_length(6144)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(8)
    writer.add_expert_feed_forward_length(inner)
    for block in (f"blk.{layer}" for layer in range(layers)):
        file.ones(f"{block}.attn_norm.weight", DIM)
        file.ones(f"{block}.ffn_norm.weight", DIM)
        file.ones(f"{block}.attn_q_norm.weight", head_dim)
        file.ones(f"{block}.attn_k_norm.weight", head_dim)
        file.quantised(f"{block}.attn_q.weight", heads * head_dim, DIM)
        file.quantised(f"{block}.attn_k.weight", kv_heads * head_dim, DIM)
        file.quantised(f"{block}.attn_v.weight", kv_heads * head_dim, DIM)
        file.quantised(f"{block}.attn_output.weight", DIM, heads * head_dim)
        file.experts(block, experts, inner)
    file.close()


def narrow(path: str, layers: int) -> None:
    """As qwen3, some 30 MB a layer."""
    qwen3(path, layers, experts=32, inner=256)


def small(path: str, layers: int) -> None:
    """As qwen3, with next to no experts."""
    qwen3(path, layers, experts=8, inner=32)


def deepseek(path: str, layers: int) -> None:
    file, heads, rank, plain, rope, value = (
        RandomFile(path, "deepseek2", layers),
        16,
        512,
        128,
        64,
        128,
    )
    writer = file.writer
    writer.add_feed_forward_length(10944)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(plain + rope)
    writer.add_value_length_mla(value)
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rope)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCAB)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(64)
    writer.add_expert_used_count(6)
    writer.add_expert_shared_count(2)
    writer.add_expert_feed_forward_length(1408)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(False)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    for layer in range(layers):
        block = f"blk.{layer}"
        file.ones(f"{block}.attn_norm.weight", DIM)
        file.ones(f"{block}.ffn_norm.weight", DIM)
        file.ones(f"{block}.attn_kv_a_norm.weight", rank)
        file.quantised(f"{block}.attn_q.weight", heads * (plain + rope), DIM)
        file.quantised(f"{block}.attn_kv_a_mqa.weight", rank + rope, DIM)
        file.quantised(f"{block}.attn_k_b.weight", heads, rank, plain, kind=Q8)
        file.quantised(f"{block}.attn_v_b.weight", heads, value, rank, kind=Q8)
        file.quantised(f"{block}.attn_output.weight", DIM, heads * value)
        if layer:
            file.experts(block, 64, 1408)
            file.dense(block, 2 * 1408, of="_shexp")
        else:
            file.dense(block, 10944)
    file.close()


MODELS: dict[str, Callable[[str, int], None]] = {
    "qwen3-30b-a3b": qwen3,
    "deepseek-v2-lite": deepseek,
}

if __name__ == "__main__":
    name, path, *layers = sys.argv[1:]
    MODELS[name](path, int(layers[0]) if layers else 4)
