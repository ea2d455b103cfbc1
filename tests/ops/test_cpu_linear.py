"""Compiled projections against plain double precision, in every instruction set of this machine."""

import functools

import gguf
import numpy as np
import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.formats.gguf import kept_bytes
from banyan.ops.bind import bind, open_toolkit
from banyan.ops.cpu.build import ISAS
from banyan.ops.cpu.library import Library
from banyan.ops.cpu.linear import PlainLinear, RoundedLinear, StoredEmbedding, pack_linear
from banyan.ops.cpu.weights import QUANTIZATIONS, SOURCES, Arena, pack
from banyan.ops.stored import E4M3, STORAGE_TYPES, StoredWeight
from tests.ops.conftest import MACHINES, beside_the_best, open_library
from tests.support.stored_weights import HALF_AT, ROUNDED, assert_close, eighths, random, stored

FLOATS = tuple(name for name in SOURCES if STORAGE_TYPES[name].is_float)
BLOCKS = tuple(name for name in SOURCES if name not in (*FLOATS, E4M3))
OWN = ("IQ4_NL", "IQ3_XXS", "IQ2_S")
"""Small types that have a form of their own, which others are packed in too."""
TABLED = tuple(name for name in SOURCES if name.startswith(("IQ", "TQ")) and name not in OWN)
"""Types that are packed in a form of another one: what runs on them is that one's."""
PACKED = tuple(name for name in SOURCES if name not in (*FLOATS, E4M3, *TABLED))
SUPER_BLOCKS = tuple(name for name in BLOCKS if STORAGE_TYPES[name].values == 256)


@pytest.fixture(params=[*MACHINES, *beside_the_best("amx")], ids=str)
def library(request):
    """Projections alone have code of their own for tiles."""
    yield from open_library(request)


@pytest.mark.parametrize("rows", [1, 2, 7, 13, 200])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (37, 352), (64, 1088)])
def test_floats_of_8_bits_multiply_as_they_are(rows, outputs, inputs, library):
    """And a row gives the same bits alone and among others."""
    weight, x = eighths(outputs, inputs), random(rows, inputs)
    packed = pack_linear(library, weight)
    assert isinstance(packed, PlainLinear)
    numbers = weight.raw.view(outputs, -1, 36)
    of_block = numbers[..., 32:].contiguous().view(torch.float32)
    values = numbers[..., :32].contiguous().view(torch.float8_e4m3fn).double() * of_block.double()
    whole = values.flatten(1)
    assert torch.equal(weight.dense, whole.float())
    found, bound = packed(x), x.abs().double() @ whole.abs().T
    assert ((found - x.double() @ whole.T).abs() <= 3e-6 * bound + 1e-30).all()
    alone = torch.cat([packed(x[at : at + 1]).clone() for at in range(min(rows, 20))])
    assert torch.equal(alone, found[:20])


def test_floats_of_8_bits_are_rounded_where_that_is_asked_for(library):
    weight = eighths(32, 64)
    same = pack_linear(library, StoredWeight.from_tensor(weight.dense), "q8_0")
    assert torch.equal(pack_linear(library, weight, "q8_0")(random(3, 64)), same(random(3, 64)))


