"""What the Triton kernels need; importable where Triton is not."""

from importlib.util import find_spec

import torch

from banyan.ops.bind import OpSpec

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def declines_device(spec: OpSpec) -> str | None:
    """Why no Triton kernel can serve, whatever its numbers; None when one can."""
    if spec.device.type != "cuda":
        return f"tensors are on {spec.device.type}"
    return "the package triton is not installed" if find_spec("triton") is None else None


def declines(spec: OpSpec) -> str | None:
    """The same for kernels of activations."""
    reason = declines_device(spec)
    if reason is not None:
        return reason
    return None if spec.dtype in TYPES else f"activations are {spec.dtype}"


def declines_pages(spec: OpSpec) -> str | None:
    """The same for kernels that read or write pages."""
    reason = declines(spec)
    if reason is None and spec.cache_dtype not in TYPES:
        return f"cannot read pages of {spec.cache_dtype}"
    if reason is None and spec.head_dim > 256:
        return f"heads of {spec.head_dim} dimensions, more than 256"
    return reason
