"""Stored weights: unpacking equals the gguf package bit for bit; cuts and stacks hold too."""

import gguf
import numpy as np
import pytest
import torch

from banyan.base.errors import ModelError
from banyan.ops.activation_quant import FOUR_BITS, SIZES, FourBits, Rounding
from banyan.ops.stored import E4M3, E4M3_DYNAMIC, NVFP4, STORAGE_TYPES, StoredWeight, stack

OF_OTHERS = (*SIZES, E4M3, E4M3_DYNAMIC, NVFP4, FOUR_BITS)
STORAGE_TYPES = {name: type for name, type in STORAGE_TYPES.items() if name not in OF_OTHERS}
BLOCKS = [name for name, storage in STORAGE_TYPES.items() if not storage.is_float]
ADVERSARIAL = (0x00, 0x7F, 0x80, 0xFF, 0x55, 0xAA, 0x0F, 0xF0)
"""Bytes whose repetition makes largest and smallest values, infinities, NaNs and lone bits."""

HALVES = {
    **{name: (0,) for name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL")},
    **{name: (0, 2) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()},
    **{
        name: (0,) for name in ("IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S")
    },
    **{"IQ1_M": (), "TQ1_0": (52,), "TQ2_0": (64,)},
}
"""Bytes of each block at which its fp16 scales begin."""


def stored(
    type_name: str, rows: int, columns: int, seed: int = 0
) -> tuple[StoredWeight, np.ndarray]:
    """A random weight of a type with sane scales, and what the gguf package makes of its bytes."""
    generator = np.random.default_rng(seed)
    kind, storage = gguf.GGMLQuantizationType[type_name], STORAGE_TYPES[type_name]
    if storage.is_float:
        values = generator.standard_normal((rows, columns)).astype(np.float32)
        raw = np.ascontiguousarray(gguf.quantize(values, kind)).view(np.uint8).reshape(rows, -1)
    else:
        blocks = columns // storage.values
        raw = generator.integers(0, 256, (rows, blocks, storage.size_bytes), dtype=np.uint8)
        for place in HALVES[type_name]:
            scales = generator.standard_normal((rows, blocks, 1)).astype(np.float16)
            raw[..., place : place + 2] = scales.view(np.uint8)
        raw = raw.reshape(rows, -1)
    expected = gguf.dequantize(raw, kind)
    return StoredWeight.from_bytes(
        type_name, (rows, columns), torch.from_numpy(raw.reshape(-1).copy())
    ), expected


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    """Equal fp32 bits, the sign of zero included; any NaN equals any other."""
    numbers = ours.float().numpy()
    is_nan = np.isnan(theirs)
    return np.array_equal(np.isnan(numbers), is_nan) and np.array_equal(
        numbers.view(np.int32)[~is_nan], theirs.view(np.int32)[~is_nan]
    )


@pytest.mark.parametrize("type_name", STORAGE_TYPES)
def test_unpacked_values_equal_the_gguf_package_bit_for_bit(type_name):
    weight, expected = stored(type_name, 24, 768)

    assert same_bits(weight.dense, expected)


@pytest.mark.parametrize("type_name", BLOCKS)
def test_any_bytes_unpack_as_in_the_gguf_package(type_name):
    storage = STORAGE_TYPES[type_name]
    raw = np.random.default_rng(1).integers(0, 256, (64, storage.size_bytes), dtype=np.uint8)
    for row, byte in enumerate(ADVERSARIAL):
        raw[row] = byte
        raw[row + 8] = np.where(np.arange(storage.size_bytes) % 2, byte, ~byte & 255)
    shape = (64, storage.values)

    with np.errstate(invalid="ignore", over="ignore"):  # random scales include infinities
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name])

    weight = StoredWeight.from_bytes(type_name, shape, torch.from_numpy(raw.reshape(-1)))
    assert same_bits(weight.dense, expected)


@pytest.mark.parametrize("type_name", STORAGE_TYPES)
@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 4, 12), (1, 256, 512), (1, 8, 96)])
def test_a_cut_holds_the_same_values(type_name, dim, start, stop):
    weight, expected = stored(type_name, 16, 512)

    cut = weight.cut(dim, start, stop)

    assert cut.shape == ((8, 512) if dim == 0 else (16, stop - start))
    wanted = expected[start:stop] if dim == 0 else expected[:, start:stop]
    assert np.array_equal(cut.dense.float().numpy(), wanted)


