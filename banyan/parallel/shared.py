"""How the ranks of one machine come by memory that they share.

Rank 0 makes a file that has no name and lies in memory alone, and leaves a link to it where the
ranks meet. The link goes when all have come; the memory goes with the last of them, however that
ends.
"""

import fcntl
import os
import time

from banyan.base.errors import CapacityError, DeviceError
from banyan.base.os import anonymous_memory
from banyan.ops.cpu.collectives import SLOT_BYTES, SharedMemory, most_ranks, segment_bytes
from banyan.ops.cpu.library import Library
from banyan.parallel.collectives import Meeting, Transport

_LOOK_S = 0.005


def declines(meeting: Meeting) -> str | None:
    if not meeting.path:
        return "ranks may be on several machines"
    library = meeting.recorder
    if not isinstance(library, Library):
        return "it needs the compiled kernels"
    if meeting.size > most_ranks(library):
        return f"it is for {most_ranks(library)} ranks at most"
    return None


def open_shared(meeting: Meeting) -> SharedMemory:
    """
    Raises:
        DeviceError: a rank did not come, or the segment is not what it should be.
        CapacityError: there is no memory to share.
    """
    library = meeting.recorder
    assert isinstance(library, Library)
    slot_bytes = meeting.slot_bytes or SLOT_BYTES
    link = f"{meeting.path}.segment"
    size_bytes = segment_bytes(library, meeting.size, slot_bytes)
    file = _make(size_bytes) if meeting.rank == 0 else _find(link, meeting.timeout_s)
    found = os.fstat(file).st_size
    if found != size_bytes:
        raise DeviceError(f"the segment at {link} has {found} bytes, {size_bytes} were expected")
    seat = SharedMemory(
        *(library, file, meeting.rank, meeting.size, meeting.timeout_s, meeting.is_crowded),
        slot_bytes=slot_bytes,
    )
    if meeting.rank == 0:
        os.symlink(f"/proc/{os.getpid()}/fd/{file}", link)
    try:
        seat.meet()
    finally:
        if meeting.rank == 0:
            os.unlink(link)
    return seat


def _make(size_bytes: int) -> int:
    try:
        file = anonymous_memory("banyan-ranks", size_bytes, can_seal=True)
    except OSError as error:
        raise CapacityError(
            f"no {size_bytes} bytes of memory for the ranks to share: {error.strerror}"
        ) from error
    # Nobody can take away pages that others have mapped.
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return file


def _find(link: str, timeout_s: float) -> int:
    """Open what rank 0 leaves at `link`, as soon as it is there."""
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
