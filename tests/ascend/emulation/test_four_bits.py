"""Checkpoints of 4-bit weights and 8-bit activations on the emulated NPU, by its own products."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.ascend.ops import operators as operators_of
from banyan.ascend.ops.operators import ExpertOperators, FourBitOperators, Operators
from banyan.ascend.ops.products import (
    FourBitLinear,
    FourBitProduct,
    GroupedProduct,
    PackedFourBits,
    PlainLinear,
    linear_kernel,
    product_of,
)
from banyan.ascend.ops.toolkit import NpuToolkit
from banyan.ascend.selfcheck.cases import four_bit_rows as rows
from banyan.ascend.selfcheck.cases import four_bit_weight as weight
from banyan.ops.activation_quant import FOUR_BITS, FourBits
from banyan.ops.stored import StoredWeight
from tests.ascend.emulation.test_quantised import BARE, scores
from tests.models.families import tiny
from tests.models.quantised import FORMS
from tests.models.quantised_checkpoints import rewrite_weights

HALF = torch.bfloat16
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_a_checkpoint_stays_packed_and_is_multiplied_so(npu, tmp_path, monkeypatch) -> None:
    """Projections and experts, of two numbers in a byte."""
    quantised, meant = tmp_path / "quantised", tmp_path / "meant"
    for folder in (quantised, meant):
        tiny("qwen3 moe", folder, **SIZES, weights=0.1)
    weights = rewrite_weights(quantised, FORMS["modelslim, packed"])
    save_file(load_file(meant / "model.safetensors") | weights, meant / "model.safetensors")
    multiplied = {"matmul": set[tuple[int, ...]](), "grouped_matmul": set[tuple[int, ...]]()}

    def watch(name: str) -> None:
        inner = getattr(FourBitOperators, name)

        def multiplying(operators: FourBitOperators, x: torch.Tensor, columns, *given):
            assert x.dtype == torch.int8 and columns.dtype == torch.int32
            multiplied[name].add(tuple(columns.shape))
            return inner(operators, x, columns, *given)

        monkeypatch.setattr(FourBitOperators, name, multiplying)

    for name in multiplied:
        watch(name)
    monkeypatch.delattr(ExpertOperators, "grouped_matmul")
    exact = scores(meant, "cpu", dtype="float32", cpu_activations="fp32", **BARE)
    found = scores(quantised, "npu", **BARE)
    assert np.median(np.abs(found - exact)) < 0.05 * exact.std()
    assert multiplied["matmul"] == {(256, 64), (256, 32)}, "queries, keys and values; outputs"
    assert {shape[1:] for shape in multiplied["grouped_matmul"]} == {(256, 64), (256, 32)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_that_of_the_scheme(npu, on, dtype: torch.dtype) -> None:
    """A unit for each 256 inputs; rows are rounded token by token."""
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(3)).to(dtype)
    packed = linear_kernel.function(NpuToolkit(Operators(is_checked=True)))
    product = packed(weight(4), dtype, torch.device("npu"))
    assert isinstance(product, FourBitLinear)
    unit = x.float().abs().amax(-1, keepdim=True) / 127
    rounded = (x.float() / unit).round() * unit
    wanted = (rounded @ weight(4).dense.t()).to(dtype)
    assert torch.allclose(product(on(x)).cpu().float(), wanted.float(), rtol=2**-7, atol=2e-3)
    bias = torch.ones(48, dtype=dtype)
    assert torch.equal(product(on(x), on(bias)).cpu(), product(on(x)).cpu() + 1)


def test_the_form_is_eight_numbers_in_a_word() -> None:
    numbers = torch.tensor([[-8], [7], [-1], [0], [1], [2], [3], [-2]], dtype=torch.int8)
    numbers = numbers.repeat(1, 256)
    found = PackedFourBits.of(
        StoredWeight(FOUR_BITS, (8, 256), FourBits(numbers, torch.ones(8, 8)).raw)
    )
    assert found.columns.shape == (256, 1)
    assert found.columns[0, 0].item() & 0xFFFFFFFF == 0xE3210F78
    assert found.scale.tolist() == [[0x3F800000] * 8]
    assert found.lift.tolist() == [8.0 * 256 * int(line[0]) for line in numbers]


@pytest.mark.parametrize(
    ("shape", "scale", "why"),
    [
        ((16, 320), torch.ones(16, 10), "320 inputs are no multiple of 256"),
        ((12, 256), torch.ones(12, 8), "12 outputs none of 8"),
        ((16, 256), torch.arange(128.0).view(16, 8), "fewer than 256 inputs share a scale"),
    ],
)
def test_what_the_operators_do_not_take_is_unpacked(npu, monkeypatch, shape, scale, why) -> None:
    """And said, once."""
    said = list[str]()
    monkeypatch.setattr(operators_of.log, "warning", lambda text, *given: said.append(text % given))
    numbers = torch.ones(shape, dtype=torch.int8)
    stored = StoredWeight(FOUR_BITS, shape, FourBits(numbers, scale).raw)
    operators, device = Operators(is_checked=True), torch.device("npu")
    pack = linear_kernel.function(NpuToolkit(operators))
    assert isinstance(pack(stored, HALF, device), PlainLinear)
    product = product_of(operators, [stored, stored], HALF, device)
    assert isinstance(product, GroupedProduct) and not product.rounds
    assert len(said) == 1 and why in said[0] and "activations not rounded" in said[0]


def test_experts_take_rows_that_are_rounded_already(npu, on) -> None:
    """As an exchange of a fixed size brings them."""
    operators, (numbers, units) = Operators(is_checked=True), rows()
    product = product_of(operators, [weight(1), weight(2)], HALF, torch.device("npu"))
    assert isinstance(product, FourBitProduct) and product.rounds
    found = product(on(numbers), on(torch.tensor([5, 0])), on(units)).cpu()
    wanted = numbers.float() @ weight(1).dense.t() * units.unsqueeze(1)
    assert torch.allclose(found.float(), wanted, rtol=2**-7, atol=1e-2)