def rounded_rows(x):
    """What the kernels make of activations: the largest of a row, one for every 16 blocks of
    32, one at least, as they are; the others in 8 bits and a scale per block. [double]"""
    tokens, inputs = x.shape
    wide = torch.zeros(tokens, -(-inputs // 32) * 32)
    wide[:, :inputs] = x
    order = wide.abs().sort(stable=True, dim=-1, descending=True).indices
    kept = torch.zeros_like(wide, dtype=torch.bool)
    kept.scatter_(1, order[:, : max(1, wide.shape[1] // 512)], True)
    blocks = wide.masked_fill(kept, 0).view(tokens, -1, 32)
    most = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, 127 / most, torch.zeros(()))
    values = torch.round(blocks * inverse).double() * (most / 127).double()
    return torch.where(kept, wide.double(), values.view(tokens, -1))[:, :inputs]


def packed_values(library, weight):
    """The weights as the kernels see them. [outputs, inputs] fp32"""
    linear = PlainLinear(library, pack(library, Arena(), weight))
    return linear(torch.eye(weight.shape[1])).T


def inputs_of(name):
    return (256, 768) if name in SUPER_BLOCKS else (32, 96, 608)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("outputs", [7, 40, 129])
def test_quantised_weights_multiply_as_in_double_precision(library, name, outputs):
    for inputs in inputs_of(name):
        weight = stored(name, outputs, inputs)
        x = random(13, inputs, seed=inputs) * torch.logspace(-3, 3, 13).unsqueeze(1)
        linear = RoundedLinear(library, pack(library, Arena(), weight))
        want = rounded_rows(x) @ packed_values(library, weight).double().T

        for row in range(13):
            assert_close(linear(x[row : row + 1])[0], want[row], 1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13, 16, 17, 32, 33, 40, 193])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (7, 33), (40, 700), (64, 64), (129, 5), (136, 1089)]
)
def test_bf16_weights_multiply_activations_in_bf16(library, rows, outputs, inputs):
    """Where the processor does: to nearest even, with sums in fp32. Others round none."""
    weight, x, bias = (
        stored("BF16", outputs, inputs),
        random(rows, inputs, seed=20),
        random(outputs),
    )
    x[:, 0] = 1 + 2**-8 + torch.arange(rows) % 2 * 2**-7  # half way between two numbers
    linear = pack_linear(library, weight)
    assert library.multiplies_bf16 == isinstance(linear, RoundedLinear)
    taken = (x.bfloat16() if library.multiplies_bf16 else x).double()
    want = taken @ weight.dense.double().T + bias.double()
    bound = taken.abs() @ weight.dense.double().abs().T + bias.abs()

    assert ((linear(x, bias) - want).abs() <= 1e-6 * bound).all()


def test_products_of_bf16_are_for_the_sets_that_have_them(path):
    """And for nobody who asked for exact activations."""
    library, spec = Library(path, 1), functools.partial(bind, "cpu", torch.device("cpu"))
    try:
        may_round = library.multiplies_bf16
        kernels = []
        for isa, exact in ((library.isa, False), (library.isa, True), ("avx512", False)):
            library.function("bn_set_isa")(ISAS.index(isa))
            ops = spec(torch.float32, frozenset(), 16, {}, exact, None, library)
            kernels += [c.kernel for c in ops.choices if c.label == "linear[BF16]"]
            packed = ops.pack_linear(stored("BF16", 40, 200))
            assert isinstance(packed, RoundedLinear) == kernels[-1].endswith("rounded")
    finally:
        library.function("bn_set_isa")(len(ISAS) - 1)
        library.close()

    assert kernels == [f"linear:{'rounded' if may_round else 'plain'}", *["linear:plain"] * 2]


@pytest.mark.parametrize("name", PACKED)
def test_a_few_large_inputs_do_not_coarsen_the_others(library, name):
    """Up to one of every 512 inputs: what it multiplies is exact, and its block keeps its scale."""
    weight, x = stored(name, 40, 1024), random(3, 1024, seed=11)
    linear = RoundedLinear(library, pack(library, Arena(), weight))
    exact = PlainLinear(library, linear.weight)
    usual = (linear(x) - exact(x)).pow(2).mean().sqrt()

    x[:, 70], x[:, 900] = 300.0, -2000.0

    assert (linear(x) - exact(x)).pow(2).mean().sqrt() <= 1.5 * usual


@pytest.mark.parametrize("name", SOURCES)
def test_packed_weights_hold_the_values_of_the_file(library, name):
    weight = stored(name, 40, 512)

    values = packed_values(library, weight)

    if name not in SUPER_BLOCKS:
        assert torch.equal(values, weight.dense.float())
    else:  # products of two scales are rounded to fp16, two scales for 32 values to 8 bits of one
        largest = weight.dense.abs().amax(1, keepdim=True)
        bits = ROUNDED.get(name, 2**-11)
        assert ((values - weight.dense).abs() <= largest * bits).all()


def any_blocks(name: str, outputs: int, inputs: int) -> StoredWeight:
    """A weight of any bits at all: with scales that are zero, tiny, infinite or no numbers."""
    storage = STORAGE_TYPES[name]
    size = outputs * inputs // storage.values * storage.size_bytes
    raw = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    return StoredWeight.from_bytes(name, (outputs, inputs), torch.from_numpy(raw))


@pytest.mark.parametrize("name", SOURCES)
def test_every_instruction_set_packs_to_the_bits_of_the_plain_code(name, library):
    """Whole groups of outputs and parts of one, blocks of any bits, floats of odd lengths."""
    shapes = [(16, 256), (40, 768), (129, 512), (7, 256)]
    if STORAGE_TYPES[name].is_float:
        shapes += [(16, 1), (33, 7), (48, 95), (32, 1025)]
    level = ISAS.index(library.isa)
    for outputs, inputs in shapes:
        weight = any_blocks(name, outputs, inputs)
        for rounds in (False, True):
            found = pack(library, Arena(), weight, rounds=rounds)
            library.function("bn_set_isa")(0)
            try:
                plain = pack(library, Arena(), weight, rounds=rounds)
            finally:
                library.function("bn_set_isa")(level)

            assert torch.equal(found.factors, plain.factors)
            if found.format == plain.format:
                assert torch.equal(found.tiles, plain.tiles)
            else:  # pairs of bf16, for sets that multiply them
                pairs = torch.zeros(-(-outputs // 16) * 16, -(-inputs // 2) * 2, dtype=torch.int16)
                pairs[:outputs, :inputs] = weight.raw.view(torch.int16).view(outputs, inputs)
                tiles = pairs.view(-1, 16, pairs.shape[1] // 2, 2).transpose(1, 2)
                assert torch.equal(found.tiles, tiles.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("name", BLOCKS)
def test_what_packed_weights_take_is_what_a_plan_counts(library, name):
    assert pack(library, Arena(), stored(name, 48, 512)).tiles.numel() == kept_bytes(
        name, (48, 512)
    )


@pytest.mark.parametrize("name", [*PACKED, "BF16"])
def test_a_row_is_the_same_bits_alone_and_in_any_batch(library, name):
    inputs, outputs = 768, 72  # a group more than what goes at once
    weight, bias = stored(name, outputs, inputs), random(outputs, seed=3)
    x = random(197, inputs, seed=2)
    linear = pack_linear(library, weight)

    together = linear(x, bias)

    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 67, 193):
        assert torch.equal(linear(x[:tokens], bias), together[:tokens])
    for row in (0, 50, 196):
        assert torch.equal(linear(x[row : row + 1], bias)[0], together[row])


@pytest.mark.parametrize("inputs", [1, 2, 31, 33, 64, 95, 1100, 2081])
def test_a_row_of_bf16_is_the_same_bits_next_to_1_to_40_others(library, inputs):
    """Inputs that are no whole blocks, and more than all rows go through at once."""
    weight, x = stored("BF16", 72, inputs), random(40, inputs, seed=22)
    linear = pack_linear(library, weight)
    alone = torch.cat([linear(x[row : row + 1]).clone() for row in range(40)])

    around_tiles = (2, 15, 16, 17, 31, 32, 33, 40)
    for rows in range(1, 41) if inputs == 33 else around_tiles:
        assert torch.equal(linear(x[:rows]), alone[:rows])
        assert torch.equal(linear(x[40 - rows :]), alone[40 - rows :])


def test_tiles_of_bf16_add_even_and_odd_inputs_of_a_block_apart(library):
    """So the machine and its emulation give the same bits, those that the manual gives. Numbers
    below the smallest normal one are zero."""
    if library.isa != "amx":
        pytest.skip("for tiles")
    outputs, inputs, rows = 16, 75, 19
    weight = stored("BF16", outputs, inputs).dense.float()
    x = random(rows, inputs, seed=23).bfloat16().float()
    weight[3, 5], weight[4] = 1e-39, 2.0**-100
    x[7], x[8, 6] = 2.0**-40, 3e-39
    linear = pack_linear(library, StoredWeight.from_tensor(weight.bfloat16()))

    w, padding = weight.bfloat16().float(), -inputs % 32
    a, b = (torch.nn.functional.pad(flushed(t), (0, padding)).double() for t in (x, w))
    total = torch.zeros(rows, outputs)
    for block in range(0, inputs + padding, 32):
        parts = []
        for first in (block, block + 1):
            part = torch.zeros(rows, outputs)
            for at in range(first, block + 32, 2):  # in double a product is exact, but not the sum
                part = flushed(fused(a[:, at : at + 1], b[:, at], part))
            parts.append(part)
        total = flushed(total + flushed(parts[0] + parts[1]))
    assert torch.equal(linear(x), total)


def flushed(x):
    return torch.where(x.abs() < 2.0**-126, torch.zeros(()), x)


def fused(a, b, c):
    """a · b + c, rounded once to fp32; a and b hold numbers of bf16, c of fp32."""
    product, wide = a * b, c.double()
    total = product + wide
    back = total - product
    lost = (product - (total - back)) + (wide - back)  # what the double has lost of the sum
    bits = total.view(torch.int64)  # to odd: the next rounding sees that something was lost
    toward_zero = torch.sign(lost) * torch.sign(total) < 0
    odd = torch.where(lost != 0, (bits - toward_zero.long()) | 1, bits)
    return odd.view(torch.float64).float()


@pytest.mark.parametrize("name", SOURCES)
def test_plain_activations_give_what_plain_floats_give(library, name):
    inputs = 768 if name in SUPER_BLOCKS else 608
    outputs = 72  # a group more than what goes at once
    weight, bias = stored(name, outputs, inputs), random(outputs, seed=4)
    x = random(29, inputs, seed=5)
    linear = PlainLinear(library, pack(library, Arena(), weight))

    together = linear(x, bias)

    want = x.double() @ weight.dense.double().T + bias.double()
    limit = 4e-2 if name in ROUNDED else 5e-3 if name in SUPER_BLOCKS else 5e-6
    assert_close(together, want, limit)
    for tokens in (1, 2, 5, 6, 7, 12, 13, 14, 20):
        assert torch.equal(linear(x[:tokens], bias), together[:tokens])


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (7, 33), (40, 700), (129, 5)])
def test_float_weights_of_odd_shapes_multiply_exactly(library, name, outputs, inputs):
    weight, x = stored(name, outputs, inputs), random(8, inputs, seed=6)
    linear = PlainLinear(library, pack(library, Arena(), weight))

    assert_close(linear(x), x.double() @ weight.dense.double().T, 5e-6)


@pytest.mark.parametrize("name", SUPER_BLOCKS)
@pytest.mark.parametrize(("low", "high"), [(-24.0, -20.0), (8.0, 15.0), (-24.0, 15.0)])
def test_scales_that_fp16_cannot_hold_keep_their_size(library, name, low, high):
    weight = stored(name, 24, 512, low, high)
    x = random(4, 512, seed=7)
    linear = RoundedLinear(library, pack(library, Arena(), weight))

    limit = 0.1 if name in ROUNDED else 5e-3
    assert_close(linear(x), rounded_rows(x) @ weight.dense.double().T, limit)


@pytest.mark.parametrize("name", PACKED)
def test_the_largest_sums_do_not_overflow(library, name):
    inputs = 256
    raw = stored(name, 16, inputs).raw.clone().view(-1, STORAGE_TYPES[name].size_bytes)
    raw[:] = 255
    for at in HALF_AT.get(name, (0, 2)):
        raw[:, at : at + 2] = torch.tensor([0, 0x3C], dtype=torch.uint8)  # 1.0
    if name == "MXFP4":
        raw[:, 0], raw[:, 1:] = 127, 0x77  # 1, and the largest number
    weight = StoredWeight.from_bytes(name, (16, inputs), raw.view(-1))
    signs = torch.sign(random(6, inputs, seed=8))
    x = torch.cat([torch.ones(1, inputs), -torch.ones(1, inputs), signs])
    linear = RoundedLinear(library, pack(library, Arena(), weight))

    want = rounded_rows(x) @ weight.dense.double().T

    assert (linear(x).double() - want).abs().max() <= 1e-5 * weight.dense.abs().max() * inputs


@pytest.mark.parametrize("name", ["Q4_1", "BF16"])
def test_infinite_and_missing_numbers_show_in_their_own_row_only(library, name):
    weight = stored(name, 24, 96)
    x = random(9, 96, seed=9)
    x[2, 40], x[5, 3] = float("nan"), float("inf")
    linear = pack_linear(library, weight)

    finite = linear(x).isfinite().all(1)

    assert finite.tolist() == [row not in (2, 5) for row in range(9)]


def test_activations_of_zero_and_of_tiny_size_give_zero(library):
    weight = stored("Q8_0", 24, 96)
    x = torch.zeros(3, 96)
    x[1, :], x[2, 50] = 1e-38, -1e-44
    linear = RoundedLinear(library, pack(library, Arena(), weight))

    assert torch.equal(linear(x), torch.zeros(3, 24))


def test_rows_that_lie_apart_are_read(library):
    wide = random(5, 200, seed=10)
    x = wide[:, 40:136]
    for name in ("Q4_0", "F16", "BF16"):
        linear = pack_linear(library, stored(name, 24, 96))
        assert torch.equal(linear(x), linear(x.contiguous()))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("name", FLOATS)
def test_float_weights_are_rounded_as_asked(library, quantization, name):
    weight, x = stored(name, 40, 200), random(5, 200, seed=11)
    linear = pack_linear(library, weight, quantization)

    want = x.double() @ weight.dense.double().T
    error = (linear(x).double() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()
    assert error < (0.02 if QUANTIZATIONS[quantization] == 7 else 0.12)


@pytest.mark.parametrize(
    ("quantization", "name"), [("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("q4_1", "Q4_1")]
)
def test_rounding_at_load_is_as_good_as_rounding_in_the_file(library, quantization, name):
    values = random(32, 1024, seed=12)
    raw = gguf.quantize(values.numpy(), gguf.GGMLQuantizationType[name])
    in_file = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[name]))
    packed = pack(library, Arena(), StoredWeight.from_tensor(values), quantization)

    at_load = PlainLinear(library, packed)(torch.eye(1024)).T

    assert (at_load - values).pow(2).mean() <= (in_file - values).pow(2).mean() * 1.01


@pytest.mark.parametrize(
    ("exact", "kernel"), [(False, "linear:rounded"), (True, "linear:plain")], ids=str
)
def test_a_rank_rounds_its_float_weights_and_leaves_the_head_eight_bits(path, exact, kernel):
    toolkit = open_toolkit("cpu", 1, {"quantization": "q4_1"})
    ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 16, {}, exact, None, toolkit)
    weight = stored("BF16", 40, 200)

    chosen = {choice.label: choice.kernel for choice in ops.choices}
    assert chosen["linear[BF16]"] == chosen["linear[Q6_K]"] == kernel
    assert ops.pack_linear(weight).weight.format == QUANTIZATIONS["q4_1"]
    assert ops.pack_linear(weight, is_head=True).weight.format == QUANTIZATIONS["q8_0"]
    assert ops.pack_linear(stored("Q5_0", 40, 64)).weight.format not in QUANTIZATIONS.values()


def test_what_a_device_cannot_round_to_is_refused_with_what_it_can(monkeypatch):
    with pytest.raises(ConfigError, match="q2_k does not exist on cpu.*q4_0, q4_1"):
        open_toolkit("cpu", 1, {"quantization": "q2_k"})
    with pytest.raises(ConfigError, match="q4_0 does not exist on null"):
        open_toolkit("null", 1, {"quantization": "q4_0"})
    monkeypatch.setattr("banyan.ops.cpu.build.compilers", lambda named: iter(()))
    monkeypatch.setattr("banyan.ops.cpu.build._fingerprint", lambda isa: "not there")
    with pytest.raises(ConfigError, match="needs the compiled CPU kernels: no C.. compiler"):
        open_toolkit("cpu", 1, {"quantization": "q4_0"})


@pytest.mark.parametrize("name", ["Q4_1", "BF16"])
def test_threads_and_cuts_leave_the_bits_alone(path, name):
    weight, x = stored(name, 129, 608), random(67, 608, seed=14)
    results = []
    for threads in (1, 2, 3):
        library = Library(path, threads)
        results.append(pack_linear(library, weight)(x))
        library.close()
    cut = weight.cut(1, 0, 608).cut(0, 16, 64)
    library = Library(path, 1)
    part = pack_linear(library, cut)(x)
    library.close()

    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert torch.equal(part, results[0][:, 16:64])


@pytest.mark.parametrize("name", SOURCES)
def test_embedding_rows_equal_the_unpacked_table(library, name):
    weight = stored(name, 50, 512)
    tokens = torch.tensor([3, 49, 0, 10, 9, 40, 3])

    whole = StoredEmbedding(library, weight, 0, 50, 1.0)(tokens)
    mine = StoredEmbedding(library, weight, 10, 40, 3.0)(tokens)

    want = weight.dense.float()[tokens]
    assert torch.equal(whole, want)
    inside = ((tokens >= 10) & (tokens < 40)).unsqueeze(1)
    assert torch.equal(mine, torch.where(inside, want * 3, torch.zeros(())))


def test_a_recorded_projection_runs_for_other_numbers_of_rows(library):
    linear = pack_linear(library, stored("Q4_0", 40, 96))
    x, bias = random(32, 96, seed=15), random(40, seed=16)
    want = linear(x, bias)

    recording = library.record(lambda: linear(x, bias), 32, 8)
    recording.run(20, 1, 8)

    assert torch.equal(recording.result[:20], want[:20])


def test_every_instruction_set_checks_itself(library):
    assert library.problems() == []
