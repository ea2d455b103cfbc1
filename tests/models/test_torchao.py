"""--torchao-config: weights are those that torchao's own arithmetic gives, and are served so."""

import importlib

import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.flags.model import TORCHAO_NAMES
from banyan.config.prepare import prepare
from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model, tensors_of
from banyan.models.weights.torchao import torchao_transform
from banyan.ops.bind import bind
from banyan.parallel.groups import Group, Groups
from tests.models.families import tiny
from tests.models.test_gguf_families import convert
from tests.support.logits import PROMPT

SIZES = {
    **{"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 320},
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
}
BECOMES = {"int8": "Q8_0", "int4": "Q4_1", "fp8w": "E4M3", "fp8d": "E4M3"}


def rounded(folder, name):
    model_config = read_model_config(str(folder))
    return dict(torchao_transform(name, model_config)(tensors_of(model_config)))


def by_torchao(weight: torch.Tensor, name: str) -> torch.Tensor:
    """With torchao's primitives, as its configurations of this name call them."""
    primitives = importlib.import_module("torchao.quantization.quant_primitives")
    asked = {"int8": (torch.int8, None, None), "int4": (torch.int32, 0, 15)}
    kind, _, group = name.partition("-")
    if kind.startswith("fp8"):
        shape = list(weight.shape) if group == "per_tensor" else [1, weight.shape[1]]
        scale = primitives._choose_scale_float8(weight, shape)
        numbers = primitives._quantize_affine_float8(weight, scale)
        return primitives._dequantize_affine_float8(numbers, scale, torch.float32)
    target, low, high = asked[kind[:4]]
    block = (1, int(group) if group else weight.shape[1])
    if kind == "int4wo":
        scale, zero = primitives._choose_qparams_affine_tinygemm(
            weight, primitives.MappingType.ASYMMETRIC, block, target, low, high, 1e-6
        )
        numbers = primitives._quantize_affine_tinygemm(
            weight, block, scale, zero, target, low, high
        )
        return primitives._dequantize_affine_tinygemm(
            numbers, block, scale, zero, target, low, high
        )
    symmetric = primitives.MappingType.SYMMETRIC
    scale, zero = primitives.choose_qparams_affine(weight, symmetric, block, target)
    numbers = primitives.quantize_affine(weight, block, scale, zero, target)
    return primitives.dequantize_affine(numbers, block, scale, zero, target)


def by_definition(weight: torch.Tensor, name: str) -> torch.Tensor:
    """The same in the words of torchao's documentation."""
    kind, _, group = name.partition("-")
    if kind == "int4wo":
        pieces = weight.view(len(weight), -1, int(group))
        low, high = pieces.amin(2, keepdim=True), pieces.amax(2, keepdim=True)
        scale = (high - low) / 15
        return (((pieces - low) / scale).round().clamp(0, 15) * scale + low).view(weight.shape)
    is_whole = group == "per_tensor"
    largest = weight.abs().max() if is_whole else weight.abs().amax(1, keepdim=True)
    if kind.startswith("fp8"):
        scale = largest / 448
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale
    scale = largest / 127.5
    return (weight / scale).round().clamp(-128, 127) * scale


@pytest.mark.parametrize("meaning", [by_definition, by_torchao])
def test_weights_are_those_of_torchao(meaning, tmp_path):
    """But for scales, which fp16 holds to 11 bits: that may take a number one level on."""
    if meaning is by_torchao:
        pytest.importorskip("torchao")
    state = tiny("qwen2", tmp_path, **SIZES).state_dict()
    for name in TORCHAO_NAMES:
        weights = rounded(tmp_path, name)
        for label in [label for label in state if label.endswith("_proj.weight")]:
            check(name, label, state[label], weights[label], meaning)
        assert weights["lm_head.weight"].type == weights["model.embed_tokens.weight"].type == "F32"


def check(name, label, weight, found, meaning) -> None:
    group = int(name.partition("-")[2]) if name.startswith("int4") else 1
    if weight.shape[1] % group:
        assert found.type == "F32" and ".down_proj." in label
        return
    assert found.type == BECOMES[name[:4]]
    step = 2 * weight.abs().max() / (15 if name.startswith("int4") else 127)
    apart = (found.dense.float() - meaning(weight, name)).abs()
    assert (apart > weight.abs().max() * 2**-8).float().mean() < 0.01
    assert apart.max() <= step * 1.1


@pytest.mark.parametrize("name", ["int8wo", "int4wo-64", "fp8wo"])
def test_what_is_served_is_the_rounded_weights(name, ops, paged, tmp_path):
    reference = tiny("qwen2", tmp_path, **SIZES)
    model_config, weights = read_model_config(str(tmp_path)), rounded(tmp_path, name)
    state = {k: weights[k].dense.float() for k in reference.state_dict() if k in weights}
    reference.load_state_dict(reference.state_dict() | state)

    model = load_model(model_config, Build(ops), transforms=[torchao_transform(name, model_config)])

    (logits,) = paged(model).step([(0, PROMPT)])
    expected = reference(torch.tensor([PROMPT])).logits[0].detach()
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def test_ranks_round_the_whole_weight_and_hold_cuts_of_it(tmp_path):
    tiny("qwen2", tmp_path, **SIZES)
    model_config = read_model_config(str(tmp_path))
    transforms = [torchao_transform("int4wo-64", model_config)]
    forced = {"linear": "reference"}
    ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 32, forced=forced)
    whole = load_model(model_config, Build(ops), transforms=transforms).layers[1].attention.out
    groups = [Groups.of(Group(rank, 2, object())) for rank in range(2)]
    cuts = [
        load_model(model_config, Build(ops, g), transforms=transforms).layers[1] for g in groups
    ]
    held = torch.cat([layer.attention.out.weight.weight for layer in cuts], dim=1)
    assert torch.equal(held, whole.weight.weight)


@pytest.mark.parametrize("variant", ["qwen3 moe", "deepseek v2"])
def test_experts_and_latent_attention_are_rounded_and_routers_are_not(variant, tmp_path):
    tiny(variant, tmp_path, hidden_size=96, moe_intermediate_size=32)
    before = rounded(tmp_path, "int4wo-256")
    after = rounded(tmp_path, "int8wo")
    changed = {name for name in after if after[name].type != before[name].type}
    assert any(".experts.1.up_proj" in name for name in changed)
    assert not any(".mlp.gate." in name or "norm" in name or "embed" in name for name in changed)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--torchao-config", "int4wo-100"], "int8wo.*int8dq.*int4wo-256"),
        (
            ["--torchao-config", "int8wo", "--quantization", "q4_0"],
            "cannot be combined with --quantization q4_0",
        ),
        (
            ["--torchao-config", "int8wo", "--load-format", "dummy"],
            "cannot be combined with --load-format dummy",
        ),
        (
            ["--torchao-config", "int8wo", "--model-impl", "transformers"],
            "cannot be combined with --model-impl transformers",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(words, match, tmp_path):
    tiny("qwen2", tmp_path)
    with pytest.raises(ConfigError, match=match):
        prepare(parse(["--model-path", str(tmp_path), *words], Environment()), Environment())


def test_weights_that_are_rounded_already_are_refused(tmp_path):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    convert(tiny("qwen2", tmp_path, **sizes), "qwen2", tmp_path / "m.gguf")
    words = ["--model-path", str(tmp_path / "m.gguf"), "--torchao-config", "int8wo"]
    with pytest.raises(ConfigError, match="q8_0 already; only float weights"):
        prepare(parse([*words, "--skip-tokenizer-init"], Environment()), Environment())
