"""Floats of 8 bits with scales, of every form that has them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ModelError
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import tensors_of
from banyan.models.weights.quant import open_method
from banyan.models.weights.quant.fp8 import STATIC_REMARK, Fp8, plain
from banyan.ops.activation_quant import STATIC
from banyan.ops.bind import bind, open_toolkit
from banyan.ops.stored import E4M3_DYNAMIC, RawTensor, StoredWeight
from tests.models.families import rewrite_config, tiny
from tests.models.quantised import FORMS, Form, by_block
from tests.models.quantised_checkpoints import quantised, restore
from tests.support.logits import PROMPT, load

CPU = torch.device("cpu")


@pytest.mark.parametrize("block", [None, (128, 128), (3, 50), (1, 100)])
def test_a_tall_weight_in_fp8_is_what_its_scales_say(block):
    """Its rows are brought to floats a few at a time."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn((611, 200), generator=generator).to(torch.float8_e4m3fn)
    height, width = block or (1, 200)
    shape = (-(-611 // height), -(-200 // width))
    scale = torch.rand(shape, generator=generator) + 0.1
    spread = scale.repeat_interleave(height, 0)[:611].repeat_interleave(width, 1)[:, :200]
    parts = {
        "weight": RawTensor("F8_E4M3", (611, 200), numbers.view(torch.uint8).flatten()),
        "weight_scale_inv": StoredWeight.from_tensor(scale),
    }
    found = Fp8(block).restore("x", parts).weight
    assert found.type == "BF16" and torch.equal(found.dense, (numbers.float() * spread).bfloat16())


def test_numbers_in_fp8_stay_where_a_block_holds_them():
    """Blocks of 128 x 128 in 8 bits, other widths in bf16; nothing else of the model differs."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn((300, 256), generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand((3, 2), generator=generator) + 0.1
    parts = {
        "weight": RawTensor("F8_E4M3", (300, 256), numbers.view(torch.uint8).flatten()),
        "weight_scale_inv": StoredWeight.from_tensor(scale),
    }
    spread = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)
    kept = Fp8((128, 128)).restore("x", parts).weight
    assert kept.type == "E4M3" and torch.equal(kept.dense, numbers.float() * spread)
    by_tensor = parts | {"weight_scale_inv": StoredWeight.from_tensor(scale[:1, :1])}
    of_tensor = Fp8(None).restore("x", by_tensor).weight
    assert torch.equal(of_tensor.dense, numbers.float() * scale[0, 0])
    assert torch.equal(plain(kept).dense, kept.dense.bfloat16()) and plain(kept).type == "BF16"
    odd = parts | {"weight_scale_inv": StoredWeight.from_tensor(torch.ones(3, 3))}
    wide = Fp8((128, 100)).restore("x", odd)
    assert wide.weight.type == "BF16" and wide.unpacked.startswith("scales of 100 inputs are not")
    bad = numbers.view(torch.uint8).clone()
    bad[7, 7] = 0xFF  # no number
    holed = parts | {"weight": RawTensor("F8_E4M3", (300, 256), bad.flatten())}
    found = Fp8((128, 128)).restore("x", holed).weight
    assert found.type == "BF16" and bool(found.dense[7, 7].isnan())


@pytest.mark.parametrize(
    "name",
    [
        *("fp8 by output", "fp8 by tensor", "fp8 in blocks of 32", "modelopt mxfp8"),
        *("compressed-tensors fp8", "compressed-tensors fp8, groups", "modelopt fp8 in blocks"),
        *("modelopt fp8", "quark fp8 by output", "quark fp8 by group"),
    ],
)
def test_a_model_in_fp8_keeps_8_bits_and_gives_the_logits_of_these_weights(
    name, compiled, paged, tmp_path, monkeypatch
):
    """Also cut for two and three ranks; a row is the same alone and in a batch, bit for bit."""
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    monkeypatch.setitem(FORMS, "fp8 in blocks of 32", Form(by_block(32), settings, "E4M3"))
    reference, meant = quantised(name, tmp_path)
    stored = restore(tmp_path)
    assert {stored[weight].type for weight in meant} == {"E4M3"}

    exact = bind(
        "cpu", CPU, torch.float32, frozenset(), 16, exact=True, toolkit=open_toolkit("cpu", 1, {})
    )
    (logits,) = paged(load(tmp_path, exact)).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    down = "model.layers.1.mlp.down_proj.weight"
    whole, values = stored[down], meant[down]
    inputs = values.shape[1]
    x = torch.randn(5, inputs, generator=torch.Generator().manual_seed(1))
    run = compiled.pack_linear(whole)
    together = run(x).clone()
    for row in range(5):
        assert torch.equal(run(x[row : row + 1])[0], together[row])
    for ranks in (2, 3):
        wide = inputs // ranks
        total = torch.zeros_like(together)
        for first in range(0, inputs, wide):
            mine = whole.cut(1, first, first + wide)
            assert mine.type == "E4M3"
            total += compiled.pack_linear(mine)(x[:, first : first + wide].contiguous())
        torch.testing.assert_close(total, x @ values.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "type", "remark"),
    [
        ("fp8 by output", E4M3_DYNAMIC, ""),
        ("fp8 by tensor", E4M3_DYNAMIC, STATIC_REMARK),
        ("fp8 by powers of two", "E4M3", ""),
        ("compressed-tensors fp8", E4M3_DYNAMIC, ""),
        ("compressed-tensors fp8, groups", E4M3_DYNAMIC, ""),
        ("modelopt fp8", E4M3_DYNAMIC, STATIC_REMARK),
        ("modelopt fp8 in blocks", "E4M3", STATIC_REMARK),
        ("quark fp8 by output", "E4M3", ""),
    ],
)
def test_activations_are_rounded_where_the_device_can_and_the_checkpoint_asks_for_it(
    name, type, remark, tmp_path
):
    _, meant = quantised(name, tmp_path)
    model_config = read_model_config(str(tmp_path))
    assert model_config.quant is not None
    method = open_method(model_config.quant, "here", [E4M3_DYNAMIC])
    assert method.remark == remark
    kept = restore(tmp_path, [E4M3_DYNAMIC])
    assert {kept[weight].type for weight in meant} == {type}
    weight = kept[next(iter(meant))]
    assert torch.equal(plain(weight).dense, weight.dense.bfloat16())
    others = restore(tmp_path, [STATIC])
    assert {others[weight].type for weight in meant} == {"E4M3"}


def test_stacks_of_experts_in_fp8_keep_8_bits(compiled, paged, tmp_path):
    """A tensor holds all of a layer, and so does another one of their scales; other devices get
    the same numbers in bf16."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "share_expert_dim": 32}
    for folder in ("numbers", "meant"):
        tiny("step 3.7", tmp_path / folder, **sizes)
    tensors = load_file(tmp_path / "numbers" / "model.safetensors")
    meant = dict(tensors)
    stacks = [name for name in tensors if ".moe." in name and name.endswith("_proj.weight")]
    assert len(stacks) == 9
    for name in stacks:
        each = [by_block(32)(expert) for expert in tensors[name]]
        tensors[name] = torch.stack([parts["weight"] for parts, _ in each])
        scale = name.replace(".weight", ".weight_scale_inv")
        tensors[scale] = torch.stack([parts["weight_scale_inv"] for parts, _ in each])
        meant[name] = torch.stack([values for _, values in each])
    save_file(tensors, tmp_path / "numbers" / "model.safetensors")
    save_file(meant, tmp_path / "meant" / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    rewrite_config(tmp_path / "numbers", quantization_config=settings)
    model_config = read_model_config(str(tmp_path / "numbers"))

    kept = dict(tensors_of(model_config, ops=compiled))

    for name in stacks:
        assert kept[name].type == "E4M3" and torch.equal(kept[name].dense, meant[name])
    elsewhere = dict(tensors_of(model_config))
    assert torch.equal(elsewhere[stacks[0]].dense, meant[stacks[0]].bfloat16())
    (logits,) = paged(load(tmp_path / "numbers", compiled)).step([(0, PROMPT)])
    (expected,) = paged(load(tmp_path / "meant", compiled)).step([(0, PROMPT)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    tensors[scale] = tensors[scale][:-1].contiguous()
    save_file(tensors, tmp_path / "numbers" / "model.safetensors")
    with pytest.raises(ModelError, match=r"scales of shape \[4, .* for 5 experts"):
        load(tmp_path / "numbers", compiled)
