"""Integers that share a scale, and perhaps a zero point, along the inputs: the storage type that
holds them in the fewest bits without changing them.

4-bit groups become Q4_0 where they lie around zero and Q4_1 where they have zero points, 8-bit ones
Q8_0; both want groups of whole blocks of 32. Whatever fits none of them becomes bf16.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.models.weights.quant.base import Restored
from banyan.ops import blocks
from banyan.ops.blocks import BLOCK
from banyan.ops.stored import StoredWeight

_WORD = 32
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


def from_groups(numbers: Tensor, zero: Tensor | int, scale: Tensor, group: int) -> Restored:
    """The weight (numbers - zero) · scale.

    Args:
        numbers: [out, in] uint8 or int8.
        zero: [out, groups] whole numbers, or one for all.
        scale: [out, groups].
        group: inputs that share a scale; the last group may be shorter.
    """
    outputs, inputs = numbers.shape
    if scale.shape != (outputs, groups_of(inputs, group)):
        raise ModelError(
            f"scales of shape {list(scale.shape)}; {list(numbers.shape)} numbers in groups of "
            f"{group} need {[outputs, groups_of(inputs, group)]}"
        )
    numbers, scale = numbers.contiguous(), scale.float().contiguous()
    narrow = scale.half()
    lowest, highest = _range(numbers, zero, group)
    why = ""
    if inputs % BLOCK or (group % BLOCK and group < inputs):
        why = f"groups of {group} values are not whole blocks of {BLOCK}"
    elif not _is_near(narrow.float(), scale):
        why = "their scales are beyond fp16"
    elif lowest >= -8 and highest <= 7:
        return per_block("Q4_0", blocks.lay_q4_0, _less(numbers, zero, group) + 8, (narrow,), group)
    elif not isinstance(zero, int) and numbers.dtype == torch.uint8 and int(numbers.max()) < 16:
        minimum = (-zero.float() * scale).half()
        return per_block("Q4_1", blocks.lay_q4_1, numbers, (narrow, minimum), group)
    elif lowest >= -128 and highest <= 127:
        levels = _less(numbers, zero, group).view(torch.int8)
        return per_block("Q8_0", blocks.lay_q8_0, levels, (narrow,), group)
    else:
        why = "numbers of 8 bits have zero points"
    offset = zero if isinstance(zero, int) else _spread(zero, group, inputs)
    values = (numbers.short() - offset).float() * _spread(scale, group, inputs)
    return Restored(StoredWeight.from_tensor(values.bfloat16()), why)


def _range(numbers: Tensor, zero: Tensor | int, group: int) -> tuple[int, int]:
    """The lowest and highest of numbers - zero; numbers: [out, in]."""
    outputs, inputs = numbers.shape
    if isinstance(zero, int):
        return int(numbers.min()) - zero, int(numbers.max()) - zero
    whole = inputs // group * group
    pieces = [numbers[:, :whole].reshape(outputs, -1, group), numbers[:, whole:].unsqueeze(1)]
    pieces = [piece for piece in pieces if piece.numel()]
    low = torch.cat([piece.amin(-1) for piece in pieces], dim=1).short() - zero
    high = torch.cat([piece.amax(-1) for piece in pieces], dim=1).short() - zero
    return int(low.min()), int(high.max())


def _less(numbers: Tensor, zero: Tensor | int, group: int) -> Tensor:
    """numbers - zero in bytes that wrap around, [out, in] uint8."""
    octets = numbers.view(torch.uint8)
    if isinstance(zero, int):
        return octets - zero % 256
    return octets - _spread((zero % 256).byte(), group, octets.shape[1])


def by_index(numbers: Tensor, zero: Tensor | int, scale: Tensor, index: Tensor) -> Restored:
    """The weight (numbers - zero) · scale whose inputs belong to groups in any order.

    Args:
        index: [in] the group of each input.
    """
    if len(index) != numbers.shape[1] or int(index.min()) < 0 or int(index.max()) >= len(scale[0]):
        raise ModelError(
            f"g_idx puts {len(index)} inputs into groups {int(index.min())} to {int(index.max())}; "
            f"there are {numbers.shape[1]} inputs and {len(scale[0])} groups"
        )
    index = index.long()
    offset = zero if isinstance(zero, int) else zero[:, index]
    values = (numbers.short() - offset).float() * scale.float()[:, index]
    why = "their inputs are grouped in the order of activations (desc_act)"
    return Restored(StoredWeight.from_tensor(values.bfloat16()), why)


def _spread(per_group: Tensor, group: int, inputs: int) -> Tensor:
    """[out, groups] -> what broadcasts to [out, in]."""
    if per_group.shape[1] == 1:
        return per_group
    return per_group.contiguous().repeat_interleave(group, 1)[:, :inputs]


def _is_near(narrow: Tensor, scale: Tensor) -> bool:
    allowed = scale.abs() * _MAX_RELATIVE_ERROR + scale.abs().max() * _MAX_ERROR
    return bool(((narrow - scale).abs() <= allowed).all())


def per_block(
    type: str,
    lay: Callable[..., Tensor],
    levels: Tensor,
    factors: tuple[Tensor, ...],
    group: int,
) -> Restored:
    """A weight in blocks that `lay` makes of 32 levels and their factors.

    Args:
        levels: [out, in].
        factors: [out, groups] fp16 each.
    """
    outputs, inputs = levels.shape
    per_row = inputs // BLOCK
    each = [_spread(f, max(group // BLOCK, 1), per_row).expand(-1, per_row) for f in factors]
    raw = lay(levels.reshape(-1, BLOCK), *(f.reshape(-1, 1) for f in each))
    return Restored(StoredWeight(type, (outputs, inputs), raw.view(outputs, -1)))
