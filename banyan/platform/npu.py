"""Ascend NPUs: one stream for the steps, results through pinned memory of the host.

The driver may be the emulated one (docs/ascend.md).
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from banyan.config.card import ModelCard
from banyan.config.defaults import Defaults
from banyan.platform.base import BY_SHAPE, Graph, Memory, Traits
from banyan.platform.npu_driver import open_driver

_GIB = 1 << 30
_SMALL_GIB = 40
"""Cards with less memory than this take the smaller of two values."""
_CHUNKS = (4096, 8192)
_LARGEST_SHAPES = (16, 64)
_SHAPES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)


class NpuPlatform:
    """
    Raises:
        ConfigError: there is no driver or no device.
    """

    def __init__(self) -> None:
        self._npu = open_driver().npu
        self.traits = Traits(
            name="npu",
            torch_device="npu",
            collectives=("hccl",),
            dtypes=("bfloat16", "float16"),
            page_sizes=(128, 256, 512),
            async_launch=True,
            features=frozenset({self._npu.get_device_name()}),
            cores=len(os.sched_getaffinity(0)),
            is_host=False,
            programs=BY_SHAPE,
            lengths_on_host=True,
        )
        self._stream: object = None
        self._pool: object = None
        """The memory that graphs share: only one of them runs at a time."""

    def open(self, local_rank: int, threads: int) -> torch.device:
        torch.set_num_threads(threads or self.traits.cores)
        self._npu.set_device(local_rank)
        self._stream = self._npu.Stream(local_rank)
        return torch.device("npu", local_rank)

    def memory(self) -> Memory:
        self._npu.empty_cache()
        free, total = self._npu.mem_get_info()
        return Memory(total, free, self._npu.memory_reserved())

    def defaults(self, card: ModelCard) -> Defaults:
        size = self._npu.get_device_properties(0).total_memory / _GIB
        is_large = size >= _SMALL_GIB
        return Defaults(
            device=self.traits.name,
            dtypes=self.traits.dtypes,
            page_size=self.traits.page_sizes[0],
            chunk_tokens=_CHUNKS[is_large],
            running_cap=256,
            free_share=0.85,  # the rest is for activations and graphs
            shapes=tuple(rows for rows in _SHAPES if rows <= _LARGEST_SHAPES[is_large]),
        )

    def stream(self) -> AbstractContextManager[object]:
        return self._npu.stream(self._stream)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        here = [self.pinned(tensor.shape, tensor.dtype) for tensor in tensors]
        for mine, tensor in zip(here, tensors, strict=True):
            mine.copy_(tensor, non_blocking=True)
        done = self._npu.Event()
        done.record()

        def wait() -> list[Tensor]:
            done.synchronize()
            return here

        return wait

    def capture(self, work: Callable[[], None]) -> Graph:
        work()  # what is made on first use is made outside of the graph
        self._npu.synchronize()
        graph = self._npu.NPUGraph()
        with self._npu.graph(
            graph, pool=self._pool, stream=self._stream, auto_dispatch_capture=True
        ):
            work()
        self._pool = graph.pool()
        return _LengthGraph(graph)

    def synchronize(self) -> None:
        self._npu.synchronize()


class _LengthGraph:
    """A graph whose attention is told the lengths of its rows before each run."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self, lengths: Sequence[int] = ()) -> None:
        # The name of attention's argument; it changes only where it was given by keyword.
        self._graph.update(cpu_update_input=[{"actual_seq_lengths_kv": list(lengths)}])
        self._graph.replay()
