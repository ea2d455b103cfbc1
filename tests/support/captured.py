"""The host as a device whose steps are captured, and ops that such a device can sample with."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from banyan.ops import tensor_sampling
from banyan.ops.api import Ops
from banyan.platform.base import BY_SHAPE
from banyan.platform.cpu import CpuPlatform


class Elsewhere(CpuPlatform):
    """The memory of the host as a device that numpy does not see, whose work is captured by shape:
    a graph is a function that reads and writes the tensors it had, and holds no others."""

    def __init__(self) -> None:
        super().__init__()
        self.traits = replace(self.traits, is_host=False, programs=BY_SHAPE)
        self.replays = 0

    def capture(self, work: Callable[[], None]) -> "Elsewhere.Replay":
        work()
        return self.Replay(self, work)

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