@pytest.mark.parametrize(
    "types", [("Q4_1", "Q4_1"), ("Q4_0", "Q8_0"), ("Q4_K", "Q6_K"), ("F32", "F16")]
)
def test_stacked_weights_lie_over_one_another(types):
    parts = [stored(name, 8, 256, seed) for seed, name in enumerate(types)]

    whole = stack([weight for weight, _ in parts])

    assert np.array_equal(whole.dense.float().numpy(), np.concatenate([e for _, e in parts]))


def test_reordering_paired_rows_undoes_the_gguf_order():
    heads, head_dim = 3, 8
    rows = torch.arange(heads * head_dim, dtype=torch.float).unsqueeze(1).repeat(1, 2)
    interleaved = rows.view(heads, 2, head_dim // 2, 2).transpose(1, 2).reshape(-1, 2)

    again = StoredWeight.from_tensor(interleaved).pair_halves(head_dim, 0, head_dim)
    bias = StoredWeight.from_tensor(interleaved[:, 0].contiguous()).pair_halves(
        head_dim, 0, head_dim
    )

    assert torch.equal(again.dense, rows)
    assert torch.equal(bias.dense, rows[:, 0])


def test_rows_that_do_not_rotate_stay_in_place():
    rows = torch.arange(2 * 6, dtype=torch.float).unsqueeze(1)

    again = StoredWeight.from_tensor(rows).pair_halves(6, 0, 4).dense

    assert again.flatten().tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


@pytest.mark.parametrize("type_name", BLOCKS)
def test_paired_rows_of_blocks_move_whole(type_name):
    weight, expected = stored(type_name, 16, 256)

    order = np.arange(16).reshape(2, 4, 2).swapaxes(1, 2).reshape(-1)

    assert np.array_equal(weight.pair_halves(8, 0, 8).dense.numpy(), expected[order])


def test_a_cut_along_blocks_stays_packed():
    weight, _ = stored("Q4_K", 4, 512)

    assert weight.cut(1, 256, 512).type == "Q4_K"
    assert weight.cut(1, 128, 512).type == "F32"


@pytest.mark.parametrize(
    ("type_name", "shape", "size_bytes"),
    [("Q4_0", (2, 33), 36), ("F32", (2, 2), 15), ("Q8_0", (2, 32), 67)],
)
def test_bytes_that_do_not_fit_the_shape_are_refused(type_name, shape, size_bytes):
    with pytest.raises(ModelError, match="cannot have"):
        StoredWeight.from_bytes(type_name, shape, torch.zeros(size_bytes, dtype=torch.uint8))


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(ModelError, match="Q8_K.*Q4_K"):
        StoredWeight.from_bytes("Q8_K", (1, 256), torch.zeros(292, dtype=torch.uint8))


@pytest.mark.parametrize("name", SIZES)
def test_weights_with_rounded_activations_come_back_after_cuts_and_stacks(name):
    numbers = torch.randint(-127, 128, (8, 96), dtype=torch.int8)
    factors = [torch.rand(8) for _ in range(3 if name == "W8A8" else 1)]
    weight = StoredWeight(name, (8, 96), Rounding(numbers, *factors).raw)

    both = stack([weight.cut(1, 32, 96), weight.cut(1, 32, 96).cut(0, 0, 2)])
    found = Rounding.of(both.raw, both.type)

    assert torch.equal(weight.dense, numbers.float() * factors[0].unsqueeze(1))
    assert torch.equal(found.numbers, torch.cat([numbers, numbers[:2]])[:, 32:])
    each = (found.scale, found.unit, found.offset)
    for part, factor in zip(each, factors, strict=False):
        assert part is not None and torch.equal(part, torch.cat([factor, factor[:2]]))


def test_weights_of_four_bits_come_back_after_cuts_and_stacks():
    numbers = torch.randint(-8, 8, (8, 96), dtype=torch.int8)
    numbers[0, :4] = torch.tensor([-8, 7, -1, 0], dtype=torch.int8)
    scale = torch.rand(8, 3)
    raw = FourBits(numbers, scale).raw
    weight = StoredWeight(FOUR_BITS, (8, 96), raw)

    both = stack([weight.cut(1, 32, 96), weight.cut(1, 32, 96).cut(0, 0, 2)])
    found = FourBits.of(both.raw)

    assert raw.shape == (8, 3 * 20) and raw[0, :2].tolist() == [0x78, 0x0F]
    assert torch.equal(weight.dense, numbers.float() * scale.repeat_interleave(32, 1))
    assert torch.equal(found.numbers, torch.cat([numbers, numbers[:2]])[:, 32:])
    assert torch.equal(found.scale, torch.cat([scale, scale[:2]])[:, 1:])
