"""A device of meta tensors: shapes and control flow without memory or weights."""

import torch

from banyan.config.defaults import Defaults
from banyan.model_config.model_config import ModelConfig
from banyan.platform.base import Host, Memory, Traits

_ENDLESS_BYTES = 1 << 40


class NullPlatform(Host):
    def __init__(self) -> None:
        self.traits = Traits(
            name="null",
            torch_device="meta",
            collectives=("gloo",),
            dtypes=("float32",),
            page_sizes=(16,),
            async_launch=False,
            features=frozenset(),
            cores=0,
            is_host=False,
        )

    def open(self, local_rank: int, threads: int) -> torch.device:
        return torch.device("meta")

    def memory(self) -> Memory:
        return Memory(_ENDLESS_BYTES, _ENDLESS_BYTES, 0)

    def defaults(self, model_config: ModelConfig) -> Defaults:
        return Defaults("null", self.traits.dtypes, 16, 512, 128, 0.25)
