"""An all-reduce over memory of GPUs that the ranks of one machine map into each other.

The CUDA driver shares memory between processes (cuIpcGetMemHandle). For small tensors this is
faster than NCCL, and unlike NCCL's sum it has the same bits for every size.
"""

import ctypes
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from banyan.base.errors import ConfigError, DeviceError
from banyan.ops.cuda.needs import TYPES, has_triton, power_of_two

Publish = Callable[[str, bytes], list[bytes]]
"""Gives the other ranks some bytes under a name; returns the bytes of all ranks, in order."""

MAX_RANKS = 8
"""Ranks that share memory: as many as the GPUs of a machine that reach each other directly."""
_LAZY_PEERS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS"""
_HANDLE_BYTES = 64
_CHECK_S = 20.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How a tensor is divided, the same on every rank.

    Attributes:
        programs: of a call; each meets the same program of the other ranks.
        block: elements that a program adds at once.
        warps: of a program.
        slot_bytes: bytes of one of a rank's two buffers; larger tensors are not taken.
        at_once: (ranks, bytes): tensors up to so many bytes are added whole by every rank, for at
            most so many ranks; larger ones in parts.
    """

    programs: int = 32
    block: int = 1024
    warps: int = 4
    slot_bytes: int = 8 * _MIB
    at_once: tuple[tuple[int, int], ...] = ((2, 8 * _MIB), (4, _MIB // 2), (8, _MIB // 4))

    @property
    def pad_bytes(self) -> int:
        return self.programs * MAX_RANKS * 8

    @property
    def all_bytes(self) -> int:
        """Bytes that each rank shares: the flags, then two buffers."""
        return self.pad_bytes + 2 * self.slot_bytes


class PeerAllReduce:
    """Adds up tensors of the ranks. All ranks call it in the same order, on one stream each.

    Args:
        addresses: where this process sees the memory of each rank, whose flags were 0 before any
            rank could write them.
    """

    def __init__(
        self, rank: int, addresses: Sequence[int], device: torch.device, sizes: Sizes
    ) -> None:
        self.sizes = sizes
        self._rank, self._size = rank, len(addresses)
        self._pads = torch.tensor(addresses, dtype=torch.int64).to(device)
        self._buffers = self._pads + sizes.pad_bytes
        self._calls = torch.zeros(sizes.programs, dtype=torch.int64, device=device)
        self._at_once = next(most for ranks, most in sizes.at_once if len(addresses) <= ranks)

    def takes(self, x: Tensor) -> bool:
        """Whether x is small enough; equal on all ranks."""
        is_small = 0 < x.nbytes <= self.sizes.slot_bytes
        return is_small and x.dtype in TYPES and x.is_contiguous()

    def add(self, x: Tensor) -> None:
        """Replace x by the sum over the ranks."""
        from banyan.ops.cuda import all_reduce_kernels as kernels

        sizes = self.sizes
        is_whole = x.nbytes <= self._at_once
        kernel = kernels.reduce_at_once if is_whole else kernels.reduce_in_parts
        kernel[(sizes.programs,)](
            x,
            self._buffers,
            self._pads,
            self._calls,
            self._rank,
            x.numel(),
            sizes.slot_bytes // x.itemsize,
            RANKS=self._size,
            BLOCK_R=power_of_two(self._size, 2),
            BLOCK=sizes.block,
            num_warps=sizes.warps,
        )


def add_in_order(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in order, in fp32, rounded once."""
    from banyan.ops.cuda.all_reduce_kernels import add_parts

    assert parts.is_contiguous()
    out, block = torch.empty_like(parts[0]), 1024
    blocks = -(-out.numel() // block)
    add_parts[(blocks,)](parts, out, out.numel(), RANKS=len(parts), BLOCK=block)
    return out


@dataclass(frozen=True)
class _Facts:
    """What a rank says of itself.

    Attributes:
        machine: of its processes.
        device: number of its GPU.
        why: it cannot share memory because of this; "" = it can.
        handle: of its memory, as hexadecimal digits.
    """

    machine: str
    device: int
    why: str = ""
    handle: str = ""


def own_device() -> torch.device:
    """The GPU of this rank."""
    return torch.device("cuda", torch.cuda.current_device())


def own_kind() -> str:
    """The name of this rank's GPU."""
    return torch.cuda.get_device_name()


def has_no_peers(size: int) -> str | None:
    """Why no group of so many ranks can share memory; None = one may. The same on every rank."""
    if size > MAX_RANKS:
        return f"it is for {MAX_RANKS} ranks at most"
    return None if has_triton() else "the package triton is not installed"


def open_peers(
    publish: Publish, rank: int, is_checked: bool, sizes: Sizes | None = None
) -> PeerAllReduce | str:
    """Share memory with the other ranks.

    Args:
        is_checked: a sum of known numbers shows whether the GPUs really reach each other.

    returns: why they cannot share memory, the same text on every rank, where they cannot.

    Raises:
        DeviceError: the GPUs do not answer each other.
    """
    sizes = sizes or Sizes()
    driver = _Driver()
    mine = _Facts(_machine(), own_device().index)
    everyone = _exchange(publish, "places", mine)
    own, why = 0, _obstacle(mine, everyone)
    try:
        own = 0 if why else driver.allocate(sizes.all_bytes)
        mine = replace(mine, why=why, handle=driver.handle(own).hex() if own else "")
    except DeviceError as error:
        mine = replace(mine, why=str(error))
    everyone = _exchange(publish, "memory", mine)
    if why := _first(everyone):
        return why
    try:
        addresses = [
            own if peer == rank else driver.open(bytes.fromhex(facts.handle))
            for peer, facts in enumerate(everyone)
        ]
    except DeviceError as error:
        mine, addresses = replace(mine, why=str(error)), []
    if why := _first(_exchange(publish, "peers", mine)):
        return why
    found = PeerAllReduce(rank, addresses, own_device(), sizes)
    if is_checked:
        mine = replace(mine, why=_wrong_sums(found, rank, len(addresses)))
        if why := _first(_exchange(publish, "sums", mine)):
            return why
    return found


def _exchange(publish: Publish, name: str, mine: _Facts) -> list[_Facts]:
    texts = publish(name, json.dumps(asdict(mine)).encode())
    return [_Facts(**json.loads(text)) for text in texts]


def _first(everyone: Sequence[_Facts]) -> str:
    return next((facts.why for facts in everyone if facts.why), "")


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.uname().nodename}"


def _obstacle(mine: _Facts, everyone: Sequence[_Facts]) -> str:
    if any(facts.machine != mine.machine for facts in everyone):
        return "the ranks are on several machines"
    for facts in everyone:
        is_own = facts.device == mine.device
        if not is_own and not torch.cuda.can_device_access_peer(mine.device, facts.device):
            return f"GPU {mine.device} cannot read memory of GPU {facts.device}"
    return ""


def _wrong_sums(peers: PeerAllReduce, rank: int, size: int) -> str:
    """Add known numbers by both kernels; "" = the sums are right.

    Raises:
        DeviceError: a rank does not see what another one writes.
    """
    counts = (4096, peers.sizes.slot_bytes // 4)
    tensors = [torch.arange(n, device=own_device()).float() % 1000 * (rank + 1) for n in counts]
    for x in tensors:
        peers.add(x)
    done = torch.cuda.Event()
    done.record()
    last = time.monotonic() + _CHECK_S
    while not done.query():
        if time.monotonic() > last:
            raise DeviceError(
                f"--enable-p2p-check: the GPUs did not answer each other within {_CHECK_S:g} s",
                hint="give --disable-custom-all-reduce",
            )
        time.sleep(0.001)
    factor = size * (size + 1) // 2
    for x in tensors:
        if not torch.equal(x, torch.arange(len(x), device=x.device).float() % 1000 * factor):
            return f"the GPUs read wrong numbers from each other (rank {rank})"
    return ""


class _Driver:
    """Calls of the CUDA driver that torch does not offer.

    Raises:
        ConfigError: the driver's library is missing.
    """

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"the CUDA driver cannot be loaded: {error}") from error
        torch.cuda.synchronize()  # makes torch's context the current one of this thread

    def allocate(self, size_bytes: int) -> int:
        """Zeroed memory of this process's GPU, kept until the process ends."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        zeroed = (address, ctypes.c_ubyte(0), ctypes.c_size_t(size_bytes))
        self._call("cuMemsetD8_v2", *zeroed)
        torch.cuda.synchronize()
        return address.value

    def handle(self, address: int) -> bytes:
        """What another process opens to reach this memory."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Address of another process's memory in this one, for kernels of this process's GPU."""
        address = ctypes.c_uint64()
        given, flags = _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEERS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, flags)
        return address.value

    def _call(self, name: str, *arguments: object) -> None:
        """
        Raises:
            DeviceError: the driver reports an error.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DeviceError(f"{name} failed: {(text.value or b'?').decode()} ({code})")


class _Handle(ctypes.Structure):
    """CUipcMemHandle"""

    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]
