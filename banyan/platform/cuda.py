"""CUDA devices through torch."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch

from banyan.base.errors import ConfigError
from banyan.base.os import num_cores
from banyan.config.defaults import Defaults
from banyan.model_config.model_config import ModelConfig
from banyan.platform.accelerator import Accelerator, Graphs
from banyan.platform.base import BY_SHAPE, Ranges, Traits

_CHUNKS = ((20, 2048), (60, 4096), (160, 8192))
"""(GiB, prompt tokens per step): the first row with more memory than the device counts."""
_LARGEST_CHUNK = 16384
_SHAPES = ((20, 8), (35, 24), (60, 32), (160, 256))
"""(GiB, rows of the largest captured step), as _CHUNKS."""
_LARGEST_SHAPE = 512


class NvtxRanges:
    """Ranges that Nsight shows."""

    def begin(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def end(self) -> None:
        torch.cuda.nvtx.range_pop()


class CudaPlatform(Accelerator):
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
        traits = Traits(
            name="cuda",
            torch_device="cuda",
            collectives=("peer memory", "nccl"),
            dtypes=("bfloat16", "float16", "float32"),
            page_sizes=(64, 16, 32, 128),
            async_launch=True,
            features=frozenset({f"sm{major}{minor}"} | has_triton),
            cores=num_cores(),
            is_host=False,
            programs=BY_SHAPE,
            verified=16,
            moves_pages=True,
            shares_steps=True,
            stacks_adapters=True,
            rounds_experts=True,
            rolls_back=True,
            releases_memory=True,
        )
        # NCCL's threads look at its events while this one captures.
        mode = {"capture_error_mode": "thread_local"}
        super().__init__(torch.cuda, traits, Graphs(torch.cuda.CUDAGraph, _Captured, mode))

    def ranges(self) -> Ranges:
        return NvtxRanges()

    def defaults(self, model_config: ModelConfig) -> Defaults:
        size = self.size_gib
        most = next((rows for below, rows in _SHAPES if size < below), _LARGEST_SHAPE)
        shapes = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32)]
        return Defaults(
            device=self.traits.name,
            dtypes=self.traits.dtypes,
            page_size=self.traits.page_sizes[0],
            chunk_tokens=next((n for below, n in _CHUNKS if size < below), _LARGEST_CHUNK),
            running_cap=max(most, 256),
            free_share=0.85,  # the rest is for activations and graphs
            loaded_adapters=0,
            shapes=tuple(rows for rows in shapes if rows <= most),
            captures_prompts=True,
        )


class _Captured:
    """A graph whose kernels read the lengths on the device."""

    def __init__(self, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
        self._graph, self._work = graph, work

    def replay(self, lengths: Sequence[int] = ()) -> None:
        self._graph.replay()
