"""What the engine asks of a device: facts, memory, and how to open it. Nothing about models."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Traits:
    """Facts of a device, read once, safe to print and to put in a journal.

    Attributes:
        name: also names the kernel table ("cpu", "null").
        collectives: libraries by which ranks talk, best first ("shared", "gloo").
        dtypes: activation dtypes, preferred first.
        page_sizes: tokens per KV page, preferred first.
        async_launch: a launched step runs on while the host goes on.
        features: what kernels may ask for ("avx2", "avx512_vnni").
        cores: cores this process may use, 0 when the notion does not apply.
    """

    name: str
    torch_device: str
    collectives: tuple[str, ...]
    dtypes: tuple[str, ...]
    page_sizes: tuple[int, ...]
    async_launch: bool
    features: frozenset[str]
    cores: int


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory: all this process may ever use, what is free now, what it holds."""

    total_bytes: int
    free_bytes: int
    ours_bytes: int


class Platform(Protocol):
    traits: Traits

    def open(self, local_rank: int, threads: int) -> torch.device:
        """Make the device ready for one rank of this machine.

        Args:
            threads: CPU threads of the rank; 0 = every core it may use.
        """
        ...

    def memory(self) -> Memory: ...
