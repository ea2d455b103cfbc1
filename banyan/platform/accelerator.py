"""Base of devices that run asynchronously: one stream for the steps, graphs by shape, results
through pinned host memory."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.platform.base import (
    Graph,
    Interconnect,
    Memory,
    Ranges,
    SideStream,
    TorchRanges,
    Traits,
)


@dataclass(frozen=True)
class Graphs:
    """How a device makes graphs.

    Attributes:
        empty: the library's class of graphs.
        captured: wraps a captured graph and its work. It keeps the work alive, because the graph
            reads the tensors that the work holds.
        options: further arguments of the library's `graph`.
    """

    empty: Callable[[], Any]
    captured: Callable[[Any, Callable[[], None]], Graph]
    options: Mapping[str, object] = field(default_factory=dict)


class DeviceSideStream:
    """Implements `SideStream`, on the current device of the thread.

    Args:
        library: as for Accelerator.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._stream = library.Stream()

    def record_event(self) -> object:
        event = self._library.Event()
        event.record()
        return event

    def run(self, work: Callable[[], object], after: object) -> object:
        with self._library.stream(self._stream):
            self.wait(after)
            work()
            return self.record_event()

    def wait(self, event: object) -> None:
        self._library.current_stream().wait_event(event)


class Accelerator:
    """
    Args:
        library: torch's module of the device, with the names of torch.cuda.
    """

    def __init__(self, library: Any, traits: Traits, graphs: Graphs) -> None:
        self.traits = traits
        self._library = library
        self._graphs = graphs
        self._stream: Any = None
        self._pool: Any = None
        """Memory that all graphs share, since only one runs at a time."""
        self._graph_of_pool: Callable[[], object] = lambda: None
        """The newest graph; None once it is gone, and with it what it kept of the memory."""

    def open(self, local_rank: int, threads: int) -> torch.device:
        torch.set_num_threads(threads or self.traits.cores)
        count = self._library.device_count()
        if local_rank >= count:
            raise ConfigError(
                f"a rank of this machine takes {self.traits.name} {local_rank}, and it has "
                f"{count} from 0 on",
                hint="lower --base-gpu-id, --gpu-id-step or the number of ranks and replicas",
            )
        self._library.set_device(local_rank)
        self._stream = self._library.Stream(local_rank)
        return torch.device(self.traits.torch_device, local_rank)

    def memory(self) -> Memory:
        self._library.empty_cache()
        free, total = self._library.mem_get_info()
        return Memory(total, free, self._library.memory_reserved())

    @property
    def size_gib(self) -> float:
        """Memory of the smallest device, so that ranks on unequal ones have the same defaults."""
        numbers = range(self._library.device_count())
        return min(self._library.get_device_properties(n).total_memory for n in numbers) / (1 << 30)

    def stream(self) -> AbstractContextManager[object]:
        return self._library.stream(self._stream)

    def ranges(self) -> Ranges:
        return TorchRanges()

    def side_stream(self) -> SideStream:
        return DeviceSideStream(self._library)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        here = [
            tensor if tensor.is_cpu else self.pinned(tensor.shape, tensor.dtype)
            for tensor in tensors
        ]
        if all(tensor.is_cpu for tensor in tensors):
            return lambda: here
        for mine, tensor in zip(here, tensors, strict=True):
            if mine is not tensor:
                mine.copy_(tensor, non_blocking=True)
        done = self._library.Event()
        done.record()

        def wait() -> list[Tensor]:
            done.synchronize()
            return here

        return wait

    def capture(self, work: Callable[[], None]) -> Graph:
        work()  # so that what is compiled or allocated on first use is not in the graph
        self.synchronize()
        graph = self._graphs.empty()
        pool = None if self._graph_of_pool() is None else self._pool
        with self._library.graph(graph, pool=pool, stream=self._stream, **self._graphs.options):
            work()
        captured = self._graphs.captured(graph, work)
        self._pool, self._graph_of_pool = graph.pool(), weakref.ref(captured)
        return captured

    def synchronize(self) -> None:
        self._library.synchronize()

    def interconnect(self) -> Interconnect | None:
        return None
