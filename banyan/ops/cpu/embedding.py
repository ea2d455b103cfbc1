"""Compiled embedding lookup: rows are unpacked one by one from the checkpoint's blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cpu.library import Library
from banyan.ops.cpu.linear import supports
from banyan.ops.cpu.weights import SOURCES
from banyan.ops.stored import StoredWeight


class StoredEmbedding:
    """Rows first … last − 1 of a table [ids, dim], kept in its stored type."""

    def __init__(
        self, library: Library, weight: StoredWeight, first: int, last: int, scale: float
    ) -> None:
        raw = weight.raw[first:last]
        self._raw = raw if raw.stride(1) == 1 else raw.contiguous()
        self._library = library
        self._source = SOURCES.index(weight.type)
        self._dim = weight.shape[1]
        self._first = first
        self._scale = scale

    def __call__(self, tokens: Tensor) -> Tensor:
        assert tokens.dtype == torch.int64 and tokens.is_contiguous()
        out = self._library.empty((tokens.shape[0], self._dim))
        self._library.call(
            "bn_embedding_rows",
            tokens.shape[0],
            tokens.data_ptr(),
            self._source,
            self._raw.data_ptr(),
            self._raw.stride(0),
            self._raw.shape[0],
            self._dim,
            self._first,
            self._scale,
            out.data_ptr(),
            self._dim,
        )
        return out


def _make(library: Library) -> Callable[..., object]:
    def packer(
        weight: StoredWeight,
        dtype: torch.dtype,
        device: torch.device,
        first: int,
        last: int,
        scale: float = 1.0,
    ) -> StoredEmbedding:
        return StoredEmbedding(library, weight, first, last, scale)

    return packer


stored = Kernel(supports=supports, make=_make)
