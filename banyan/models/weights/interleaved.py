"""Stacks of experts as gpt-oss keeps them: gate and up take turns along the outputs.

    …experts.gate_up_proj [experts, dim, 2 · inner], …gate_up_proj_bias [experts, 2 · inner]
    …experts.down_proj [experts, inner, dim], …down_proj_bias [experts, dim]

In a quantised form the weights come with their outputs first, as "….weight". What comes out are
tensors of gate, up and down with outputs first, "….weight" and "….bias".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.models.weights.quant.base import Stored
from banyan.ops.stored import RawTensor, StoredWeight

_STEM, _PAIR, _DOWN = ".mlp.experts.", "gate_up_proj", "down_proj"
_PARTS = ("gate_proj", "up_proj")


def with_plain_experts(tensors: Iterator[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    """
    Raises:
        ModelError: a stack that has not the dimensions of one.
    """
    for name, tensor in tensors:
        block, stem, last = name.rpartition(_STEM)
        kind = last.removesuffix("_bias").removesuffix(".weight")
        if not stem or kind not in (_PAIR, _DOWN) or isinstance(tensor, RawTensor):
            yield name, tensor
            continue
        is_bias = last.endswith("_bias")
        dims, pairs = len(tensor.shape), tensor.shape[-1 if is_bias or last == kind else 1]
        if dims != (2 if is_bias else 3) or (kind == _PAIR and pairs % 2):
            raise ModelError(
                f"tensor {printable(name)!r} has shape {list(tensor.shape)}, not "
                + ("[experts, outputs]" if is_bias else "[experts, inputs, outputs]"),
                hint="the file is damaged, or of another model",
            )
        slot = "bias" if is_bias else "weight"
        whole = _transposed(tensor) if last == kind else tensor
        if kind == _DOWN:
            yield f"{block}{stem}{_DOWN}.{slot}", whole
            continue
        for first, part in enumerate(_PARTS):
            yield f"{block}{stem}{part}.{slot}", _every_other(whole, first)


def _transposed(tensor: StoredWeight) -> StoredWeight:
    """[experts, in, out] floats -> [experts, out, in]"""
    return StoredWeight.from_tensor(tensor.dense.transpose(1, 2))


def _every_other(tensor: StoredWeight, first: int) -> StoredWeight:
    """Half of the outputs, dimension 1; of blocks, a view of the same bytes."""
    if len(tensor.shape) == 2:
        return StoredWeight.from_tensor(tensor.dense[:, first::2])
    shape = (tensor.shape[0], tensor.shape[1] // 2, tensor.shape[2])
    return StoredWeight(tensor.type, shape, tensor.raw[:, first::2])


@dataclass(frozen=True)
class Half:
    """Of a stack: the gates, the ups, or the whole of one that does not take turns.

    Attributes:
        name: of the tensor with outputs first that `with_plain_experts` makes of it.
        first, step: outputs that are taken.
        is_turned: outputs come last in the file.
    """

    name: str
    first: int
    step: int
    is_turned: bool

    def take(self, expert: StoredWeight) -> StoredWeight:
        """What it is of one expert: [in, out] or [out] floats -> [out, in] or [out]."""
        values = expert.dense[..., self.first :: self.step]
        return StoredWeight.from_tensor(values.T if self.is_turned else values)


def halves_of(name: str, dims: int) -> list[Half]:
    """Of a stack of floats in a checkpoint; none when the tensor is none."""
    block, stem, last = name.rpartition(_STEM)
    kind = last.removesuffix("_bias")
    if not stem or kind not in (_PAIR, _DOWN) or dims != (2 if last != kind else 3):
        return []
    slot = "bias" if last != kind else "weight"
    parts = _PARTS if kind == _PAIR else (_DOWN,)
    return [
        Half(f"{block}{stem}{part}.{slot}", first, len(parts), dims == 3)
        for first, part in enumerate(parts)
    ]


@dataclass(frozen=True)
class Stack:
    """A tensor of such a checkpoint, and what it is made of.

    Attributes:
        parts: names of stacks with outputs first that take turns in it; or of the one that it is.
        is_turned: outputs come last.
    """

    name: str
    parts: tuple[str, ...]
    is_turned: bool

    def shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """From the shape of a part."""
        outputs = part[1] * len(self.parts)
        return (part[0], part[2], outputs) if self.is_turned else (part[0], outputs)

    def join(self, parts: Sequence[StoredWeight]) -> StoredWeight:
        """[experts, outputs, inputs] or [experts, outputs] each -> `shape`, fp32."""
        whole = torch.stack([part.dense.float() for part in parts], dim=2).flatten(1, 2)
        return StoredWeight.from_tensor(whole.transpose(1, 2) if self.is_turned else whole)


def stack_between(name: str, dims: int) -> Stack | None:
    """The tensor that a stack with outputs first is a part of; None for what is no such stack."""
    block, stem, last = name.rpartition(_STEM)
    part, _, slot = last.rpartition(".")
    known = {_DOWN: (_DOWN, (_DOWN,)), **dict.fromkeys(_PARTS, (_PAIR, _PARTS))}
    if not stem or part not in known or dims != (3 if slot == "weight" else 2):
        return None
    whole, parts = known[part]
    called = f"{block}{stem}{whole}" + ("" if slot == "weight" else "_bias")
    return Stack(called, tuple(f"{block}{stem}{each}.{slot}" for each in parts), slot == "weight")
