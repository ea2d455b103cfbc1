"""AWQ (arXiv 2306.00978): 4 bits with zero points in groups of inputs, in AutoAWQ's "gemm" layout.

    qweight int32 [in, out/8], scales [groups, out], qzeros int32 [groups, out/8]

The eight values of a word are outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.model_config.checkpoint_fields import CheckpointFields
from banyan.models.weights.quant.base import FLOATS, Parts, Restored, numbers_of, part_among
from banyan.models.weights.quant.gptq import MAX_GROUP
from banyan.models.weights.quant.groups import Numbers, from_groups, groups_of, unpack_words

_PARTS = ("qweight", "qzeros", "scales")
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output within a word -> its place from the lowest bits up."""


@dataclass(frozen=True)
class Awq:
    """
    Attributes:
        group: inputs that share a scale; -1 = all of them.
    """

    group: int
    remark: str = ""

    def part_of(self, name: str, type: str) -> tuple[str, str] | None:
        return part_among(_PARTS, name)

    def restore(self, stem: str, parts: Parts) -> Restored:
        words = numbers_of(parts, "qweight", ("I32",), (None, None))
        inputs, outputs = words.shape[0], words.shape[1] * 8
        group = inputs if self.group == -1 else self.group
        groups = groups_of(inputs, group)
        scale = numbers_of(parts, "scales", FLOATS, (groups, outputs))
        zero = numbers_of(parts, "qzeros", ("I32",), (groups, outputs // 8))
        numbers = Numbers(outputs, inputs, 4, lambda rows: _outputs(words, rows))
        return from_groups(numbers, _values(zero).T.short(), scale.T, group)


def _outputs(words: Tensor, rows: slice) -> Tensor:
    """Some outputs, from a multiple of 8 on, [rows, in] uint8."""
    return _values(words[:, rows.start // 8 : -(-rows.stop // 8)]).T.contiguous()


def _values(words: Tensor) -> Tensor:
    """[rows, out/8] int32 -> [rows, out] uint8."""
    values = unpack_words(words, 4).view(len(words), -1, 8)
    return values[..., torch.tensor(_PLACES)].flatten(1)


def open_awq(facts: CheckpointFields) -> Awq:
    bits = facts.integer("bits" if facts.has("bits") else "w_bit", 1, 32)
    if bits != 4:
        raise facts.error("bits", bits, "4")
    version = facts.text("version", default="gemm")
    if version.lower() != "gemm":
        raise facts.error("version", version, "gemm: other layouts are not read")
    if not facts.flag("zero_point", default=True):
        raise facts.error("zero_point", False, "true")
    key = "group_size" if facts.has("group_size") else "q_group_size"
    group = facts.integer(key, -1, MAX_GROUP)
    if group == 0:
        raise facts.error(key, group, "-1 or positive")
    return Awq(group)
