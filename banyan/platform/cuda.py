"""CUDA devices through torch: one stream for the steps, graphs by shape, results through pinned
memory of the host."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from banyan.base.errors import ConfigError
from banyan.config.card import ModelCard
from banyan.config.defaults import Defaults
from banyan.platform.base import BY_SHAPE, Graph, Memory, Traits

_GIB = 1 << 30
_CHUNKS = ((20, 2048), (60, 4096), (160, 8192))
"""Prompt tokens per step for devices with less than so many GiB."""
_LARGEST_CHUNK = 16384
_SHAPES = ((20, 8), (35, 24), (60, 32), (160, 256))
"""Rows of the largest captured step, in the same way."""
_LARGEST_SHAPE = 512


class CudaPlatform:
    """
    Raises:
        ConfigError: torch finds no such device.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda: torch finds no CUDA device",
                hint="install a torch that is built for CUDA, or use --device cpu",
            )
        major, minor = torch.cuda.get_device_capability()
        has_triton = {"triton"} if find_spec("triton") else set[str]()
        self.traits = Traits(
            name="cuda",
            torch_device="cuda",
            collectives=("nccl",),
            dtypes=("bfloat16", "float16", "float32"),
            page_sizes=(16, 32, 64, 128),
            async_launch=True,
            features=frozenset({f"sm{major}{minor}"} | has_triton),
            cores=len(os.sched_getaffinity(0)),
            is_host=False,
            programs=BY_SHAPE,
        )
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        """The memory that graphs share: only one of them runs at a time."""

    def open(self, local_rank: int, threads: int) -> torch.device:
        torch.set_num_threads(threads or self.traits.cores)
        torch.cuda.set_device(local_rank)
        self._stream = torch.cuda.Stream(local_rank)
        return torch.device("cuda", local_rank)

    def memory(self) -> Memory:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return Memory(total, free, torch.cuda.memory_reserved())

    def defaults(self, card: ModelCard) -> Defaults:
        size = torch.cuda.get_device_properties(0).total_memory / _GIB
        most = next((rows for below, rows in _SHAPES if size < below), _LARGEST_SHAPE)
        shapes = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32)]
        return Defaults(
            device=self.traits.name,
            dtypes=self.traits.dtypes,
            page_size=self.traits.page_sizes[0],
            chunk_tokens=next((n for below, n in _CHUNKS if size < below), _LARGEST_CHUNK),
            running_cap=max(most, 256),
            free_share=0.85,  # the rest is for activations and graphs
            shapes=tuple(rows for rows in shapes if rows <= most),
        )

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        here = [self.pinned(tensor.shape, tensor.dtype) for tensor in tensors]
        for mine, tensor in zip(here, tensors, strict=True):
            mine.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> list[Tensor]:
            done.synchronize()
            return here

        return wait

    def capture(self, work: Callable[[], None]) -> Graph:
        work()  # kernels are compiled and chosen outside the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        self._pool = graph.pool()
        return _Captured(graph)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class _Captured:
    """A graph whose kernels read all lengths on the device."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self, lengths: Sequence[int] = ()) -> None:
        self._graph.replay()
