"""The shared memory of a flight recorder, and the conversion of its bytes into a journal.

Layout: magic, then two halves of equal size. Each half: uint64 number (0 = not valid; the larger
number is newer), uint64 flag (1 = continues the other half), then records as in a journal.

Separate from engine/flight_recorder.py because the server process imports it, without the engine.
"""

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from zlib import crc32

from banyan.base.errors import CapacityError
from banyan.base.os import anonymous_memory

JOURNAL_MAGIC = b"BANYANJ2"
HEAD = struct.Struct("<II")
"""Head of a record: length and CRC-32."""
RING_MAGIC = b"BANYANR1"
HALF = struct.Struct("<QQ")


class RecordingMemory:
    """Anonymous memory that a child process can inherit. Its size is set later."""

    def __init__(self) -> None:
        self.descriptor = anonymous_memory("banyan-flight-recorder")
        self._is_closed = False

    def give_size(self, size: int) -> None:
        """Set the size. Pages are allocated when they are written.

        Raises:
            CapacityError: the machine has less memory.
        """
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        try:
            if size > pages * page_bytes:  # the system would accept it and run out later
                raise OSError(errno.ENOMEM, f"this machine has {pages * page_bytes} bytes")
            os.ftruncate(self.descriptor, size)
        except OSError as error:
            raise CapacityError(
                f"no memory of {size} bytes for the flight recorder: {error.strerror}",
                hint="lower --flight-recorder-bytes; 0 = none",
            ) from None

    def read(self) -> bytes:
        """The records, as the content of a journal; b"" if there are none.

        The engine may write at the same time.
        """
        if self._is_closed:
            return b""
        size = os.fstat(self.descriptor).st_size
        starts = range(len(RING_MAGIC), size, max(1, half_bytes(size)))
        while True:
            content = os.pread(self.descriptor, size, 0)
            before = [content[at : at + HALF.size] for at in starts]
            if before == [os.pread(self.descriptor, HALF.size, at) for at in starts]:
                return journal_of(content)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            os.close(self.descriptor)


def mapped(descriptor: int) -> mmap.mmap:
    """Map the memory. Pages that were never written take no memory of the machine."""
    return mmap.mmap(descriptor, 0, mmap.MAP_SHARED)


def journal_of(content: bytes) -> bytes:
    """Convert the memory to a journal: the newer half, after the older one if it continues it."""
    if not content.startswith(RING_MAGIC):
        return b""
    half = half_bytes(len(content))
    halves = [content[at : at + half] for at in (len(RING_MAGIC), len(RING_MAGIC) + half)]
    numbered = sorted((HALF.unpack_from(part), part) for part in halves)
    parts: list[bytes] = []
    for (number, continues), part in numbered:
        if not number:
            continue
        records = list(_sound(part))
        parts = [*parts, *records[1:]] if parts and continues else records
    return JOURNAL_MAGIC + b"".join(parts) if parts else b""


def _sound(part: bytes) -> Iterator[bytes]:
    """The records of a half with their heads, up to the first incomplete one."""
    at = HALF.size
    while at + HEAD.size <= len(part):
        length, checksum = HEAD.unpack_from(part, at)
        end = at + HEAD.size + length
        if not length or end > len(part) or crc32(part[at + HEAD.size : end]) != checksum:
            return
        yield part[at:end]
        at = end


def half_bytes(size: int) -> int:
    return (size - len(RING_MAGIC)) // 2
