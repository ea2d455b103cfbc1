"""Llama against transformers, on tiny random checkpoints."""

from dataclasses import replace

import pytest
import torch

from banyan.layers.build import Build
from banyan.models.weights.loader import load_model
from tests.models.conftest import model_config_of

CPU = torch.device("cpu")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

VARIANTS = {
    "one query head per kv head": {"num_key_value_heads": 6},
    "three query heads per kv head": {"num_key_value_heads": 2},
    "eight query heads per kv head": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "all biases": {"attention_bias": True, "mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "gelu tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "linear rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    },
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn rope": {"rope_parameters": YARN},
    "yarn rope, attention factor": {"rope_parameters": {**YARN, "attention_factor": 0.8}},
    "yarn rope, mscale": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn rope, untruncated": {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 8.0}},
}
PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(60)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant, tiny_llama, ops, paged):
    reference, model_config = tiny_llama(**VARIANTS[variant])

    model = load_model(model_config, Build(ops))
    (logits,) = paged(model).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_dynamic_rope_equals_transformers_fed_token_by_token(tiny_llama, ops, paged):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    reference, model_config = tiny_llama(max_position_embeddings=16, rope_parameters=rope)

    model = load_model(model_config, Build(ops))
    (logits,) = paged(model).step([(0, PROMPT)])

    expected, cache = [], None
    with torch.no_grad():
        for token in PROMPT:
            out = reference(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            expected.append(out.logits[0, -1])
    torch.testing.assert_close(logits, torch.stack(expected), atol=1e-4, rtol=0)


def test_dynamic_rope_within_the_trained_length_equals_transformers(tiny_llama, ops, paged):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    reference, model_config = tiny_llama(max_position_embeddings=64, rope_parameters=rope)

    model = load_model(model_config, Build(ops))
    (logits,) = paged(model).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_a_token_is_the_same_alone_in_chunks_and_in_a_batch(rope_type, tiny_llama, ops, paged):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    _, model_config = tiny_llama(max_position_embeddings=16, rope_parameters=rope)
    model = load_model(model_config, Build(ops))
    (whole,) = paged(model).step([(0, PROMPT)])
    alone = whole.log_softmax(-1)

    chunked = paged(model)
    parts = [chunked.step([(0, PROMPT[at : at + 7])])[0] for at in range(0, 49, 7)]
    parts += [chunked.step([(0, [token])])[0] for token in PROMPT[49:]]
    torch.testing.assert_close(torch.cat(parts).log_softmax(-1), alone, atol=2e-6, rtol=0)

    crowd = paged(model, num_requests=32)
    for request in range(32):
        crowd.step([(request, PROMPT[: 1 + request])])
    batch = crowd.step([(r, PROMPT[1 + r : 2 + r + (r % 3) * (r % 2)]) for r in range(32)])
    for request, logits in enumerate(batch):
        mine = alone[1 + request : 1 + request + len(logits)]
        torch.testing.assert_close(logits.log_softmax(-1), mine, atol=2e-6, rtol=0)


def test_mistral_with_a_sliding_window_equals_transformers(tmp_path, ops, paged):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    config = MistralConfig(**sizes, **heads, sliding_window=9, max_position_embeddings=64)
    torch.manual_seed(3)
    reference = MistralForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    config.attention_bias = config.mlp_bias = False
    model_config = replace(
        model_config_of(config, tmp_path),
        architecture="MistralForCausalLM",
        layer_kinds=("window", "window"),
        window=9,
    )

    model = load_model(model_config, Build(ops))
    (logits,) = paged(model).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
