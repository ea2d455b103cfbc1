"""What the engine asks of a device: facts, memory, how to open it, and how work is ordered on it.
Nothing about models."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from banyan.config.defaults import Defaults
from banyan.model_config.model_config import ModelConfig
from banyan.platform.expert_exchange import Dispatch, FusedDispatch

ANY_SIZE, BY_SHAPE = "any size", "by shape"
"""How work of a device can be done again without Python: a program for steps of any size, which its
kernels' toolkit records, or a graph of one shape, which `Platform.capture` makes."""


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
        is_host: its memory is the host's: all ranks share it, and numpy sees its tensors.
        programs: ANY_SIZE, BY_SHAPE, or "" where every step is launched anew.
        lengths_on_host: its kernels take the lengths of a step's rows from memory of the host.
        latents: (rank, rope_dim) of the latent attention that its kernels compute without waiting.
        shares_steps: its ranks may work on the tokens of several replicas together, or divide those
            of a step.
        verified: most tokens of a row that verifies drafts, where the device is not the host; 0 =
            drafts are not served there.
        moves_pages: pages may be taken from it and put there, for another server; so they may where
            its memory is the host's.
        dispatch: exchanges of a fixed size to the ranks of experts; None = it has none.
        fusing: the operators that do this and what experts compute in one, by mode from 1 on.
        stacks_adapters: where its memory is not the host's: it computes low-rank adapters.
        has_own_forms: its kernels may lay weights out in ways that copies of bytes do not keep.
    """

    name: str
    torch_device: str
    collectives: tuple[str, ...]
    dtypes: tuple[str, ...]
    page_sizes: tuple[int, ...]
    async_launch: bool
    features: frozenset[str]
    cores: int
    is_host: bool = True
    programs: str = ""
    lengths_on_host: bool = False
    shares_steps: bool = False
    latents: tuple[tuple[int, int], ...] = ()
    verified: int = 0
    moves_pages: bool = False
    has_own_forms: bool = False
    stacks_adapters: bool = False
    dispatch: Dispatch | None = None
    fused_dispatch: tuple[FusedDispatch, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory: all this process may ever use, what is free now, what it holds."""

    total_bytes: int
    free_bytes: int
    ours_bytes: int


@dataclass(frozen=True)
class Interconnect:
    """A library that copies from one such device to another, of other processes too.

    Attributes:
        protocol: how it does that on this chip, as the library calls it.
        store: URL at which its engines meet; "" = none is named.
    """

    library: ModuleType
    protocol: str
    store: str


class Graph(Protocol):
    """Work that was captured once; it reads and writes the memory that it had then."""

    def replay(self, lengths: Sequence[int] = ()) -> None:
        """Launch it again.

        lengths: positions of each row, its new one included, for devices with `lengths_on_host`.
        """
        ...


class Lane(Protocol):
    """A stream beside that of the steps, whose work is in order by marks alone. What is launched on
    it while a graph is captured is a part of that graph."""

    def mark(self) -> object:
        """Behind what was launched so far on the stream at hand."""
        ...

    def run(self, work: Callable[[], object], after: object) -> object:
        """Launch work here behind a mark, and behind all that was launched here.

        returns: the mark behind it.
        """
        ...

    def wait(self, mark: object) -> None:
        """What is launched on the stream at hand from here on waits for a mark; the host does
        not."""
        ...


class Platform(Protocol):
    traits: Traits

    def open(self, local_rank: int, threads: int) -> torch.device:
        """Make the device ready for one rank of this machine.

        Args:
            local_rank: number of its device, where devices have numbers.
            threads: CPU threads of the rank; 0 = every core it may use.

        Raises:
            ConfigError: there is no device of that number.
        """
        ...

    def memory(self) -> Memory: ...

    def defaults(self, model_config: ModelConfig) -> Defaults:
        """What suits this device where nobody says otherwise."""
        ...

    def stream(self) -> AbstractContextManager[object]:
        """Work inside it is done in order on the stream that steps run on."""
        ...

    def lane(self) -> Lane:
        """Another stream; only where the device launches asynchronously."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies to and from the device need not wait for."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to bring tensors to the host, as they are after the work launched so far.

        returns: what waits for that and gives them; callable from any thread, once.
        """
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Do `work` and keep it as a graph; only where `traits.programs` is BY_SHAPE."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        ...

    def interconnect(self) -> Interconnect | None:
        """What copies from this device to others, made ready; None where nothing does.

        Raises:
            ConfigError: it is not installed, or is told to copy as it cannot.
        """
        ...
