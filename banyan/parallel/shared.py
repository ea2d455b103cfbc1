"""Shared memory for the ranks of one machine.

Rank 0 creates an anonymous file in memory and a link to it at the rendezvous address. The link is
removed once all ranks have opened it. The kernel frees the memory when the last rank ends, even
after a crash.
"""

import fcntl
import os
import time

from banyan.base.errors import CapacityError, DeviceError
from banyan.base.os import anonymous_memory
from banyan.ops.cpu.collectives import (
    SLOT_BYTES,
    SharedMemory,
    meet,
    most_ranks,
    segment_bytes,
)
from banyan.ops.cpu.library import Library
from banyan.parallel.collectives import Rendezvous, Transport

_LOOK_S = 0.005


def declines(rendezvous: Rendezvous) -> str | None:
    if not rendezvous.path:
        return "ranks may be on several machines"
    library = rendezvous.recorder
    if not isinstance(library, Library):
        return "it needs the compiled kernels"
    if rendezvous.size > most_ranks(library):
        return f"it is for {most_ranks(library)} ranks at most"
    return None


def open_shared(rendezvous: Rendezvous) -> SharedMemory:
    """
    Raises:
        DeviceError: a rank did not come, or the segment has the wrong size.
        CapacityError: there is not enough memory.
    """
    library = rendezvous.recorder
    assert isinstance(library, Library)
    slot_bytes = rendezvous.slot_bytes or SLOT_BYTES
    link = f"{rendezvous.path}.segment"
    size_bytes = segment_bytes(library, rendezvous.size, slot_bytes)
    file = _make(size_bytes) if rendezvous.rank == 0 else _find(link, rendezvous.timeout_s)
    found = os.fstat(file).st_size
    if found != size_bytes:
        raise DeviceError(f"the segment at {link} has {found} bytes, {size_bytes} were expected")
    memory = SharedMemory(
        library,
        file,
        rendezvous.rank,
        rendezvous.size,
        rendezvous.timeout_s,
        rendezvous.is_crowded,
        slot_bytes=slot_bytes,
    )
    if rendezvous.rank == 0:
        os.symlink(f"/proc/{os.getpid()}/fd/{file}", link)
    try:
        meet(memory)
    finally:
        if rendezvous.rank == 0:
            os.unlink(link)
    return memory


def _make(size_bytes: int) -> int:
    try:
        file = anonymous_memory("banyan-ranks", size_bytes, can_seal=True)
    except OSError as error:
        raise CapacityError(
            f"no {size_bytes} bytes of memory for the ranks to share: {error.strerror}"
        ) from error
    # A truncated file would crash the ranks that have mapped it.
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return file


def _find(link: str, timeout_s: float) -> int:
    """Open the file that rank 0 links at `link`; waits until the link exists."""
    last = time.monotonic() + timeout_s
    while True:
        try:
            return os.open(link, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if time.monotonic() >= last:
                raise DeviceError(f"rank 0 did not come to {link} within {timeout_s:g} s") from None
        except OSError as error:
            raise DeviceError(
                f"the ranks' shared memory at {link} cannot be opened: {error.strerror}"
            ) from error
        time.sleep(_LOOK_S)


SHARED = Transport(declines=declines, open=open_shared)
