"""What a case of an operator is (`cases.py`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from banyan.ascend.ops.operators import Operators

Place = Callable[[Tensor], Tensor]
"""Brings a tensor to the device."""


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        operator: torch_npu's name; `name` tells the case apart.
        run: on a device; wanted: on the host, in float32 where the operator computes so.
        slack: how far results may be apart.
    """

    operator: str
    name: str
    run: Callable[[Operators, Place], Sequence[Tensor]]
    wanted: Callable[[], Sequence[Tensor]]
    slack: float


@dataclass(frozen=True)
class Outcome:
    """How a case ended; `worst` is the largest difference, `why` is empty where it is all right."""

    case: Case
    worst: float
    why: str = ""
