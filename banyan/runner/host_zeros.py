"""Zeros in memory of the host that take no memory before something is written there.

torch writes the zeros it makes. Knows neither pages nor slots.
"""

import math
import mmap

import numpy as np
import torch
from torch import Tensor


def private_zeros(size_bytes: int) -> mmap.mmap:
    """Of this process. Not in huge pages: the first token of a layer would take one of 2 MiB."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def viewed(memory: mmap.mmap, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """All of `memory`, which stays as long as the tensor."""
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch makes them; those of another device take its memory at once."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    return viewed(private_zeros(size_bytes), shape, dtype)
