"""Dense projections in plain torch whose rows do not depend on how many rows there are.

Matrix libraries take other kernels, with another order of summation, for a handful of rows. The
smallest number of rows that gives the bits of a large product is measured once, and fewer rows are
padded to it, so that decode, chunks and whole prompts agree.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.stored import StoredWeight

_MANY_ROWS = 64


class SteadyLinear:
    """An unpacked weight [out, in] and the least rows it is multiplied with."""

    def __init__(self, weight: Tensor, min_rows: int) -> None:
        self.weight = weight
        self.min_rows = min_rows

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if rows >= self.min_rows:
            return functional.linear(x, self.weight, bias)
        padded = functional.pad(x, (0, 0, 0, self.min_rows - rows))
        return functional.linear(padded, self.weight, bias)[:rows]


@cache
def steady_rows(dtype: torch.dtype) -> int:
    """Fewest rows from which on this machine's products keep their bits, at most 32."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 576, generator=generator).to(dtype)
    x = torch.randn(_MANY_ROWS, 576, generator=generator).to(dtype)
    many = functional.linear(x, weight)
    sizes = (1, 2, 4, 8, 16, 32)
    unlike = [n for n in sizes if not torch.equal(functional.linear(x[:n], weight), many[:n])]
    return min(2 * max(unlike), sizes[-1]) if unlike else 1


def _supports(spec: OpSpec) -> str | None:
    return None if spec.device.type == "cpu" else f"tensors are on {spec.device.type}"


def _pack(weight: StoredWeight, dtype: torch.dtype, device: torch.device) -> SteadyLinear:
    return SteadyLinear(weight.dense.to(device, dtype), steady_rows(dtype))


dense = Kernel(run=_pack, supports=_supports)
