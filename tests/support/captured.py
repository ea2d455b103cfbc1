"""The host as a device whose steps are captured, and ops that such a device can sample with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from banyan.dp_attention.batch import DPAttentionRows
from banyan.ops import tensor_sampling
from banyan.ops.api import Ops
from banyan.platform.base import BY_SHAPE
from banyan.platform.cpu import CpuPlatform


class Elsewhere(CpuPlatform):
    """The memory of the host as a device that numpy does not see, whose work is captured by shape:
    a graph is a function that reads and writes the tensors it had, and holds no others.

    Args:
        counts: row counts on the host. A graph runs with those of its capture, as on a device,
            which reads the host at the capture alone.
    """

    def __init__(self, counts: Sequence[DPAttentionRows] = ()) -> None:
        super().__init__()
        self._counts = counts
        self.traits = replace(self.traits, is_host=False, programs=BY_SHAPE, rolls_back=True)
        self.replays = 0

    def capture(self, work: Callable[[], None]) -> "Elsewhere.Replay":
        work()
        kept = [(rows.total, rows.mine, rows.table.clone()) for rows in self._counts]

        def with_kept_counts() -> None:
            now = [(rows.total, rows.mine, rows.table.clone()) for rows in self._counts]
            self._set(kept)
            work()
            self._set(now)

        return self.Replay(self, with_kept_counts)

    def _set(self, values: list[tuple[int, int, Tensor]]) -> None:
        for rows, (total, mine, table) in zip(self._counts, values, strict=True):
            rows.total, rows.mine = total, mine
            rows.table.copy_(table)

    def fetch(self, tensors):
        here = [tensor.clone() for tensor in tensors]
        return lambda: here

    @dataclass(frozen=True)
    class Replay:
        platform: "Elsewhere"
        work: Callable[[], None]

        def replay(self) -> None:
            self.platform.replays += 1
            self.work()


class SampledInTensors:
    """Ops whose sampler works for tensors of any device."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.sample = tensor_sampling.sample.run
        self.logprobs = tensor_sampling.logprobs.run

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)
