"""Requirements of the Triton kernels; importable without Triton."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from banyan.ops.bind import NoToolkit, OpSpec
from banyan.ops.pages import FLOAT8

TYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_BLOCK = 16
"""Fewest rows, columns and dimensions of a matrix product."""

QUANTIZATIONS = {"q4_0": "Q4_0", "q4_1": "Q4_1", "q8_0": "Q8_0", "int8": "Q8_0"}
"""Types of blocks that float weights may be rounded to at load -> storage type."""
FP8 = "fp8"
"""Another one: 8-bit floats with a scale per output; activations are rounded to them too."""
FP8_BACKENDS = TRITON, VENDOR = ("triton", "cutlass")
"""Values of --fp8-gemm-backend; the vendor's products are torch's."""


@dataclass(frozen=True)
class CudaToolkit(NoToolkit):
    """
    Attributes:
        quantization: the type that float projections are rounded to at load, a name of
            QUANTIZATIONS, or FP8; "" = not rounded.
        fp8_backend: multiplies 8-bit floats, one of FP8_BACKENDS; "" = the faster one.
    """

    quantization: str = ""
    fp8_backend: str = ""


def power_of_two(size: int, least: int = 1) -> int:
    """The next power of two; sizes of a kernel's blocks must be one."""
    return max(least, 1 << (size - 1).bit_length())


def has_triton() -> bool:
    return find_spec("triton") is not None


def declines_device(spec: OpSpec) -> str | None:
    """Why no Triton kernel can run on the device; None = they can."""
    if spec.device.type != "cuda":
        return f"tensors are on {spec.device.type}"
    return None if has_triton() else "the package triton is not installed"


def declines(spec: OpSpec) -> str | None:
    """Why kernels of activations cannot run; None = they can."""
    reason = declines_device(spec)
    if reason is not None:
        return reason
    return None if spec.dtype in TYPES else f"activations are {spec.dtype}"


def declines_pages(spec: OpSpec) -> str | None:
    """Why kernels that read or write pages cannot run; None = they can."""
    reason = declines(spec)
    if reason is None and spec.cache_dtype not in (*TYPES, *FLOAT8, torch.int8):
        return f"cannot read pages of {spec.cache_dtype}"
    if reason is None and spec.cache_dtype == torch.int8 and spec.head_dim % 4:
        return f"a scale after {spec.head_dim} bytes is not aligned"
    if reason is None and spec.head_dim > 256:
        return f"heads of {spec.head_dim} dimensions, more than 256"
    return reason
