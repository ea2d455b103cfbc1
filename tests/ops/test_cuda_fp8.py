"""Products with 8-bit float weights against float64: `triton_device.py` says where they run."""

import math

import pytest
import torch

from banyan.models.weights.quant.fp8 import Fp8
from banyan.ops.cuda import fp8, products
from banyan.ops.cuda.needs import FP8_BACKENDS, CudaToolkit
from banyan.ops.cuda.products import Shape
from banyan.ops.stored import E4M3, E4M3_DYNAMIC, StoredWeight
from tests.ops import triton_device
from tests.ops.triton_device import ABSENCE, IS_INTERPRETED, exact_float8

if ABSENCE:
    pytest.skip(ABSENCE, allow_module_level=True)
DEVICE = torch.device(triton_device.DEVICE)
TYPES = [torch.float32, torch.float16] if IS_INTERPRETED else [torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TENSOR, CHANNEL, BLOCKS, GROUPS = "tensor", "channel", "blocks", "groups of 32"
HALF_STEP = 2.0**-4
"""Most that rounding to e4m3 changes a normal number, relatively."""

__all__ = ["exact_float8"]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(form: str, outputs: int, inputs: int, type: str = E4M3_DYNAMIC) -> StoredWeight:
    """A random weight with scales between 1/64 and 4, as a checkpoint is read."""
    bits = torch.randint(0, 256, (outputs, inputs), generator=torch.Generator().manual_seed(1))
    bits[bits & 0x7F == 0x7F] = 0
    numbers = bits.byte().view(torch.float8_e4m3fn)
    shape = {
        TENSOR: (1,),
        CHANNEL: (outputs, 1),
        BLOCKS: (-(-outputs // 128), -(-inputs // 128)),
        GROUPS: (outputs, inputs // 32),
    }[form]
    scale = torch.exp2(4 * torch.rand(shape, generator=torch.Generator().manual_seed(2)) - 8)
    block = (128, 128) if form == BLOCKS else None
    found = Fp8(block).of_numbers(numbers, scale / inputs**0.5).weight
    assert found.type == E4M3
    return StoredWeight(type, found.shape, found.raw)


def opened(weight: StoredWeight, dtype: torch.dtype, rounds: bool) -> fp8.FloatLinear:
    kernel = fp8.rounding_linear if rounds else fp8.linear
    linear = kernel.function(CudaToolkit())(weight, dtype, DEVICE)
    assert isinstance(linear, fp8.FloatLinear)
    return linear


def close(got: torch.Tensor, want: torch.Tensor, most: float) -> None:
    size = want.abs().max().item()
    torch.testing.assert_close(got.double().cpu() / size, want / size, atol=most, rtol=most)


SIZES = [(48, 96), (200, 256), (256, 384), (130, 320), (16, 32)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", [TENSOR, CHANNEL, BLOCKS, GROUPS])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_exact_products_are_those_of_the_plain_weight(outputs, inputs, form, dtype):
    weight = stored(form, outputs, inputs)
    linear = opened(weight, dtype, rounds=False)
    for rows in (1, 5, 33, 70):
        wide = random(rows, 2 * inputs, seed=rows).to(DEVICE, dtype)
        bias = random(outputs, seed=2).to(DEVICE, dtype)
        for x, more in ((wide[:, :inputs], None), (wide[:, inputs:], bias)):
            want = x.double().cpu() @ weight.dense.double().T
            want = want if more is None else want + more.double().cpu()
            close(linear(x, more), want, TOLERANCE[dtype])


@pytest.mark.parametrize("form", [CHANNEL, BLOCKS, GROUPS])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_rounded_activations_give_the_product_of_what_they_became(
    outputs, inputs, form, exact_float8
):
    weight, dtype = stored(form, outputs, inputs), TYPES[-1]
    linear = opened(weight, dtype, rounds=True)
    for rows in (1, 16, 17, 70):
        x = random(rows, inputs, seed=rows).to(DEVICE, dtype)
        group = min(linear.weight.group, 128) if linear.weight.is_grouped else 0
        if rows <= fp8.FEW_ROWS and not group:
            group = math.gcd(inputs, 128) if inputs % 128 == 0 else 0
        numbers, scales = fp8.round_rows(x, group)
        scale = scales.t().repeat_interleave(group, 1) if group else scales[:, None]
        became = numbers.double() * scale.double()
        want = became.cpu() @ weight.dense.double().T
        bias = random(outputs, seed=2).to(DEVICE, dtype)
        most = TOLERANCE[dtype]
        if rows <= fp8.FEW_ROWS and inputs % 128 and not linear.weight.is_grouped:
            most = HALF_STEP  # the last step has fewer inputs, and a scale of its own
        close(linear(x), want, most)
        close(linear(x, bias), want + bias.double().cpu(), most)


@pytest.mark.parametrize("group", [0, 32, 128])
def test_rows_are_rounded_to_the_nearest_number(group, exact_float8):
    x = random(7, 640).to(DEVICE, torch.float16) * torch.logspace(-4, 4, 7, device=DEVICE)[:, None]
    x[2] = 0
    wide = torch.cat([x, x], 1)[:, 320:960]  # rows lie apart
    numbers, scales = fp8.round_rows(wide, group)
    each = wide.float().reshape(7, -1, group or 640)
    largest = each.abs().amax(2)
    want = torch.where(largest > 0, largest / 448, 1e-30 / 448)
    got = scales.t() if group else scales[:, None]
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert not numbers[2].float().any()
    became = numbers.float().reshape(each.shape) * got[..., None]
    nearest = (each / got[..., None]).to(torch.float8_e4m3fn).float() * got[..., None]
    off, least = (became - each).abs(), (nearest - each).abs()
    assert (off <= least * 1.0001 + each.abs() * 1e-6).all()


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("form", [CHANNEL, BLOCKS])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_own_row_only(wrong, form, rows, exact_float8):
    linear = opened(stored(form, 130, 256), TYPES[-1], rounds=True)
    x = random(rows, 256).to(DEVICE, TYPES[-1])
    x[1, 77] = wrong
    got = linear(x)
    assert not torch.isfinite(got[1]).any()
    assert torch.isfinite(got[torch.arange(rows, device=DEVICE) != 1]).all()


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_spoils_its_own_outputs_only(factor, exact_float8):
    weight = stored(BLOCKS, 256, 256)
    raw = weight.raw.clone().view(256, 8, 36)
    raw[:128, :4, 32:] = torch.tensor([factor]).view(torch.uint8)
    broken = StoredWeight(weight.type, weight.shape, raw.flatten(1))
    for rounds in (True, False):
        linear = opened(broken, TYPES[-1], rounds)
        assert linear.weight.shared == 128
        got = linear(random(3, 256).to(DEVICE, TYPES[-1]))
        assert not torch.isfinite(got[:, :128]).any()
        assert torch.isfinite(got[:, 128:]).all()


@pytest.mark.parametrize("form", [CHANNEL, BLOCKS])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_every_cut_gives_the_same_product(form, parts, exact_float8):
    weight = stored(form, 256, 640)
    packed = fp8.pack(weight, DEVICE)
    x, bias = random(19, 640).to(DEVICE, TYPES[-1]), random(256, seed=2).to(DEVICE, TYPES[-1])
    want = x.double().cpu() @ weight.dense.double().T + bias.double().cpu()
    for rounds in (False, True):
        for rows, outputs in ((16, 128), (32, 64), (64, 128)):
            shape = Shape(rows, outputs, parts, is_turned=True)
            most = HALF_STEP if rounds else TOLERANCE[x.dtype]
            counters = products.counters_for(256, DEVICE)
            for more in ({}, {"counters": counters}, {"counters": counters}):
                got = fp8.product(x, packed, bias, shape, x.dtype, rounds, **more)
                close(got, want, most)
            assert not counters.any()


def test_a_token_has_the_same_bits_again_and_in_a_batch(exact_float8):
    linear = opened(stored(BLOCKS, 130, 1024), TYPES[-1], rounds=True)
    assert fp8.shape_of(16, linear.weight).parts > 2
    x = random(16, 1024).to(DEVICE, TYPES[-1])
    together = linear(x)
    assert torch.equal(together, linear(x))
    for i in (0, 7, 15):
        assert torch.equal(linear(x[i : i + 1])[0], together[i])


@pytest.mark.parametrize("form", [TENSOR, CHANNEL, BLOCKS, GROUPS])
def test_a_weight_keeps_its_bits_and_no_more_scales_than_in_the_file(form):
    weight = stored(form, 256, 512)
    packed = fp8.pack(weight, DEVICE)
    assert torch.equal(fp8.unpacked(packed, torch.float32).cpu(), weight.dense)
    scales = {TENSOR: 256, CHANNEL: 256, BLOCKS: 8, GROUPS: 256 * 16}[form]
    assert packed.size_bytes == 256 * 512 + 4 * scales


def test_many_rows_are_multiplied_with_the_unpacked_weight(monkeypatch):
    monkeypatch.setattr(products, "UNPACK_ABOVE", 19)
    weight = stored(BLOCKS, 130, 256)
    linear = opened(weight, torch.float32, rounds=False)
    for rows in (19, 20):
        x, bias = random(rows, 256).to(DEVICE), random(130).to(DEVICE)
        want = x.double().cpu() @ weight.dense.double().T + bias.double().cpu()
        close(linear(x, bias), want, TOLERANCE[torch.float32])


@pytest.mark.parametrize("is_head", [False, True])
def test_float_weights_are_rounded_at_load(is_head, monkeypatch, exact_float8):
    monkeypatch.setattr(fp8, "_MOST_BYTES", 40_000)
    values = random(70, 96) * torch.logspace(-3, 3, 70)[:, None]
    values[3] = 0
    pack = fp8.rounding_linear.function(CudaToolkit(quantization="fp8"))
    linear = pack(StoredWeight.from_tensor(values), TYPES[-1], DEVICE, is_head=is_head)
    became = fp8.unpacked(linear.weight, torch.float32).cpu()
    assert not became[3].any()
    assert (
        (became - values).abs()
        <= HALF_STEP * values.abs() + 1e-4 * values.abs().amax(1, keepdim=True)
    ).all()
    x = random(33, 96).to(DEVICE, TYPES[-1])
    want = x.double().cpu() @ became.double().T
    scale = want.abs().amax(0)
    off = ((linear(x).double().cpu() - want) / scale.clamp(min=1e-9)).abs().max()
    assert off < (TOLERANCE[x.dtype] if is_head else HALF_STEP)


def test_weights_of_no_whole_blocks_are_not_rounded_and_that_is_reported(caplog):
    weight = StoredWeight.from_tensor(random(8, 40))
    pack = fp8.rounding_linear.function(CudaToolkit(quantization="fp8"))
    linear = pack(weight, torch.float32, DEVICE)
    x = random(3, 40).to(DEVICE)
    torch.testing.assert_close(linear(x).cpu(), x.cpu() @ weight.dense.T, rtol=1e-5, atol=1e-5)
    assert "stays as it is" in caplog.text


@pytest.mark.parametrize("rounds", [False, True])
def test_there_may_be_no_rows(rounds):
    linear = opened(stored(CHANNEL, 48, 96, E4M3), torch.float16, rounds)
    assert linear(torch.empty(0, 96, dtype=torch.float16, device=DEVICE)).shape == (0, 48)


@pytest.mark.skipif(IS_INTERPRETED, reason="torch multiplies 8-bit floats on CUDA devices only")
@pytest.mark.parametrize("rows", [17, 64, 300])
def test_the_vendors_products_are_those_of_triton(rows):
    weight = stored(CHANNEL, 256, 512)
    made = [
        fp8.FloatLinear(fp8.pack(weight, DEVICE), torch.bfloat16, True, backend)
        for backend in FP8_BACKENDS
    ]
    x, bias = random(rows, 512).to(DEVICE).bfloat16(), random(256, seed=2).to(DEVICE).bfloat16()
    for more in (None, bias):
        one, other = (linear(x, more) for linear in made)
        close(one, other.double().cpu(), 1e-2)
