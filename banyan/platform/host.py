"""What every device whose work is done when the call returns has in common."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from banyan.platform.base import Graph, Interconnect, Lane

_NO_STREAM: AbstractContextManager[object] = nullcontext()


class Host:
    """Calls run in order and at once: nothing is waited for, nothing has to be copied."""

    def stream(self) -> AbstractContextManager[object]:
        return _NO_STREAM

    def lane(self) -> Lane:
        raise NotImplementedError("the host does one thing after another")

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        here = list(tensors)
        return lambda: here

    def capture(self, work: Callable[[], None]) -> Graph:
        raise NotImplementedError("programs of the host are recorded by its kernels' toolkit")

    def synchronize(self) -> None:
        return None

    def interconnect(self) -> Interconnect | None:
        return None
