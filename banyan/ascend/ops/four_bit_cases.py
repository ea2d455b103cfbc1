"""Cases of products of 8-bit rows by 4-bit weights, as `cases.py` has them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from banyan.ascend.ops.case import Case, Place
from banyan.ascend.ops.four_bit_contracts import GROUP
from banyan.ascend.ops.four_bits import Packed
from banyan.ascend.ops.operators import Operators
from banyan.ops.four_bits import BLOCK, FOUR_BITS, FourBits
from banyan.ops.stored import StoredWeight

_ROWS, _INPUTS, _OUTPUTS = 5, 512, 48
_SLACK = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


def four_bit_cases() -> Iterator[Case]:
    for dtype in _SLACK:
        yield _single(dtype)
        yield _grouped(dtype)


def weight(seed: int) -> StoredWeight:
    """Counted in a unit of each 256 inputs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (_OUTPUTS, _INPUTS)
    numbers = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    scale = (1 + torch.rand(_OUTPUTS, _INPUTS // GROUP, generator=generator)) / 256
    raw = FourBits(numbers, scale.repeat_interleave(GROUP // BLOCK, 1)).raw
    return StoredWeight(FOUR_BITS, shape, raw)


def rows() -> tuple[Tensor, Tensor]:
    """int8 numbers, and the unit of each row."""
    generator = torch.Generator().manual_seed(11)
    shape = (_ROWS, _INPUTS)
    numbers = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return numbers, (1 + torch.rand(_ROWS, generator=generator)) / 256


def _single(dtype: torch.dtype) -> Case:
    def run(operators: Operators, place: Place) -> list[Tensor]:
        (numbers, units), found = rows(), Packed.of(weight(1))
        given = (place(found.columns), place(found.scale), place(units.unsqueeze(1)))
        return [operators.four_bits.matmul(place(numbers), *given, place(found.lift), dtype)]

    def wanted() -> list[Tensor]:
        numbers, units = rows()
        return [(numbers.float() @ weight(1).dense.t()) * units.unsqueeze(1)]

    kind = f"of 4 bits, {str(dtype).removeprefix('torch.')}"
    return Case("npu_quant_matmul", kind, run, wanted, _SLACK[dtype])


def _grouped(dtype: torch.dtype) -> Case:
    counts = torch.tensor([2, 3])

    def run(operators: Operators, place: Place) -> list[Tensor]:
        (numbers, units), many = rows(), [Packed.of(weight(seed)) for seed in (1, 2)]
        columns, scale, lift = (
            place(torch.stack(parts))
            for parts in zip(*((p.columns, p.scale, p.lift) for p in many), strict=True)
        )
        given = (place(numbers), columns, place(counts), scale, place(units), lift, dtype)
        return [operators.four_bits.grouped_matmul(*given)]

    def wanted() -> list[Tensor]:
        numbers, units = rows()
        first, second = (weight(seed).dense.t() for seed in (1, 2))
        each = torch.cat([numbers[:2].float() @ first, numbers[2:].float() @ second])
        return [each * units.unsqueeze(1)]

    kind = f"of 4 bits, {str(dtype).removeprefix('torch.')}"
    return Case("npu_grouped_matmul", kind, run, wanted, _SLACK[dtype])
