"""From memory of the host to a device."""

import numpy as np
import torch
from torch import Tensor

_COPIES_ASIDE = "cuda"


def sent(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The same on the device, without waiting for what runs there where the driver copies such
    memory aside before it returns (CUDA driver API, "API synchronization behavior"): others may
    read it when it holds something else. On the host it is the same memory."""
    here = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return here.to(device, non_blocking=device.type == _COPIES_ASIDE)
