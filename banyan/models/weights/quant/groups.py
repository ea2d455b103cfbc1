"""Integers that share a scale, and perhaps a zero point, along the inputs: the storage type that
holds them in the fewest bits without changing them.

4-bit groups become Q4_0 where they lie around zero and Q4_1 where they have zero points, 8-bit ones
Q8_0; both want groups of whole blocks of 32. Whatever fits none of them becomes bf16.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.models.weights.quant.base import Restored
from banyan.ops import blocks
from banyan.ops.blocks import BLOCK
from banyan.ops.stored import STORAGE_TYPES, StoredWeight, room_for

_WORD = 32
_STRIP = 64
"""Outputs that are unpacked at once."""
_MAX_RELATIVE_ERROR = 2.0**-10
_MAX_ERROR = 2.0**-14
"""Of a scale in fp16, as a share of itself, and of the largest one of the weight."""


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """[rows, words] int32, values from the lowest bits up -> [rows, 32 · words / bits] uint8.

    Values may go on from one word to the next.
    """
    octets = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((octets.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)
    count = words.shape[1] * _WORD // bits
    single = ((octets.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)
    worth = 1 << torch.arange(bits, dtype=torch.uint8)
    whole = single[:, : count * bits].reshape(len(words), count, bits)
    return (whole * worth).sum(-1, dtype=torch.uint8)


def groups_of(inputs: int, group: int) -> int:
    return -(-inputs // group)


@dataclass(frozen=True)
class Numbers:
    """Numbers [out, in] that are unpacked a few outputs at a time, so that few lie in memory.

    Attributes:
        bits: of each.
        rows: some outputs, from a multiple of 8 on -> [rows, in] uint8 or int8.
    """

    outputs: int
    inputs: int
    bits: int
    rows: Callable[[slice], Tensor]

    @staticmethod
    def of(numbers: "Tensor | Numbers") -> "Numbers":
        if isinstance(numbers, Numbers):
            return numbers
        outputs, inputs = numbers.shape
        return Numbers(outputs, inputs, 8, lambda rows: numbers[rows].contiguous())

    def strips(self) -> Iterator[slice]:
        for first in range(0, self.outputs, _STRIP):
            yield slice(first, min(first + _STRIP, self.outputs))

    def floats(self, make: Callable[[slice, Tensor], Tensor]) -> StoredWeight:
        """A weight in bf16 of what is made of some outputs at a time."""
        found = room_for((self.outputs, self.inputs), torch.bfloat16)
        for rows in self.strips():
            found[rows] = make(rows, self.rows(rows))
        return StoredWeight.from_tensor(found)


def from_groups(
    numbers: Tensor | Numbers, zero: Tensor | int, scale: Tensor, group: int
) -> Restored:
    """The weight (numbers - zero) · scale.

    Args:
        numbers: [out, in] uint8 or int8.
        zero: [out, groups] whole numbers, or one for all.
        scale: [out, groups].
        group: inputs that share a scale; the last group may be shorter.
    """
    many = Numbers.of(numbers)
    outputs, inputs = many.outputs, many.inputs
    if scale.shape != (outputs, groups_of(inputs, group)):
        raise ModelError(
            f"scales of shape {list(scale.shape)}; {[outputs, inputs]} numbers in groups of "
            f"{group} need {[outputs, groups_of(inputs, group)]}"
        )
    scale = scale.float().contiguous()
    half = scale.half()
    span = _span(many, zero, group)
    why = ""
    if inputs % BLOCK or (group % BLOCK and group < inputs):
        why = f"groups of {group} values are not whole blocks of {BLOCK}"
    elif not _is_near(half.float(), scale):
        why = "their scales are beyond fp16"
    elif span.lowest >= -8 and span.highest <= 7:
        return _in_blocks("Q4_0", blocks.lay_q4_0, many, zero, (half,), group, 8)
    elif not isinstance(zero, int) and 0 <= span.most < 16:
        minimum = (-zero.float() * scale).half()
        return _in_blocks("Q4_1", blocks.lay_q4_1, many, 0, (half, minimum), group)
    elif span.lowest >= -128 and span.highest <= 127:
        return _in_blocks("Q8_0", blocks.lay_q8_0, many, zero, (half,), group)
    else:
        why = "numbers of 8 bits have zero points"

    def make(rows: slice, some: Tensor) -> Tensor:
        offset = zero if isinstance(zero, int) else _spread(zero[rows], group, inputs)
        return (some.short() - offset).float() * _spread(scale[rows], group, inputs)

    return Restored(many.floats(make), why)


@dataclass(frozen=True)
class _Span:
    """The lowest and highest of numbers - zero, and the largest number as it is stored; −1 where
    numbers have signs."""

    lowest: int
    highest: int
    most: int


def _span(numbers: Numbers, zero: Tensor | int, group: int) -> _Span:
    if isinstance(zero, int) and numbers.bits <= 4:
        most = (1 << numbers.bits) - 1
        return _Span(-zero, most - zero, most)
    found = [
        _span_of(numbers.rows(rows), zero if isinstance(zero, int) else zero[rows], group)
        for rows in numbers.strips()
    ]
    return _Span(
        min(span.lowest for span in found),
        max(span.highest for span in found),
        max(span.most for span in found),
    )


def _span_of(numbers: Tensor, zero: Tensor | int, group: int) -> _Span:
    """numbers: [rows, in]."""
    most = int(numbers.max()) if numbers.dtype == torch.uint8 else -1
    if isinstance(zero, int):
        return _Span(int(numbers.min()) - zero, int(numbers.max()) - zero, most)
    rows, inputs = numbers.shape
    whole = inputs // group * group
    pieces = [numbers[:, :whole].reshape(rows, -1, group), numbers[:, whole:].unsqueeze(1)]
    pieces = [piece for piece in pieces if piece.numel()]
    low = torch.cat([piece.amin(-1) for piece in pieces], dim=1).short() - zero
    high = torch.cat([piece.amax(-1) for piece in pieces], dim=1).short() - zero
    return _Span(int(low.min()), int(high.max()), most)


def _in_blocks(
    type: str,
    lay: Callable[..., Tensor],
    numbers: Numbers,
    zero: Tensor | int,
    factors: tuple[Tensor, ...],
    group: int,
    more: int = 0,
) -> Restored:
    """Blocks of numbers - zero + more, in bytes that wrap around."""
    unit = STORAGE_TYPES[type]
    row_bytes = numbers.inputs // unit.values * unit.size_bytes
    raw = room_for((numbers.outputs, row_bytes))
    for rows in numbers.strips():
        mine = zero if isinstance(zero, int) else zero[rows]
        levels = _less(numbers.rows(rows), mine, group) + more
        levels = levels.view(torch.int8) if type == "Q8_0" else levels
        each = tuple(factor[rows] for factor in factors)
        raw[rows] = per_block(type, lay, levels, each, group).weight.raw
    return Restored(StoredWeight(type, (numbers.outputs, numbers.inputs), raw))


def _less(numbers: Tensor, zero: Tensor | int, group: int) -> Tensor:
    """numbers - zero in bytes that wrap around, [out, in] uint8."""
    octets = numbers.view(torch.uint8)
    if isinstance(zero, int):
        return octets - zero % 256
    return octets - _spread((zero % 256).byte(), group, octets.shape[1])


def by_index(
    numbers: Tensor | Numbers, zero: Tensor | int, scale: Tensor, index: Tensor
) -> Restored:
    """The weight (numbers - zero) · scale whose inputs belong to groups in any order.

    Args:
        index: [in] the group of each input.
    """
    many = Numbers.of(numbers)
    if len(index) != many.inputs or int(index.min()) < 0 or int(index.max()) >= len(scale[0]):
        raise ModelError(
            f"g_idx puts {len(index)} inputs into groups {int(index.min())} to {int(index.max())}; "
            f"there are {many.inputs} inputs and {len(scale[0])} groups"
        )
    index = index.long()

    def make(rows: slice, some: Tensor) -> Tensor:
        offset = zero if isinstance(zero, int) else zero[rows][:, index]
        return (some.short() - offset).float() * scale[rows].float()[:, index]

    why = "their inputs are grouped in the order of activations (desc_act)"
    return Restored(many.floats(make), why)


def _spread(per_group: Tensor, group: int, inputs: int) -> Tensor:
    """[out, groups] -> what broadcasts to [out, in]."""
    if per_group.shape[1] == 1:
        return per_group
    return per_group.contiguous().repeat_interleave(group, 1)[:, :inputs]


def _is_near(rounded: Tensor, scale: Tensor) -> bool:
    allowed = scale.abs() * _MAX_RELATIVE_ERROR + scale.abs().max() * _MAX_ERROR
    return bool(((rounded - scale).abs() <= allowed).all())


def per_block(
    type: str,
    lay: Callable[..., Tensor],
    levels: Tensor,
    factors: tuple[Tensor, ...],
    group: int,
) -> Restored:
    """A weight in blocks; `lay` builds one from 32 levels and their factors.

    Args:
        levels: [out, in].
        factors: [out, groups] fp16 each.
    """
    outputs, inputs = levels.shape
    per_row = inputs // BLOCK
    each = [_spread(f, max(group // BLOCK, 1), per_row).expand(-1, per_row) for f in factors]
    raw = lay(levels.reshape(-1, BLOCK), *(f.reshape(-1, 1) for f in each))
    return Restored(StoredWeight(type, (outputs, inputs), raw.view(outputs, -1)))
