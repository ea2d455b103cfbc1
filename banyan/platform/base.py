"""The interface of a device: facts, memory, opening it, streams, graphs and copies to the host.

Nothing here imports torch before a device is opened: `banyan models` and others only read facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from banyan.base.torch_parts import complete_torch
from banyan.config.defaults import Defaults
from banyan.model_config.model_config import ModelConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from banyan.platform.expert_exchange import Dispatch, FusedDispatch

ANY_SIZE, BY_SHAPE = "any size", "by shape"
"""How a device repeats work without Python: a program for steps of any size, recorded by the
toolkit of its kernels, or a graph of one shape, made by `Platform.capture`."""

_NO_STREAM: AbstractContextManager[object] = nullcontext()
_ENDLESS_BYTES = 1 << 40


@dataclass(frozen=True)
class Traits:
    """Facts of a device, read once, safe to print and to put in a journal.

    Attributes:
        name: also the name of its kernel table ("cpu", "null").
        collectives: libraries for communication between ranks, best first ("shared", "gloo").
        dtypes: activation dtypes, preferred first.
        page_sizes: tokens per KV page, preferred first.
        async_launch: a launched step runs on while the host goes on.
        features: instruction sets and chips that kernels require ("avx2", "avx512_vnni").
        cores: cores this process may use; 0 = not applicable.
        is_host: its memory is the host's: all ranks share it, and numpy can read its tensors.
        programs: ANY_SIZE, BY_SHAPE, or "" = every step is launched op by op.
        lengths_on_host: its kernels take the lengths of a step's rows from memory of the host.
        latents: (rank, rope_dim) of the latent attention that its kernels compute without waiting.
        shares_steps: its ranks may compute the tokens of several replicas together (DP attention),
            or divide the tokens of a step (context parallel).
        verified: most tokens of a row that verifies drafts, on devices other than the host; 0 = no
            speculative decoding.
        moves_pages: KV transfer may read and write its pages; always so if `is_host`.
        dispatch: expert exchanges of a fixed size; None = it has none.
        fused_dispatch: operators that exchange rows and run the experts, by mode from 1 on.
        stacks_adapters: it computes LoRA adapters, on devices other than the host.
        rounds_experts: its kernels round experts at load, on devices other than the host.
        rolls_back: its kernels keep the states after drafts, which may be rejected; always so if
            `is_host`.
        releases_memory: weights, pages and graphs can be released; always so if `is_host`.
        has_own_forms: its kernels may store weights in forms that copies of bytes do not keep.
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
    rounds_experts: bool = False
    rolls_back: bool = False
    releases_memory: bool = False
    dispatch: Dispatch | None = None
    fused_dispatch: tuple[FusedDispatch, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Device memory: bytes this process may use at most, bytes free now, bytes it holds."""

    total_bytes: int
    free_bytes: int
    ours_bytes: int


@dataclass(frozen=True)
class Interconnect:
    """A library that copies between devices of this kind, in this process and in others.

    Attributes:
        protocol: the library's name of the way it copies on this chip.
        store: URL of the store at which its engines meet; "" = none given.
    """

    library: ModuleType
    protocol: str
    store: str


class Graph(Protocol):
    """Captured work. A replay reads and writes the memory of the capture."""

    def replay(self, lengths: Sequence[int] = ()) -> None:
        """Launch it again.

        Args:
            lengths: keys of each row, the new token included; only for `lengths_on_host`.
        """
        ...


class Ranges(Protocol):
    """Marks named ranges of time for profilers of others; ranges nest."""

    def begin(self, name: str) -> None: ...
    def end(self) -> None: ...


class SideStream(Protocol):
    """A second stream next to the one of the steps; events alone order their work. Work that is
    launched on it during the capture of a graph is a part of that graph."""

    def record_event(self) -> object:
        """An event after everything launched so far on the current stream."""
        ...

    def run(self, work: Callable[[], object], after: object) -> object:
        """Launch work on this stream, after an event and after its earlier work.

        returns: the event after it.
        """
        ...

    def wait(self, event: object) -> None:
        """Later work on the current stream waits for the event; the host does not."""
        ...


class Platform(Protocol):
    traits: Traits

    def open(self, local_rank: int, threads: int) -> torch.device:
        """Open the device for one rank of this machine.

        Args:
            local_rank: number of the device, if devices are numbered.
            threads: CPU threads of the rank; 0 = every core it may use.

        Raises:
            ConfigError: no device has that number.
        """
        ...

    def memory(self) -> Memory: ...

    def defaults(self, model_config: ModelConfig) -> Defaults:
        """Values for flags that the user did not set."""
        ...

    def stream(self) -> AbstractContextManager[object]:
        """Work inside the context runs in order on the stream of the steps."""
        ...

    def side_stream(self) -> SideStream:
        """Another stream; only for devices with `async_launch`."""
        ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that copies to and from the device do not wait for."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start copying tensors to the host, after the work launched so far.

        returns: a function that waits for the copies and returns them; for any thread, once.
        """
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` and capture it as a graph; only if `traits.programs` is BY_SHAPE."""
        ...

    def synchronize(self) -> None:
        """Wait for all launched work."""
        ...

    def interconnect(self) -> Interconnect | None:
        """The library that copies between devices, ready for use; None = there is none.

        Raises:
            ConfigError: it is not installed, or its protocol is unknown.
        """
        ...

    def ranges(self) -> Ranges:
        """Marks ranges for the profiler of the device."""
        ...


class TorchRanges:
    """Ranges for the profilers of torch and of its devices, and for VTune if torch is
    built for it."""

    def __init__(self) -> None:
        import torch

        complete_torch()
        self._itt = torch.profiler.itt if torch.profiler.itt.is_available() else None
        self._range = torch.profiler.record_function
        self._open: list[torch.profiler.record_function] = []

    def begin(self, name: str) -> None:
        if self._itt is not None:
            self._itt.range_push(name)
        self._open.append(self._range(name))
        self._open[-1].__enter__()

    def end(self) -> None:
        self._open.pop().__exit__(None, None, None)
        if self._itt is not None:
            self._itt.range_pop()


class Host:
    """Base of devices whose work is done when a call returns, so nothing waits and nothing is
    copied."""

    def stream(self) -> AbstractContextManager[object]:
        return _NO_STREAM

    def side_stream(self) -> SideStream:
        raise NotImplementedError("the host has one stream")

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        import torch

        return torch.zeros(tuple(shape), dtype=dtype)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        here = list(tensors)
        return lambda: here

    def capture(self, work: Callable[[], None]) -> Graph:
        raise NotImplementedError("the toolkit of the host's kernels records its programs")

    def synchronize(self) -> None:
        return None

    def interconnect(self) -> Interconnect | None:
        return None

    def ranges(self) -> Ranges:
        return TorchRanges()


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
        import torch

        return torch.device("meta")

    def memory(self) -> Memory:
        return Memory(_ENDLESS_BYTES, _ENDLESS_BYTES, 0)

    def defaults(self, model_config: ModelConfig) -> Defaults:
        return Defaults("null", self.traits.dtypes, 16, 512, 128, 0.25)
