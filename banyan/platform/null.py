"""A device without memory: meta tensors, so that shapes and control flow run without weights."""

import torch

from banyan.platform.base import Memory, Traits

_ENDLESS_BYTES = 1 << 40


class NullPlatform:
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
        )

    def open(self, local_rank: int, threads: int) -> torch.device:
        return torch.device("meta")

    def memory(self) -> Memory:
        return Memory(_ENDLESS_BYTES, _ENDLESS_BYTES, 0)
