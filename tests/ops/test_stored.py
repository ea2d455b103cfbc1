"""Stored weights: unpacking equals the gguf package bit for bit; cuts and stacks hold too."""

import gguf
import numpy as np
import pytest
import torch

from banyan.base.errors import ModelError
from banyan.ops.stored import STORAGE_TYPES, StoredWeight, stack

BLOCKS = ("Q4_0", "Q4_1", "Q8_0")


def stored(
    type_name: str, rows: int, columns: int, seed: int = 0
) -> tuple[StoredWeight, np.ndarray]:
    """A random weight of a type, and what the gguf package makes of its bytes."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[type_name]
    raw = gguf.quantize(values, kind)
    expected = gguf.dequantize(raw, kind)
    flat = torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8).reshape(-1).copy())
    return StoredWeight.from_bytes(type_name, (rows, columns), flat), expected


@pytest.mark.parametrize("type_name", STORAGE_TYPES)
def test_unpacked_values_equal_the_gguf_package_bit_for_bit(type_name):
    weight, expected = stored(type_name, 24, 96)

    assert np.array_equal(weight.dense.float().numpy(), expected)


@pytest.mark.parametrize("type_name", BLOCKS)
def test_random_bytes_unpack_as_in_the_gguf_package(type_name):
    storage = STORAGE_TYPES[type_name]
    raw = np.random.default_rng(1).integers(0, 256, (64, storage.size_bytes * 2), dtype=np.uint8)
    weight = StoredWeight.from_bytes(type_name, (64, 64), torch.from_numpy(raw.reshape(-1)))

    with np.errstate(invalid="ignore"):  # random scales include infinities
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name])

    assert np.array_equal(weight.dense.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("type_name", STORAGE_TYPES)
@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 4, 12), (1, 32, 96), (1, 8, 24)])
def test_a_cut_holds_the_same_values(type_name, dim, start, stop):
    weight, expected = stored(type_name, 16, 96)

    cut = weight.cut(dim, start, stop)

    assert cut.shape == ((8, 96) if dim == 0 else (16, stop - start))
    wanted = expected[start:stop] if dim == 0 else expected[:, start:stop]
    assert np.array_equal(cut.dense.float().numpy(), wanted)


@pytest.mark.parametrize("types", [("Q4_1", "Q4_1"), ("Q4_0", "Q8_0"), ("F32", "F16")])
def test_stacked_weights_lie_over_one_another(types):
    parts = [stored(name, 8, 64, seed) for seed, name in enumerate(types)]

    whole = stack([weight for weight, _ in parts])

    assert np.array_equal(whole.dense.float().numpy(), np.concatenate([e for _, e in parts]))


def test_reordering_paired_rows_undoes_the_gguf_order():
    heads, head_dim = 3, 8
    rows = torch.arange(heads * head_dim, dtype=torch.float).unsqueeze(1).repeat(1, 2)
    interleaved = rows.view(heads, 2, head_dim // 2, 2).transpose(1, 2).reshape(-1, 2)

    again = StoredWeight.from_tensor(interleaved).pair_halves(head_dim)
    bias = StoredWeight.from_tensor(interleaved[:, 0].contiguous()).pair_halves(head_dim)

    assert torch.equal(again.dense, rows)
    assert torch.equal(bias.dense, rows[:, 0])


@pytest.mark.parametrize(
    ("type_name", "shape", "size_bytes"),
    [("Q4_0", (2, 33), 36), ("F32", (2, 2), 15), ("Q8_0", (2, 32), 67)],
)
def test_bytes_that_do_not_fit_the_shape_are_refused(type_name, shape, size_bytes):
    with pytest.raises(ModelError, match="cannot have"):
        StoredWeight.from_bytes(type_name, shape, torch.zeros(size_bytes, dtype=torch.uint8))


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(ModelError, match="Q4_K.*Q8_0"):
        StoredWeight.from_bytes("Q4_K", (1, 256), torch.zeros(144, dtype=torch.uint8))
