"""Memory of the host: arenas for weights, and copies to a device."""

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2 << 20


class Arena:
    """Memory for weights that is read front to back: cut from large pieces, so that the system can
    back it with huge pages. Never given back piece by piece.

    Args:
        chunk: bytes of such a piece, at least.
    """

    def __init__(self, chunk: int = 32 << 20) -> None:
        self._chunk = chunk
        self._free = np.empty(0, np.uint8)
        self.size_bytes = 0
        """Of all pieces."""

    def take(self, size: int) -> Tensor:
        """[size] uint8, zeros, 64-byte aligned."""
        if size > self._free.size:
            self._free = _huge(-(-max(size, self._chunk) // HUGE_PAGE) * HUGE_PAGE)
            self.size_bytes += self._free.size
        mine, self._free = self._free[:size], self._free[-(-size // 64) * 64 :]
        return torch.from_numpy(mine)


def _huge(size: int) -> np.ndarray:
    # Private: most systems have huge pages for private memory, few have them for shared.
    memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    return np.frombuffer(memory, np.uint8)[first : first + size]


_COPIES_ASIDE = "cuda"


def copy_to(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The same on the device, without waiting for what runs there where the driver copies such
    memory aside before it returns (CUDA driver API, "API synchronization behavior"): others may
    read it when it holds something else. On the host it is the same memory."""
    here = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return here.to(device, non_blocking=device.type == _COPIES_ASIDE)
