"""Every family from GGUF: names by the gguf package's own map, keys by its writer."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from tests.models.families import LONGROPE, tiny
from tests.support.gguf import interleave
from tests.support.logits import PROMPT, expected_logits

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
HEADS = {"num_key_value_heads": 4}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
CASES = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {}),
    "phi3, window": ("phi3", {}),
    "phi3, longrope on part of a head": (
        "phi3",
        {"rope_parameters": {**LONGROPE, **FACTORS, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "granite, all factors": ("granite", {}),
    "glm4": ("glm4", {}),
    "starcoder2": ("starcoder2", {}),
    "cohere2": ("cohere2", {}),
    "ernie 4.5": ("ernie4_5", {}),
    "hunyuan": ("hunyuan-dense", {}),
    "gemma": ("gemma", {}),
    "olmo": ("olmo", {}),
    "seed oss": ("seed_oss", {}),
    "smollm3, by period": ("smollm3", {}),
    "arcee, bias": ("arcee", {}),
    "exaone4": ("exaone4", {"sliding_window_pattern": 4}),
    "cohere": ("command-r", {}),
    "stablelm": ("stablelm", {**HEADS}),
    "phi": ("phi2", {**HEADS}),
    "nemotron": ("nemotron", {}),
    "gpt2": ("gpt2", {**HEADS, "hidden_size": 64}),
    "gpt bigcode": ("starcoder", {**HEADS}),
    "bloom": ("bloom", {**HEADS}),
}
"""Variant of `families.py` -> GGUF architecture and changes to the sizes."""
PAIRED = ("granite", "olmo", "smollm3", "arcee")
"""Converters write q and k of these in interleaved pairs."""
LAYER_NORMS = ("starcoder2", "cohere2", "command-r", "olmo", "stablelm", "phi2", "nemotron")


def convert(model, architecture, path) -> None:
    """Write a transformers model as GGUF in Q8_0; the model takes the rounded weights itself."""
    writer = gguf.GGUFWriter(path, architecture)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        is_turned = architecture == "gpt2" and ".c_" in name and parameter.dim() == 2
        values = parameter.detach().numpy()
        values = np.ascontiguousarray(values.T) if is_turned else values
        if values.ndim > 1 and ".wpe." not in name:
            raw = gguf.quantize(values, kind)
            rounded = gguf.dequantize(raw, kind)
            parameter.data.copy_(torch.from_numpy(rounded.T if is_turned else rounded))
            values = rounded if is_turned else values
        if architecture == "bloom" and ".query_key_value." in name:
            values = by_part(values, 4)
        if architecture in PAIRED and (".q_proj." in name or ".k_proj." in name):
            values = interleave(values, model.config.hidden_size // 4)
        if architecture.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
            values = values + 1
        name = name.removeprefix("transformer.") if architecture == "bloom" else name
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim > 1 and ".wpe." not in name:
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    describe(model.config, architecture, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_part(values, heads):
    """BLOOM's rows, q, k and v of each head, as converters order them."""
    parts = values.reshape(heads, 3, -1, *values.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(0, 1).reshape(values.shape))


def describe(config, architecture, writer) -> None:
    """The keys that published converters write for these families."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // 4
    if architecture in ("gpt2", "starcoder", "bloom"):
        describe_plain(config, architecture, writer)
        return
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture in LAYER_NORMS:
        keys = ("norm_epsilon", "layer_norm_eps", "norm_eps")
        writer.add_layer_norm_eps(
            next((getattr(config, k) for k in keys if hasattr(config, k)), 1e-5)
        )
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    share = rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * share))
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(1.0)
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture in ("cohere2", "command-r"):
        writer.add_logit_scale(config.logit_scale)
    if architecture == "granite":
        writer.add_logit_scale(config.logits_scaling)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)


def describe_plain(config, architecture, writer) -> None:
    """Of families without RoPE."""
    writer.add_context_length(getattr(config, "n_positions", 128))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if architecture == "starcoder" else config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case, ops, paged, tmp_path):
    architecture, changes = CASES[case]
    reference = tiny(case, tmp_path / "hub", **{**SIZES, **changes})
    path = tmp_path / "model.gguf"
    convert(reference, architecture, path)

    model_config = read_model_config(str(path))
    model = load_model(model_config, Build(ops))
    (logits,) = paged(model).step([(0, PROMPT)])

    expected = expected_logits(reference)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    hub = read_model_config(str(tmp_path / "hub"))
    assert model_config.architecture == hub.architecture
    assert (model_config.layer_kinds, model_config.window) == (hub.layer_kinds, hub.window)


def test_a_window_pattern_of_the_file_counts(ops, tmp_path):
    reference = tiny("gemma3", tmp_path / "hub")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.add_array("gemma3.attention.sliding_window_pattern", [True, False] * 3 + [True])
    writer.add_tensor("token_embd.weight", np.zeros((8, 48), np.float32))
    describe(reference.config, "gemma3", writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    kinds = read_model_config(str(tmp_path / "model.gguf")).layer_kinds

    assert kinds == ("window", "full") * 3 + ("window",)


def random_blocks(name, shape, seed):
    """Random bytes of a K type with small scales, and the values they stand for."""
    kind = gguf.GGMLQuantizationType[name]
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[name]
    values, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    for place in places:
        raw[..., place : place + 2] = np.float16([2e-4]).view(np.uint8)
    raw = raw.reshape(shape[0], -1)
    return raw, gguf.dequantize(raw, kind)


def test_a_mix_of_k_types_within_one_projection(tiny_llama, ops, paged, tmp_path):
    """v and the feed-forward's way back are finer than the rest, as in published Q4_K_M files."""
    from tests.support.gguf import gguf_name

    reference, model_config = tiny_llama(
        hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2
    )
    path, writer = tmp_path / "model.gguf", gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for seed, (name, parameter) in enumerate(reference.named_parameters()):
        if parameter.dim() == 1:
            writer.add_tensor(gguf_name(name), parameter.detach().numpy())
            continue
        fine = ".v_proj." in name or ".down_proj." in name
        type_name = "Q6_K" if fine else "Q5_K" if "embed" in name else "Q4_K"
        raw, values = random_blocks(type_name, tuple(parameter.shape), seed)
        parameter.data.copy_(torch.from_numpy(values))
        if ".q_proj." in name or ".k_proj." in name:
            raw = interleave(raw, 32)
        kind = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    model_config = replace(model_config, path=str(path), format="gguf")
    model = load_model(model_config, Build(ops))
    (logits,) = paged(model).step([(0, PROMPT)])

    torch.testing.assert_close(logits, expected_logits(reference), atol=1e-4, rtol=0)
