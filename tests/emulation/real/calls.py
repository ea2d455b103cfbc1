"""What each call of an operator gives, by shape and number type, on any device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from banyan.ops.npu.cases import cases
from banyan.ops.npu.operators import Operators

Results = dict[str, list[list[str]]]
"""Case -> for each call of an operator: its name, and each of its results."""


class _Listening(TorchDispatchMode):
    """Writes down what the operators of the NPU give."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "npu":
            each = result if isinstance(result, (tuple, list)) else [result]
            told = [f"{list(x.shape)} {x.dtype}" for x in each]
            self.heard.append([func._schema.name, *told])
        return result


def results(place: Callable[[Tensor], Tensor]) -> Results:
    operators = Operators(is_checked=False)
    found: Results = {}
    for case in cases():
        with torch.no_grad(), _Listening() as listening:
            case.run(operators, place)
        found[f"{case.operator} {case.name}"] = listening.heard
    return found
