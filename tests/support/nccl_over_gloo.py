"""NCCL's process group without GPUs: gloo carries the bytes, and what NCCL refuses is refused.

A call returns before its bytes have moved; they move when somebody waits for it, as the stream of
the steps waits on a GPU.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from banyan.parallel import nccl, process_group
from banyan.parallel.collectives import Rendezvous


class Later:
    """Work that is done when its result is waited for, and once."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work

    def wait(self) -> bool:
        assert self._work is not None, "it was waited for before"
        work, self._work = self._work, None
        work().wait()
        return True

    def __del__(self) -> None:
        assert self._work is None, "nobody waited for a collective"


class NcclOverGloo:
    """`ProcessGroupNCCL`, as far as it is used."""

    def __init__(self, rendezvous: Rendezvous, store: Any) -> None:
        dist = process_group.dist
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._under = dist.ProcessGroupGloo(store, rendezvous.rank, rendezvous.size, options)
        self._size = rendezvous.size
        self._together: list[Callable[[], Any]] | None = None

    def _allgather_base(self, out: Tensor, x: Tensor) -> Later:
        assert out.numel() == self._size * x.numel() > 0 and out.dtype == x.dtype
        parts = list(out.view(self._size, -1))
        return self._do(lambda: self._under.allgather([parts], [x.view(-1)]), out, x)

    def alltoall_base(
        self, out: Tensor, x: Tensor, coming: list[int], given: list[int], options: object
    ) -> Later:
        assert (bool(given) or len(x) % self._size == 0) and out.dtype == x.dtype
        work = lambda: self._under.alltoall_base(out, x, coming, given, options)  # noqa: E731
        return self._do(work, out, x)

    def broadcast(self, x: Tensor, source: int) -> Later:
        return self._do(lambda: self._under.broadcast(x, source), x)

    def send(self, given: list[Tensor], to: int, tag: int) -> Later:
        return self._do(lambda: self._under.send(given, to, tag), *given)

    def recv(self, filled: list[Tensor], source: int, tag: int) -> Later:
        return self._do(lambda: self._under.recv(filled, source, tag), *filled)

    def _start_coalescing(self) -> None:
        assert self._together is None
        self._together = []

    def _end_coalescing(self) -> Later:
        assert self._together is not None and len(self._together) == 1
        (work,), self._together = self._together, None
        return Later(work)

    def _do(self, work: Callable[[], Any], *tensors: Tensor) -> Any:
        assert all(x.is_contiguous() for x in tensors), "tensors must be contiguous"
        if self._together is None:
            return Later(work)
        self._together.append(work)
        return None


def pretend_nccl() -> None:
    """Let the row "nccl" of the table of collectives open such groups in this process."""
    nccl.open_process_group = NcclOverGloo
