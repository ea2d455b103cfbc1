"""Ascend NPUs through torch_npu, or through an emulated driver (docs/ascend.md)."""

from collections.abc import Callable, Sequence
from typing import Any

from banyan.ascend.driver import open_driver, open_interconnect
from banyan.ascend.ops.product_contracts import dispatch_of, fused_dispatch_of
from banyan.base.os import num_cores
from banyan.config.defaults import Defaults
from banyan.model_config.model_config import ModelConfig
from banyan.platform.accelerator import Accelerator, Graphs
from banyan.platform.base import BY_SHAPE, Interconnect, Traits

_SMALL_GIB = 40
"""Cards with less memory take the first of the two values below."""
_CHUNKS = (4096, 8192)
_LARGEST_SHAPES = (16, 64)
_SHAPES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64)


class NpuPlatform(Accelerator):
    """
    Raises:
        ConfigError: there is no driver or no device.
    """

    def __init__(self) -> None:
        npu = open_driver().npu
        traits = Traits(
            name="npu",
            torch_device="npu",
            collectives=("hccl",),
            dtypes=("bfloat16", "float16"),
            page_sizes=(128, 256, 512),
            async_launch=True,
            features=frozenset({npu.get_device_name()}),
            cores=num_cores(),
            is_host=False,
            programs=BY_SHAPE,
            lengths_on_host=True,
            shares_steps=True,
            latents=((512, 64),),
            verified=16,  # the longest row that latent attention takes
            moves_pages=True,
            has_own_forms=True,
            stacks_adapters=True,
            releases_memory=True,
            dispatch=dispatch_of(npu.get_device_name()),
            fused_dispatch=fused_dispatch_of(npu.get_device_name()),
        )
        graphs = Graphs(npu.NPUGraph, _LengthGraph, {"auto_dispatch_capture": True})
        super().__init__(npu, traits, graphs)

    def defaults(self, model_config: ModelConfig) -> Defaults:
        is_large = self.size_gib >= _SMALL_GIB
        return Defaults(
            device=self.traits.name,
            dtypes=self.traits.dtypes,
            page_size=self.traits.page_sizes[0],
            chunk_tokens=_CHUNKS[is_large],
            running_cap=256,
            free_share=0.85,  # the rest is for activations and graphs
            loaded_adapters=0,
            shapes=tuple(rows for rows in _SHAPES if rows <= _LARGEST_SHAPES[is_large]),
        )

    def interconnect(self) -> Interconnect:
        return open_interconnect(self._library.get_device_name())


class _LengthGraph:
    """A graph whose attention gets the lengths of its rows from the host before each run."""

    def __init__(self, graph: Any, work: Callable[[], None]) -> None:
        self._graph, self._work = graph, work

    def replay(self, lengths: Sequence[int] = ()) -> None:
        if not lengths:  # its attention reads them on the device
            self._graph.replay()
            return
        # Both names, since the two versions of attention differ. Only a keyword argument of the
        # captured call can be updated.
        updated = dict.fromkeys(("actual_seq_lengths_kv", "actual_seq_kvlen"), list(lengths))
        self._graph.update(cpu_update_input=[updated])
        self._graph.replay()
