"""The emulated NPU's collectives: the backend `hccl` of torch's process groups, as torch_npu
registers it. Bytes go by gloo; what HCCL refuses is refused first, and each group takes memory of
its device for buffers, as HCCL's do.

An exchange is an operator, so that a graph that was captured makes it again.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from banyan.ascend.ops.contracts import exchanged, require

SCALE = 64
"""How much smaller than a real one everything here is: 1 GiB a device, and buffers of groups."""
DEFAULT_BUFFER_MB = 200
_BUFFERS = 2
"""Of a group on each device: one to send, one to receive."""
_LOOPBACK = "127.0.0.1"
EXCHANGES_LOG = "EMULATED_EXCHANGES_LOG"
"""Variable that names a file to which the kind of each exchange is appended."""
_SCHEMA = "exchange(Tensor(a!)[] filled, Tensor[] given, str kind, int group, int[] numbers) -> ()"


@dataclass
class Options:
    """`ProcessGroupHCCL.Options`."""

    hccl_config: dict[str, int] = field(default_factory=dict)
    is_high_priority_stream: bool = False
    global_ranks_in_group: list[int] = field(default_factory=list)
    group_id: str = ""
    _timeout: timedelta = timedelta(seconds=300)


class Done:
    """`Work`: it is over when the call returns."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Exchanges:
    """Carries bytes between ranks, for all groups of this process."""

    def __init__(self, core: ModuleType) -> None:
        self.core = core
        self.groups: dict[int, Any] = {}
        self._named: dict[str, ProcessGroup] = {}
        self._numbers = count()
        self._library = torch.library.Library("hccl", "DEF")
        self._library.define(_SCHEMA)
        self._library.impl("exchange", self._exchange, "PrivateUse1")

    def register(self) -> None:
        """With torch, as `import torch_npu` does."""
        dist.Backend.register_backend("hccl", self._create, extended_api=True, devices=["npu"])

    def _create(self, met: Any, options: Options | None) -> "ProcessGroup":
        options = options or Options()
        options._timeout, options.group_id = met.timeout, met.group_id
        options.global_ranks_in_group = met.global_ranks_in_group
        return ProcessGroup(self, met.store, met.group_rank, met.group_size, options)

    def join(self, store: Any, rank: int, size: int, options: Options) -> int:
        """The number of a group of gloo's that carries the bytes."""
        under = dist.ProcessGroupGloo._Options()
        under._timeout = options._timeout
        under._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        number = next(self._numbers)
        self.groups[number] = dist.ProcessGroupGloo(store, rank, size, under)
        return number

    def name(self, group: "ProcessGroup") -> str:
        """From here on operators know a group, which nothing else may use."""
        known = next((name for name, each in self._named.items() if each is group), "")
        name = known or f"{_LOOPBACK}%hccl_{len(self._named)}"
        self._named[name] = group
        return name

    def named(self, operator: str, name: str) -> "ProcessGroup":
        require(name in self._named, operator, f"no group is called {name!r}")
        return self._named[name]

    def _exchange(
        self,
        filled: Sequence[Tensor],
        given: Sequence[Tensor],
        kind: str,
        group: int,
        numbers: Sequence[int],
    ) -> None:
        if log := os.environ.get(EXCHANGES_LOG):
            with open(log, "a") as file:
                file.write(f"{kind}\n")
        under = self.groups[group]
        into = [self.core.host_alias(x, True) for x in filled]
        out = [self.core.host_alias(x) for x in given]
        if kind == "allgather":
            under.allgather([into], out).wait()
        elif kind == "allreduce":
            under.allreduce(into).wait()
        elif kind == "alltoall":
            splits = (list(numbers[: len(numbers) // 2]), list(numbers[len(numbers) // 2 :]))
            under.alltoall_base(into[0], out[0], *splits, dist.AllToAllOptions()).wait()
        elif kind == "broadcast":
            under.broadcast(into[0], numbers[0]).wait()
        elif kind == "send":
            under.send(out, *numbers).wait()
        else:
            under.recv(into, *numbers).wait()


class ProcessGroup:
    """`ProcessGroupHCCL`, as far as it is used."""

    Options = Options

    def __init__(
        self, exchanges: Exchanges, store: Any, rank: int, size: int, options: Options
    ) -> None:
        buffer_mb = options.hccl_config.get("hccl_buffer_size", DEFAULT_BUFFER_MB)
        require(buffer_mb >= 1, "hccl", f"hccl_buffer_size must be 1 MB or more, it is {buffer_mb}")
        self.options, self.buffer_mb = options, buffer_mb
        self._exchanges, self._is_named = exchanges, False
        self._number = exchanges.join(store, rank, size, options)
        self._rank, self._size = rank, size
        self._buffers = torch.empty(
            _BUFFERS * (buffer_mb << 20) // SCALE, dtype=torch.uint8, device="npu"
        )

    def get_hccl_comm_name(self, rank: int) -> str:
        self._peer("get_hccl_comm_name", rank)
        self._is_named = True
        return self._exchanges.name(self)

    @property
    def under(self) -> Any:
        """What carries the bytes."""
        return self._exchanges.groups[self._number]

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allgather(self, filled: list[list[Tensor]], given: list[Tensor]) -> Done:
        require(
            len(filled) == len(given) == 1 and len(filled[0]) == self._size,
            "hccl allgather",
            f"one tensor is given and {self._size} are filled",
        )
        sizes = {tuple(x.shape) for x in (*filled[0], given[0])}
        require(len(sizes) == 1, "hccl allgather", f"tensors must have one shape, not {sizes}")
        return self._do("allgather", filled[0], given)

    def allreduce(self, summed: list[Tensor]) -> Done:
        require(len(summed) == 1, "hccl allreduce", "one tensor is summed")
        return self._do("allreduce", summed, [])

    def alltoall_base(
        self,
        filled: Tensor,
        given: Tensor,
        filled_splits: list[int],
        given_splits: list[int],
        options: object = None,
    ) -> Done:
        for x, splits in ((filled, filled_splits), (given, given_splits)):
            require(
                len(splits) == self._size and sum(splits) == len(x),
                "hccl alltoall_base",
                f"{splits} must be {self._size} parts of {len(x)} rows",
            )
        return self._do("alltoall", [filled], [given], *filled_splits, *given_splits)

    def broadcast(self, x: Tensor, root: int) -> Done:
        self._peer("broadcast", root)
        return self._do("broadcast", [x], [], root)

    def send(self, given: list[Tensor], to: int, tag: int) -> Done:
        self._peer("send", to)
        return self._do("send", [], given, to, tag)

    def recv(self, filled: list[Tensor], source: int, tag: int) -> Done:
        self._peer("recv", source)
        return self._do("recv", filled, [], source, tag)

    def _peer(self, name: str, rank: int) -> None:
        require(0 <= rank < self._size, f"hccl {name}", f"there is no rank {rank} of {self._size}")

    def _do(self, kind: str, filled: list[Tensor], given: list[Tensor], *numbers: int) -> Done:
        require(
            not self._is_named,
            f"hccl {kind}",
            "operators exchange rows in this group by its name; nothing else may use it",
        )
        exchanged(kind, *filled, *given)
        torch.ops.hccl.exchange(filled, given, kind, self._number, list(numbers))
        return Done()
