"""What each call of an operator gives, by shape and number type, on any device."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from banyan.ascend.ops.operators import Operators
from banyan.ascend.selfcheck import cases
from banyan.ascend.selfcheck.cases import Case
from tests.ascend.emulation.exchange_cases import exchange_cases

Results = dict[str, list[list[str]]]
"""Case -> for each call of an operator: its name, and each of its results."""


class _Listening(TorchDispatchMode):
    """Writes down what the operators of the NPU give.

    Args:
        absent: operators without a meta kernel: for it they give back what they are given first,
            and they are not written down.
    """

    def __init__(self, absent: Collection[str]) -> None:
        super().__init__()
        self.heard: list[list[str]] = []
        self._absent = absent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in self._absent:
            return args[0] if args[0].is_meta else func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func.namespace == "npu":
            each = result if isinstance(result, (tuple, list)) else [result]
            each = [] if result is None else each
            reported = [f"{list(x.shape)} {x.dtype}" for x in each]
            self.heard.append([func._schema.name, *reported])
        return result


def called() -> list[str]:
    """The operators that cases are of, as schemas name them."""
    return sorted({f"npu::{case.operator}" for case in (*cases(), *exchange_cases())})


def results(
    place: Callable[[Tensor], Tensor],
    absent: Collection[str] = (),
    known: Callable[[], Iterable[Case]] = cases,
) -> Results:
    operators = Operators(is_checked=False)
    found: Results = {}
    for case in known():
        with torch.no_grad(), _Listening(absent) as listening:
            case.run(operators, place)
        found[f"{case.operator} {case.name}"] = listening.heard
    return found
