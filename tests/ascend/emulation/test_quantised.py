"""Checkpoints of 8-bit weights and activations on the emulated NPU, by its 8-bit products."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.ascend.ops.contracts import ContractError
from banyan.ascend.ops.operators import ExpertOperators, Operators
from banyan.ascend.ops.products import RoundedLinear, linear_kernel
from banyan.ascend.ops.toolkit import NpuToolkit
from banyan.ops.activation_quant import Rounding
from banyan.ops.stored import StoredWeight
from tests.models.families import rewrite_config, tiny
from tests.models.quantised import FORMS, Form, description, modelslim
from tests.models.quantised_checkpoints import rewrite_weights
from tests.support.emulated import IS_WHOLE, start
from tests.system.checkpoint import LAYERS, write_tiny_model

BARE = {"skip_tokenizer_init": True}
UNIT, OFFSET = 0.0625, 3.0
HALF = torch.bfloat16


def static(weight):
    """Inputs of up to eight to either side."""
    parts, meant = modelslim(weight)
    folded = -OFFSET * parts["weight"].int().sum(1)
    return {
        **parts,
        "input_scale": torch.tensor([UNIT]),
        "input_offset": torch.tensor([OFFSET]),
        "quant_bias": folded.int(),
        "deq_scale": UNIT * parts["weight_scale"].flatten(),
    }, meant


MADE = {
    "modelslim, static": Form(static, None, "W8A8", description("W8A8")),
    "modelslim, dynamic": FORMS["modelslim, dynamic"],
    "w8a8_int8": next(form for name, form in FORMS.items() if name.startswith("w8a8_int8")),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("plain") / "model")


def scores(model: Path, device: str, **flags: object) -> np.ndarray:
    """Of two prompts' tokens, and of what follows them."""
    size = 97 if flags.get("skip_tokenizer_init") else 200
    ids = [[(7 * i * i + n) % size + 2 * (size > 97) for i in range(n)] for n in (60, 33)]
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    with start(model, device, **{"dtype": "bfloat16", "cuda_graph_bs": [1, 2]} | flags) as engine:
        asked = {"return_logprob": True, "logprob_start_len": 0}
        found = engine.generate(input_ids=ids, sampling_params=params, **asked)
    return np.array([p[0] for f in found for p in f["meta_info"]["input_token_logprobs"][1:]])


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("modelslim, static", {}),
        ("modelslim, dynamic", {"quantization": "w8a8_int8"}),
        ("w8a8_int8", {}),
    ],
)
def test_a_checkpoint_is_multiplied_in_8_bits(
    npu, plain: Path, tmp_path: Path, monkeypatch, name: str, flags: dict
) -> None:
    quantised, meant = tmp_path / "quantised", tmp_path / "meant"
    for copy in (quantised, meant):
        shutil.copytree(plain, copy)
    weights = rewrite_weights(quantised, MADE[name])
    if MADE[name].settings is not None:
        rewrite_config(quantised, quantization_config=MADE[name].settings)
    save_file(load_file(meant / "model.safetensors") | weights, meant / "model.safetensors")
    cast, multiplied = list[tuple[int, ...]](), set[tuple[int, ...]]()
    fractal, multiply = Operators.cast_fractal, Operators.quant_matmul

    def casting(operators: Operators, columns: torch.Tensor) -> torch.Tensor:
        cast.append(tuple(columns.shape))
        return fractal(operators, columns)

    def multiplying(operators: Operators, x: torch.Tensor, columns, *given, **named):
        multiplied.add(tuple(columns.shape))
        return multiply(operators, x, columns, *given, **named)

    monkeypatch.setattr(Operators, "cast_fractal", casting)
    monkeypatch.setattr(Operators, "quant_matmul", multiplying)
    exact = scores(meant, "cpu", dtype="float32", cpu_activations="fp32")
    found = scores(quantised, "npu", **flags)
    assert np.abs(found - exact).mean() < 0.05 * exact.std()
    assert len(cast) == 4 * LAYERS and multiplied == set(cast)


