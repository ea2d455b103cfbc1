"""gpt-oss in the forms that it is published in: 4-bit stacks of experts, and GGUF."""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from banyan.base.errors import ModelError
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model, tensors_of
from banyan.ops.bind import bind
from banyan.parallel.groups import ALONE, Group
from tests.models.families import YARN, rewrite_config, tiny
from tests.support.logits import PROMPT, expected_logits, load

KIND = gguf.GGMLQuantizationType.MXFP4
CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 5,
    "rope_parameters": {**YARN, "original_max_position_embeddings": 32, "truncate": False},
}
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def in_mxfp4(weight: torch.Tensor) -> np.ndarray:
    """Blocks of 17 bytes, by the gguf package. weight: [experts, out, in]"""
    return gguf.quantize(weight.contiguous().numpy(), KIND)


def parts_of(raw: np.ndarray) -> dict[str, torch.Tensor]:
    """The same numbers as published: neighbours share a byte, exponents lie apart."""
    units = torch.from_numpy(raw).unflatten(-1, (-1, 17))
    codes = torch.cat([units[..., 1:] & 15, units[..., 1:] >> 4], dim=-1)
    pairs = codes.unflatten(-1, (16, 2))
    return {"blocks": pairs[..., 0] | pairs[..., 1] << 4, "scales": units[..., 0].clone()}


def quantised(folder):
    """A published form, and the transformers model of the weights that it means."""
    reference = tiny("gpt-oss", folder, **SIZES)
    path, state = folder / "model.safetensors", reference.state_dict()
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        parts = parts_of(in_mxfp4(tensors.pop(name).mT))
        meant = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.float32)
        state[name] = meant  # [experts, in, out]
        tensors |= {f"{name}_{last}": part.contiguous() for last, part in parts.items()}
    reference.load_state_dict(state)
    save_file(tensors, path)
    rewrite_config(folder, quantization_config=SETTINGS)
    return reference


@pytest.fixture
def exact():
    return bind("cpu", CPU, torch.float32, frozenset(), 16, forced={"linear": "reference"})


def test_logits_of_4_bit_experts_equal_those_of_the_weights_that_are_meant(ops, paged, tmp_path):
    reference = quantised(tmp_path)

    (logits,) = paged(load(tmp_path, ops)).step([(0, PROMPT)])

    torch.testing.assert_close(logits, expected_logits(reference), atol=1e-4, rtol=0)


def test_experts_keep_their_4_bits(tmp_path):
    quantised(tmp_path)

    weights = dict(tensors_of(read_model_config(str(tmp_path))))

    for part, shape in (("gate", (5, 96, 64)), ("up", (5, 96, 64)), ("down", (5, 64, 96))):
        weight = weights[f"model.layers.1.mlp.experts.{part}_proj.weight"]
        assert (weight.type, weight.shape) == ("MXFP4", shape)
    assert weights["model.layers.1.mlp.experts.up_proj.bias"].shape == (5, 96)


def test_ranks_hold_cuts_of_the_experts_and_one_of_them_the_outer_biases(exact, tmp_path):
    quantised(tmp_path)
    model_config = read_model_config(str(tmp_path))
    whole = load_model(model_config, Build(exact)).layers[1].mlp.experts.packed

    for size in (2, 3):
        cuts = [
            load_model(model_config, Build(exact, _sharing(rank, size)))
            .layers[1]
            .mlp.experts.packed
            for rank in range(size)
        ]

        for expert, down in enumerate(whole.down):
            assert torch.equal(torch.cat([cut.down[expert] for cut in cuts], dim=1), down)
            in_bias, out_bias = whole.biases[expert]
            gates = [cut.biases[expert][0].chunk(2)[0] for cut in cuts]
            assert torch.equal(torch.cat(gates), in_bias.chunk(2)[0])
            assert torch.equal(cuts[0].biases[expert][1], out_bias)
            assert not any(cut.biases[expert][1].any() for cut in cuts[1:])


def _sharing(rank: int, size: int):
    from dataclasses import replace

    return replace(ALONE, expert_ffn=Group(rank, size, object()))


