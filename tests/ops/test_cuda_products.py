"""Products with quantised weights against the reference: `triton_device.py` tells where
they run."""

import re
from pathlib import Path

import pytest
import torch

from banyan.ops import blocks, rounding
from banyan.ops.cuda import products
from banyan.ops.cuda.needs import CudaToolkit
from banyan.ops.stored import StoredWeight
from tests.ops import triton_device
from tests.ops.triton_device import ABSENCE, TYPES

if ABSENCE:
    pytest.skip(ABSENCE, allow_module_level=True)
DEVICE = torch.device(triton_device.DEVICE)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROWS = [1, 5, 33, 100]
SIMPLE = ["Q8_0", "Q4_0", "Q4_1"]
WIDER = ["Q5_0", "Q5_1", "IQ4_NL"]
NESTED = ["Q4_K", "Q5_K", "Q6_K"]


def pack_linear(
    weight: StoredWeight, dtype: torch.dtype, quantization: str = "", **named: bool
) -> products.QuantisedLinear:
    toolkit = CudaToolkit(quantization=quantization)
    linear = products.packer(toolkit)(weight, dtype, DEVICE, **named)
    assert isinstance(linear, products.QuantisedLinear)
    return linear


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(
    type: str, outputs: int, inputs: int, group: int = 32, magnitude: float = 1.0
) -> StoredWeight:
    """A weight whose blocks share their factors along `group` inputs."""
    values = random(outputs, inputs, seed=1) * magnitude / inputs**0.5
    if type == "IQ4_NL":  # has the form of Q4_0
        return StoredWeight(type, values.shape, rounding.to_blocks(values / 16, "Q4_0"))
    raw = rounding.to_blocks(values, type)
    if type in (*WIDER, *NESTED):
        return StoredWeight(type, (outputs, inputs), raw)
    raw = raw.view(outputs, inputs // 32, -1).clone()
    if group > 32:
        width = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}[type]
        first = raw[:, :: group // 32, :width]
        raw[:, :, :width] = first.repeat_interleave(group // 32, 1)[:, : inputs // 32]
    return StoredWeight(type, (outputs, inputs), raw.flatten(1))


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    most = TOLERANCE[dtype]
    torch.testing.assert_close(got.double().cpu(), want, atol=most, rtol=most)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("type", SIMPLE)
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"),
    [(48, 96, 32), (200, 256, 128), (130, 320, 64), (129, 160, 160), (16, 32, 32)],
)
def test_products_are_those_of_the_plain_weight(type, outputs, inputs, group, dtype):
    weight = stored(type, outputs, inputs, group)
    linear = pack_linear(weight, dtype)
    assert linear.weight.group == group
    for rows in ROWS if (outputs, dtype) == (200, TYPES[1]) else ROWS[1:3]:
        wide = random(rows, 2 * inputs, seed=rows).to(DEVICE, dtype)
        bias = random(outputs, seed=2).to(DEVICE, dtype)
        for x, more in ((wide[:, :inputs], None), (wide[:, inputs:], bias)):
            want = x.double().cpu() @ weight.dense.double().T
            want = want if more is None else want + more.double().cpu()
            close(linear(x, more), want, dtype)


@pytest.mark.parametrize("type", SIMPLE)
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_every_cut_gives_the_same_product(type, is_turned, parts):
    weight = stored(type, 70, 224)
    packed = products.pack(weight, DEVICE)
    x = random(19, 224).to(DEVICE, torch.float16)
    bias = random(70, seed=2).to(DEVICE, torch.float16)
    want = x.double().cpu() @ weight.dense.double().T + bias.double().cpu()
    for rows, outputs in ((16, 64), (32, 32), (64, 128)):
        for rounds in (False, True)[: 1 + is_turned]:
            shape = products.Shape(rows, outputs, parts, is_turned, rounds=rounds)
            counters = products.counters_for(70, DEVICE)
            for more in ({}, {"counters": counters}, {"counters": counters}):
                close(products.product(x, packed, bias, shape, **more), want, x.dtype)
            assert not counters.any()


@pytest.mark.parametrize("type", SIMPLE)
def test_a_token_has_the_same_bits_again_and_in_a_batch(type, monkeypatch):
    monkeypatch.setattr(products, "LEAST_INPUTS", 96)
    linear = pack_linear(stored(type, 70, 640), torch.float16)
    assert products.shape_of(16, linear.weight).parts > 2
    x = random(16, 640).to(DEVICE, torch.float16)
    together = linear(x)
    assert torch.equal(together, linear(x))
    for i in (0, 7, 15):
        assert torch.equal(linear(x[i : i + 1])[0], together[i])


@pytest.mark.parametrize("magnitude", [1.0, 1e-6, 1e9])
@pytest.mark.parametrize("type", NESTED)
def test_nested_scales_keep_eleven_bits_whatever_their_size(type, magnitude):
    weight = stored(type, 140, 512, magnitude=magnitude)
    packed = products.pack(weight, DEVICE)
    want = weight.dense.double()
    most = want.abs().amax(1, keepdim=True) * 2.0**-9
    plain = products.unpacked(packed, torch.float32).double().cpu()
    assert ((plain - want).abs() <= most).all()
    for rows in ROWS[:3]:
        x, bias = random(rows, 512).to(DEVICE), random(140, seed=2).to(DEVICE) * magnitude
        got = pack_linear(weight, x.dtype)(x, bias)
        near = x.double().cpu() @ plain.T + bias.double().cpu()
        close(got / magnitude, near / magnitude, x.dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("type", SIMPLE)
@pytest.mark.parametrize(("inputs", "group"), [(96, 32), (256, 128)])
def test_what_is_unpacked_is_the_plain_weight_to_the_bit(type, inputs, group, dtype):
    weight = stored(type, 70, inputs, group)
    got = products.unpacked(products.pack(weight, DEVICE), dtype)
    assert torch.equal(got.cpu(), weight.dense.to(dtype))


@pytest.mark.parametrize("type", SIMPLE)
@pytest.mark.parametrize("group", [32, 64, 128, 512])
def test_a_weight_takes_no_more_memory_than_in_the_file(type, group):
    weight = stored(type, 256, 512, group)
    packed = products.pack(weight, DEVICE)
    bits = products.BLOCK_TYPES[type].bits + (32 if type == "Q4_1" else 16) / group
    assert packed.size_bytes == 256 * 512 * bits / 8 <= weight.raw.nbytes


@pytest.mark.parametrize("type", WIDER)
def test_types_of_four_and_five_bits_may_be_kept_in_eight(type):
    weight = stored(type, 70, 96)
    linear = pack_linear(weight, torch.float32)
    assert torch.equal(products.unpacked(linear.weight, torch.float32).cpu(), weight.dense)
    x = random(5, 96).to(DEVICE)
    close(linear(x), x.double().cpu() @ weight.dense.double().T, torch.float32)


def test_many_rows_are_multiplied_with_the_unpacked_weight(monkeypatch):
    monkeypatch.setattr(products, "UNPACK_ABOVE", 19)
    weight = stored("Q4_1", 70, 96)
    linear = pack_linear(weight, torch.float32)
    for rows in (19, 20, 40):
        x, bias = random(rows, 96).to(DEVICE), random(70).to(DEVICE)
        want = x.double().cpu() @ weight.dense.double().T + bias.double().cpu()
        close(linear(x, bias), want, torch.float32)


@pytest.mark.parametrize("type", [*SIMPLE, "Q6_K"])
def test_from_some_rows_on_weights_are_rounded_to_the_activations_type(type, monkeypatch):
    monkeypatch.setattr(products, "ROUND_ABOVE", 32)
    weight = stored(type, 70, 256)
    packed = products.pack(weight, DEVICE)
    dtype = TYPES[-1]
    shape = products.shape_of(40, packed, dtype)
    assert shape.rounds == (dtype != torch.float16 or packed.units is None)
    x = torch.eye(256, dtype=dtype, device=DEVICE)[::4]
    got = pack_linear(weight, dtype)(x)
    close(got, weight.dense[:, ::4].double().T, dtype)
    shape = products.Shape(64, 128, 1, is_turned=True, rounds=True)
    if packed.units is None:
        plain = products.unpacked(packed, dtype)[:, ::4].T
        assert type != "Q4_0" or torch.equal(got, plain)
        assert torch.equal(products.product(x, packed, None, shape), plain)


def test_numbers_beyond_the_range_of_seven_bits_are_kept():
    numbers = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).view(8, 32)
    raw = blocks.lay_q8_0(numbers, torch.full((8, 1), 0.01).half())
    weight = StoredWeight("Q8_0", (1, 256), raw.view(1, -1))
    linear = pack_linear(weight, torch.float16)
    x = torch.eye(256, dtype=torch.float16, device=DEVICE)[::9]
    assert torch.equal(linear(x).cpu(), (x.float().cpu() @ weight.dense.T).half())


def test_the_documentation_lists_the_types_whose_numbers_are_kept():
    page = Path(__file__).parents[2] / "docs" / "cuda.md"
    rows = [
        line.split("|") for line in page.read_text().splitlines() if line.endswith("| Triton |")
    ]
    kept = {row[1].strip(): re.findall(r"[\d.]+", row[2]) for row in rows}
    assert list(kept) == list(products.BLOCK_TYPES)
    for type, (bits, *_) in kept.items():
        packed = products.pack(stored(type, 128, 4096), DEVICE)
        units = 0 if packed.units is None else packed.units.nbytes
        assert (packed.size_bytes - units) * 8 / (128 * 4096) == float(bits), type


@pytest.mark.parametrize(
    ("wish", "type"), [("q4_0", "Q4_0"), ("q4_1", "Q4_1"), ("q8_0", "Q8_0"), ("int8", "Q8_0")]
)
def test_float_weights_are_rounded_at_load(wish, type, monkeypatch):
    monkeypatch.setattr(products, "_MOST_BYTES", 10_000)
    values = random(70, 96)
    stored_float = StoredWeight.from_tensor(values.bfloat16())
    for is_head, kept in ((False, type), (True, "Q8_0")):
        raw = rounding.to_blocks(values.bfloat16().float(), kept)
        want = StoredWeight(kept, (70, 96), raw).dense
        linear = pack_linear(stored_float, torch.float32, wish, is_head=is_head)
        assert torch.equal(products.unpacked(linear.weight, torch.float32).cpu(), want)


def test_weights_of_no_whole_blocks_are_not_rounded_and_that_is_reported(caplog):
    weight = StoredWeight.from_tensor(random(8, 40))
    linear = products.packer(CudaToolkit(quantization="int8"))(weight, torch.float32, DEVICE)
    x = random(3, 40).to(DEVICE)
    torch.testing.assert_close(linear(x).cpu(), x.cpu() @ weight.dense.T, rtol=1e-5, atol=1e-5)
    assert "stays as it is" in caplog.text


def test_there_may_be_no_rows():
    linear = pack_linear(stored("Q4_0", 48, 96), torch.float16)
    assert linear(torch.empty(0, 96, dtype=torch.float16, device=DEVICE)).shape == (0, 48)