def test_experts_of_a_checkpoint_are_multiplied_in_8_bits(npu, tmp_path, monkeypatch) -> None:
    quantised, meant = tmp_path / "quantised", tmp_path / "meant"
    for folder in (quantised, meant):
        tiny("qwen3 moe", folder, hidden_size=64, moe_intermediate_size=32, head_dim=64)
    weights = rewrite_weights(quantised, FORMS["modelslim, dynamic"])
    save_file(load_file(meant / "model.safetensors") | weights, meant / "model.safetensors")
    multiplied, multiply = list[tuple[int, ...]](), ExpertOperators.grouped_quant_matmul

    def multiplying(operators: Operators, x: torch.Tensor, columns, *given):
        multiplied.append(tuple(columns.shape))
        return multiply(operators, x, columns, *given)

    monkeypatch.setattr(ExpertOperators, "grouped_quant_matmul", multiplying)
    monkeypatch.delattr(ExpertOperators, "grouped_matmul")
    exact = scores(meant, "cpu", dtype="float32", cpu_activations="fp32", **BARE)
    found = scores(quantised, "npu", **BARE)
    assert np.median(np.abs(found - exact)) < 0.05 * exact.std()
    assert {shape[1:] for shape in multiplied} == {(64, 64), (32, 64)}


@pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all")
def test_four_bits_are_the_weights_that_they_mean(npu, plain: Path, tmp_path: Path) -> None:
    quantised, meant = tmp_path / "quantised", tmp_path / "meant"
    for copy in (quantised, meant):
        shutil.copytree(plain, copy)
    weights = rewrite_weights(quantised, FORMS["modelslim, four bits"])
    save_file(load_file(meant / "model.safetensors") | weights, meant / "model.safetensors")
    exact = scores(meant, "cpu", dtype="float32", cpu_activations="fp32")
    found = scores(quantised, "npu", dtype="float16")
    assert np.abs(found - exact).max() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("units", [(), (0.125, 3.0)], ids=["dynamic", "static"])
def test_a_product_is_that_of_the_scheme(npu, on, dtype, units):
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(-127, 128, (48, 64), generator=generator, dtype=torch.int8)
    x = torch.randn(5, 64, generator=generator).to(dtype)
    scale = torch.rand(48, generator=generator) / 100
    factors = [torch.full((48,), unit) for unit in units]
    operators = Operators(is_checked=True)
    found = Rounding(numbers, scale, *factors)
    product = RoundedLinear(operators, found, dtype, torch.device("npu"))(on(x)).cpu()

    unit, offset = units or (x.float().abs().amax(-1, keepdim=True) / 127, 0.0)
    rounded = (x.float() / unit + offset).round().clamp(-128, 127) - offset
    wanted = (rounded.double() * unit) @ (numbers.double() * scale.unsqueeze(1)).t()
    assert torch.equal(product, wanted.to(dtype)) or torch.allclose(
        product.float(), wanted.float(), rtol=2**-7, atol=1e-3
    )


def test_parts_with_units_of_their_own_are_multiplied_as_floats(npu, on):
    numbers = torch.ones(4, 32, dtype=torch.int8)
    units = torch.tensor([0.1, 0.1, 0.2, 0.2])
    raw = Rounding(numbers, torch.ones(4), units, torch.zeros(4)).raw
    pack = linear_kernel.function(NpuToolkit(Operators(is_checked=True)))
    product = pack(StoredWeight("W8A8", (4, 32), raw), HALF, torch.device("npu"))
    x = torch.full((2, 32), 1.03125, dtype=HALF)
    assert product(on(x)).cpu().tolist() == [[33.0] * 4] * 2


def test_a_form_that_was_not_allowed_is_refused(npu, on):
    cast = torch.ops.npu.npu_format_cast
    monkey = torch.get_device_module("npu").config
    before, monkey.allow_internal_format = monkey.allow_internal_format, False
    with pytest.raises(ContractError, match="allow_internal_format must be set"):
        cast(on(torch.ones(64, 32, dtype=torch.int8)), 29)
    monkey.allow_internal_format = before