def spoil(folder, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


STACK = "model.layers.1.mlp.experts.down_proj"
DAMAGE = {
    "a part that is missing": (
        lambda t: t.pop(f"{STACK}_scales"),
        r"layers\.1.*down_proj.*lacks its scales; it has blocks",
    ),
    "scales that are cut short": (
        lambda t: t.update({f"{STACK}_scales": t[f"{STACK}_scales"][:, :-1]}),
        r"down_proj.*blocks of shape \[5, 64, 3, 16\] need scales of shape \[5, 64, 3\], not "
        r"\[5, 63, 3\]",
    ),
    "blocks of another size": (
        lambda t: t.update({f"{STACK}_blocks": t[f"{STACK}_blocks"][..., :8]}),
        r"blocks has shape \[5, 64, 3, 8\]; \[any, any, any, 16\] is needed",
    ),
    "too few experts": (
        lambda t: t.update({n: t[n][:4] for n in list(t) if n.startswith(STACK + "_")}),
        r"lacks 2 weights.*down\.weight \(4\)",
    ),
    "biases in one row": (
        lambda t: t.update({f"{STACK}_bias": t[f"{STACK}_bias"].flatten()}),
        r"down_proj_bias' has shape \[320\], not \[experts, outputs\]",
    ),
    "no sinks": (
        lambda t: t.pop("model.layers.0.self_attn.sinks"),
        r"lacks 1 weights.*attention\.sinks",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_named(damage, ops, tmp_path):
    quantised(tmp_path)
    change, match = DAMAGE[damage]
    spoil(tmp_path, change)

    with pytest.raises(ModelError, match=match):
        load(tmp_path, ops)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"swiglu_limit": 0.0}, "swiglu_limit must be in"),
        ({"num_experts_per_tok": 6}, r"num_experts_per_tok must be in \[1, 5\]"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 2 of"),
        ({"num_local_experts": None}, "num_local_experts must be .*missing"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(changes, match, tmp_path):
    tiny("gpt-oss", tmp_path, **SIZES)
    rewrite_config(tmp_path, **changes)

    with pytest.raises(ModelError, match=match):
        read_model_config(str(tmp_path))


def convert(folder, config) -> str:
    """The folder's checkpoint as published converters write it; experts in MXFP4, which become
    those of the checkpoint too."""
    path = str(folder / "model.gguf")
    writer = gguf.GGUFWriter(path, "gpt-oss")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        stem, last = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        if ".experts." not in name:
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            suffix = ".weight" if name.endswith("sinks") else ""
            writer.add_tensor(stored + suffix, tensor.numpy())
            continue
        parts = {stem: tensor}
        if stem.endswith("gate_up_proj"):
            parts = {stem.replace("gate_up", kind): tensor[..., i::2] for i, kind in PARTS}
        for part, values in parts.items():
            stored = f"{names.get_name(part)}.{last}"
            if last == "bias":
                writer.add_tensor(stored, np.ascontiguousarray(values.numpy()))
                continue
            raw = in_mxfp4(values.mT)
            writer.add_tensor(stored, raw, raw_dtype=KIND)
            values.copy_(torch.from_numpy(gguf.dequantize(raw, KIND)).mT)
    save_file(tensors, folder / "model.safetensors")
    describe(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PARTS = ((0, "gate"), (1, "up"))


def describe(writer, config) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def test_gguf_equals_the_safetensors_form(exact, paged, tmp_path):
    config = tiny("gpt-oss", tmp_path, **SIZES, swiglu_limit=7.0).config
    path = convert(tmp_path, config)
    (expected,) = paged(load(tmp_path, exact)).step([(0, PROMPT)])

    model_config = read_model_config(path)
    (logits,) = paged(load_model(model_config, Build(exact))).step([(0, PROMPT)])

    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    hub = read_model_config(str(tmp_path))
    assert (
        model_config.experts,
        model_config.layer_kinds,
        model_config.window,
        model_config.rope,
    ) == (
        *(hub.experts, hub.layer_kinds, hub.window),
        hub.rope,
    )
