"""DeviceMemory: bytes of a device that a transfer engine reads and writes by their address."""

import numpy as np
import torch

_BLOCK_BYTES = 2 << 20
"""It begins and ends where a piece of this size does: engines register no less."""


class DeviceMemory:
    """Satisfies Memory of the transfer room. Zeros at first."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        whole = torch.zeros(self.size_bytes + _BLOCK_BYTES, dtype=torch.uint8, device=device)
        first = -whole.data_ptr() % _BLOCK_BYTES
        self._bytes = whole[first : first + self.size_bytes]
        self.address = self._bytes.data_ptr()

    def read(self, at: int, size_bytes: int) -> np.ndarray:
        # sync: whoever checks the bytes reads them in memory of the host
        return self._bytes[at : at + size_bytes].cpu().numpy()

    def write(self, at: int, payload: np.ndarray) -> None:
        given = torch.from_numpy(payload if payload.flags.writeable else payload.copy())
        # sync: an engine that is no part of the stream reads them next
        self._bytes[at : at + len(payload)].copy_(given)
