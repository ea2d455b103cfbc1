"""Weights as a checkpoint stores them: plain floats or blocks of quantised values, row by row.

A block is 32 or 256 values along the input dimension (`blocks.py`), so rows can be cut and
reordered without unpacking.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from banyan.base.errors import ModelError
from banyan.ops import activation_quant, blocks, grids
from banyan.ops.blocks import BLOCK, SUPER_BLOCK


@dataclass(frozen=True)
class StorageType:
    """How one type lies in memory.

    Attributes:
        values: values per unit, 1 for floats.
        size_bytes: bytes per unit.
        unpack: [units, size_bytes] uint8 -> [units, values] float.
    """

    values: int
    size_bytes: int
    unpack: Callable[[Tensor], Tensor]

    @property
    def is_float(self) -> bool:
        return self.values == 1


def _float(dtype: torch.dtype) -> StorageType:
    return StorageType(1, dtype.itemsize, lambda units: units.clone().view(dtype))


E4M3 = "E4M3"
"""8-bit floats: 32 values of an output, followed by their fp32 scale; no value is NaN."""
E4M3_DYNAMIC = "E4M3_DYNAMIC"
"""The same; the checkpoint asks for activations that are rounded to 8-bit floats as well."""
NVFP4 = "NVFP4"
"""4-bit floats: 16 values of an output, their e4m3 scale and the fp32 factor of all scales."""
STORAGE_TYPES = {
    "F32": _float(torch.float32),
    "F16": _float(torch.float16),
    "BF16": _float(torch.bfloat16),
    "Q4_0": StorageType(BLOCK, 18, blocks.q4_0),
    "Q4_1": StorageType(BLOCK, 20, blocks.q4_1),
    "Q5_0": StorageType(BLOCK, 22, blocks.q5_0),
    "Q5_1": StorageType(BLOCK, 24, blocks.q5_1),
    "Q8_0": StorageType(BLOCK, 34, blocks.q8_0),
    "Q2_K": StorageType(SUPER_BLOCK, 84, blocks.q2_k),
    "Q3_K": StorageType(SUPER_BLOCK, 110, blocks.q3_k),
    "Q4_K": StorageType(SUPER_BLOCK, 144, blocks.q4_k),
    "Q5_K": StorageType(SUPER_BLOCK, 176, blocks.q5_k),
    "Q6_K": StorageType(SUPER_BLOCK, 210, blocks.q6_k),
    "IQ4_NL": StorageType(BLOCK, 18, blocks.iq4_nl),
    "MXFP4": StorageType(BLOCK, 17, blocks.mxfp4),
    NVFP4: StorageType(blocks.NV_GROUP, blocks.NV_GROUP // 2 + 5, blocks.nvfp4),
    "IQ4_XS": StorageType(SUPER_BLOCK, 136, grids.iq4_xs),
    "IQ3_XXS": StorageType(SUPER_BLOCK, 98, grids.iq3_xxs),
    "IQ3_S": StorageType(SUPER_BLOCK, 110, grids.iq3_s),
    "IQ2_XXS": StorageType(SUPER_BLOCK, 66, grids.iq2_xxs),
    "IQ2_XS": StorageType(SUPER_BLOCK, 74, grids.iq2_xs),
    "IQ2_S": StorageType(SUPER_BLOCK, 82, grids.iq2_s),
    "IQ1_S": StorageType(SUPER_BLOCK, 50, grids.iq1_s),
    "IQ1_M": StorageType(SUPER_BLOCK, 56, grids.iq1_m),
    "TQ1_0": StorageType(SUPER_BLOCK, 54, grids.tq1_0),
    "TQ2_0": StorageType(SUPER_BLOCK, 66, grids.tq2_0),
    E4M3: StorageType(BLOCK, BLOCK + 4, blocks.e4m3),
    E4M3_DYNAMIC: StorageType(BLOCK, BLOCK + 4, blocks.e4m3),
    **{
        name: StorageType(BLOCK, size, activation_quant.unpack)
        for name, size in activation_quant.SIZES.items()
    },
    activation_quant.FOUR_BITS: StorageType(
        BLOCK, activation_quant.FOUR_BIT_SIZE, activation_quant.unpack_four_bits
    ),
}


RAW_TYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""What a checkpoint may hold besides weights: the parts of formats that only say together what a
weight is (`models/weights/quant`)."""
FLOAT8_TYPES = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class RawTensor:
    """A tensor of a checkpoint that is no weight by itself.

    Attributes:
        type: a name of RAW_TYPES.
        raw: its bytes, [size] uint8; may alias a read-only file.
    """

    type: str
    shape: tuple[int, ...]
    raw: Tensor

    @property
    def values(self) -> Tensor:
        """The numbers, in `shape`."""
        return self.raw.clone().view(RAW_TYPES[self.type]).view(self.shape)


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of a checkpoint, or a cut of it.

    Attributes:
        type: a name of STORAGE_TYPES.
        shape: logical shape, outermost first.
        raw: [*shape[:-1], bytes of the last dimension] uint8; may alias a read-only file.
    """

    type: str
    shape: tuple[int, ...]
    raw: Tensor

    @staticmethod
    def from_bytes(type: str, shape: tuple[int, ...], raw: Tensor) -> "StoredWeight":
        """Wrap flat uint8 bytes; ModelError when type, shape and size do not fit together."""
        if type not in STORAGE_TYPES:
            raise ModelError(
                f"weights of type {type} cannot be read",
                hint=f"convert the model to one of: {', '.join(STORAGE_TYPES)}",
            )
        storage = STORAGE_TYPES[type]
        last = shape[-1] if shape else 1
        row_bytes, rest = last // storage.values * storage.size_bytes, last % storage.values
        rows = 1
        for size in shape[:-1]:
            rows *= size
        if rest or rows * row_bytes != raw.numel():
            raise ModelError(
                f"a {type} tensor of shape {list(shape)} cannot have {raw.numel()} bytes"
            )
        return StoredWeight(type, shape, raw.view(*shape[:-1], row_bytes))

    @staticmethod
    def from_tensor(tensor: Tensor) -> "StoredWeight":
        """A float tensor as a stored weight (shares memory)."""
        names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        return StoredWeight(
            names[tensor.dtype], tuple(tensor.shape), tensor.contiguous().view(torch.uint8)
        )

    def cut(self, dim: int, start: int, stop: int) -> "StoredWeight":
        """The part [start, stop) along `dim`; unpacks when the cut would go through a block."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        if dim < len(self.shape) - 1:
            return StoredWeight(self.type, shape, self.raw.narrow(dim, start, stop - start))
        storage = STORAGE_TYPES[self.type]
        if start % storage.values or stop % storage.values:
            return StoredWeight.from_tensor(self.dense.narrow(dim, start, stop - start))
        first, last = (n // storage.values * storage.size_bytes for n in (start, stop))
        return StoredWeight(self.type, shape, self.raw[..., first:last])

    def at(self, index: int) -> "StoredWeight":
        """The weight at one index of the first dimension, without that dimension."""
        return StoredWeight(self.type, self.shape[1:], self.raw[index])

    def rows(self, ids: Tensor) -> "StoredWeight":
        """The rows `ids` [n] int64 of the first dimension, in this order."""
        return StoredWeight(self.type, (len(ids), *self.shape[1:]), self.raw[ids])

    @property
    def as_row(self) -> "StoredWeight":
        """A vector as a matrix of one row."""
        return StoredWeight(self.type, (1, *self.shape), self.raw.unsqueeze(0))

    def pair_halves(self, head_dim: int, first: int, count: int) -> "StoredWeight":
        """Reorder rows first … first + count − 1 of each head from interleaved pairs to halves: the
        pair (2i, 2i + 1) becomes (i, i + count/2).
        """
        raw = self._rows()
        row_bytes = raw.shape[-1]
        heads = raw.reshape(-1, head_dim, row_bytes)
        before, turned, rest = heads.split([first, count, head_dim - first - count], dim=1)
        pairs = turned.reshape(-1, count // 2, 2, row_bytes).transpose(1, 2)
        halves = torch.cat([before, pairs.reshape(-1, count, row_bytes), rest], dim=1)
        return StoredWeight(self.type, self.shape, halves.reshape(self.raw.shape))

    def _rows(self) -> Tensor:
        """The bytes, one row per index of the first dimension."""
        num_rows = self.shape[0]
        return self.raw.view(num_rows, -1) if len(self.shape) == 1 else self.raw

    def by_piece(self, pieces: tuple[int, ...]) -> "StoredWeight":
        """Rows of heads, each made of `pieces`, so that the first pieces of all heads come first,
        then the second ones, and so on."""
        rows = torch.arange(self.shape[0]).view(-1, sum(pieces))
        order = torch.cat([piece.flatten() for piece in rows.split(list(pieces), dim=1)])
        raw = self._rows()
        return StoredWeight(self.type, self.shape, raw[order].view(self.raw.shape))

    @property
    def values(self) -> Tensor:
        return self.dense

    @cached_property
    def dense(self) -> Tensor:
        """The values as a float tensor of `shape`; blocks become fp32, floats keep their dtype.

        Kept while this object lives, so that two users (tied embeddings) share one tensor.
        """
        storage = STORAGE_TYPES[self.type]
        units = self.raw.reshape(-1, storage.size_bytes)
        return storage.unpack(units).reshape(self.shape)


def room_for(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
    """Memory of the host for a weight, with anything in it. torch's own is aligned so that a freed
    piece never fits the next of its size: a load would leave a hole for every weight it makes."""
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(*shape)


def stack(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Lay weights over one another along the output dimension; mixed types become fp32."""
    if len(weights) == 1:
        return weights[0]
    shape = (sum(w.shape[0] for w in weights), *weights[0].shape[1:])
    if all(w.type == weights[0].type for w in weights):
        raws = [w.raw.reshape(w.shape[0], -1) for w in weights]
        room = room_for((shape[0], raws[0].shape[1])) if raws[0].is_cpu else None
        raw = torch.cat(raws, out=room)
        return StoredWeight(weights[0].type, shape, raw if len(shape) > 1 else raw.view(-1))
    return StoredWeight.from_tensor(torch.cat([w.dense.float() for w in weights]))
