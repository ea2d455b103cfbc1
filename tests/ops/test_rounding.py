"""Rounding to blocks: what is laid is what the format's own tool reads, and near to the values."""

import gguf
import pytest
import torch

from banyan.ops import rounding
from banyan.ops.rounding import TO_BLOCKS, to_blocks, to_fp8, to_fp8_blocks, to_integers
from banyan.ops.stored import StoredWeight

LOST = {"Q8_0": 0.006, "Q6_K": 0.02, "Q5_K": 0.04, "Q5_1": 0.04, "Q5_0": 0.05, "Q4_K": 0.08}
LOST |= {"Q4_1": 0.08, "Q4_0": 0.1}
"""Root of the mean squared error, as a share of that of the values."""


def values(rows: int = 6, inputs: int = 512) -> torch.Tensor:
    drawn = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(5)) * 0.03
    drawn[1] = 0.0
    drawn[2] *= 1e-6  # scales that fp16 hardly holds
    drawn[3] = drawn[3].abs()
    drawn[4, :32] *= 40
    return drawn


@pytest.mark.parametrize("type", TO_BLOCKS)
def test_blocks_are_those_that_the_tool_of_the_format_reads(type: str) -> None:
    meant = values()

    raw = to_blocks(meant, type)

    theirs = torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[type]))
    ours = StoredWeight.from_bytes(type, tuple(meant.shape), raw.flatten()).dense
    assert torch.equal(ours, theirs.view(meant.shape))
    for row in (0, 3, 4, 5):
        lost = (ours[row] - meant[row]).square().mean().sqrt() / meant[row].square().mean().sqrt()
        assert lost < LOST[type], row
    assert not ours[1].any() and (ours[2] - meant[2]).abs().max() < 1e-6


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_nothing_is_lost_next_to_the_tool_of_the_format(type: str) -> None:
    meant = values()[[0, 3, 4, 5]]
    kind = gguf.GGMLQuantizationType[type]

    ours = StoredWeight.from_bytes(type, tuple(meant.shape), to_blocks(meant, type).flatten()).dense

    theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(meant.numpy(), kind), kind))
    assert (ours - meant).square().sum() <= (theirs - meant).square().sum() * 1.001


def test_what_a_type_holds_exactly_stays() -> None:
    """Rounding twice is rounding once: the second time nothing is lost."""
    for type in ("Q8_0", "Q4_0", "Q5_0", "Q4_1", "Q5_1"):
        size, once = (6, 512), to_blocks(values(), type)
        dense = StoredWeight.from_bytes(type, size, once.flatten()).dense
        again = StoredWeight.from_bytes(type, size, to_blocks(dense, type).flatten()).dense
        assert (again - dense).abs().max() <= dense.abs().max() * 2**-10, type


@pytest.mark.parametrize(("bits", "group", "lost"), [(8, 512, 0.02), (4, 128, 0.13), (4, 32, 0.1)])
def test_integers_share_scales_of_the_models_number_type(bits, group, lost) -> None:
    meant = values()
    levels, scale = to_integers(meant, bits, group, torch.bfloat16)
    half = 1 << (bits - 1)
    assert levels.dtype == torch.int8 and -half <= levels.min() and levels.max() <= half - 1
    assert scale.shape == (6, 512 // group) and torch.equal(scale.bfloat16().float(), scale)
    dense = levels.float() * scale.repeat_interleave(group, 1)
    for row in (0, 3, 5):
        error = (dense[row] - meant[row]).square().mean().sqrt()
        assert error / meant[row].square().mean().sqrt() < lost
    assert not dense[1].any()


def test_floats_of_eight_bits_share_a_scale_by_row_or_by_block() -> None:
    meant = values(300, 200)
    numbers, scale = to_fp8(meant, torch.float32)
    assert numbers.dtype == torch.float8_e4m3fn and scale.shape == (300, 1)
    dense = numbers.float() * scale
    assert (dense[0] - meant[0]).abs().max() <= meant[0].abs().max() * 2**-4
    numbers, scale = to_fp8_blocks(meant, 128, torch.float32)
    assert scale.shape == (3, 2)
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    assert (numbers.float() * spread - meant)[0].abs().max() <= meant.abs().max() * 2**-4
    assert not numbers.float().isnan().any()
    assert torch.finfo(torch.float8_e4m3fn).max == rounding.FP8_MOST
