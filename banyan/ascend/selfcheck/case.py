"""A case of the self-check: one call of an operator, and the result of plain torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.ascend.ops.operators import Operators
from banyan.base.errors import BanyanError

Place = Callable[[Tensor], Tensor]
"""Brings a tensor to the device."""


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        operator: torch_npu's name; `name` identifies the case.
        run: on a device; wanted: on the host, in float32 where the operator computes so.
        slack: how far results may be apart.
    """

    operator: str
    name: str
    run: Callable[[Operators, Place], Sequence[Tensor]]
    wanted: Callable[[], Sequence[Tensor]]
    slack: float


@dataclass(frozen=True)
class CaseOutcome:
    """How a case ended; `worst` is the largest difference, `why` is empty where it is all right."""

    case: Case
    worst: float
    why: str = ""


SLACK = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""Tolerance of a result, absolute and relative: kernels add in another order."""


def try_out(case: Case, operators: Operators, place: Place) -> CaseOutcome:
    """Run a case and compare; an error of the device is an outcome too."""
    try:
        found = [result.cpu() for result in case.run(operators, place)]
    except (BanyanError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        return CaseOutcome(case, math.inf, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    worst = 0.0
    for got, wanted in zip(found, case.wanted(), strict=True):
        if got.shape != wanted.shape:
            return CaseOutcome(case, math.inf, f"{list(got.shape)} instead of {list(wanted.shape)}")
        off = (got.float() - wanted.float()).abs() / (1 + wanted.float().abs())
        worst = max(worst, float(off.max().nan_to_num(nan=math.inf)))
    why = "" if worst <= case.slack else f"off by {worst:.2g}, {case.slack:.2g} is allowed"
    return CaseOutcome(case, worst, why)


def random_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)
