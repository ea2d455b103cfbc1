"""Segments: files of several pages; each page has a head with its name, and a checksum.

Creating a file costs more than writing a page. So up to PAGES pages are written to one file, which
has a name (hard link) for each of them: a page exists while its name exists, and the file goes with
its last name. Without hard links, or if every page is flushed to disk, a segment is one page.

    record: magic 8 | identity 32 | bytes of the page, u64 | bytes of its name, u8 | name
            | checksum SUM_BYTES | page
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from banyan.kv_transfer.checksum import SUM_BYTES, checksum

PAGES = 16
"""Pages of one segment. They are evicted together, so they should be of about the same age."""
_MAGIC = b"BANYANP3"
_FIXED = 8 + 32 + 8 + 1
_LONGEST = _FIXED + 255 + SUM_BYTES
"""Longest head and checksum of a page."""
_OPEN_S = 60.0
"""A segment takes no more pages this long after its first."""


class PageIO(Protocol):
    """Moves the bytes of files. `write` and `read` may run at once, in two threads."""

    def write(self, descriptor: int, at: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write all `parts`, one after another, from byte `at` of a file on."""
        ...

    def read(self, descriptor: int, at: int, size: int) -> bytes:
        """Read up to `size` bytes from byte `at` of a file on."""
        ...

    def close(self) -> None: ...


class SystemIO:
    """PageIO by system calls."""

    def write(self, descriptor: int, at: int, parts: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:  # once, unless the disk takes less
            done = os.pwritev(descriptor, left, at)
            at += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left:
                left[0] = left[0][done:]

    def read(self, descriptor: int, at: int, size: int) -> bytes:
        return os.pread(descriptor, size, at)

    def close(self) -> None:
        pass


def head_of(identity: bytes, name: bytes, size: int) -> bytes:
    """Head of a page of `size` bytes, before its checksum."""
    return _MAGIC + identity + size.to_bytes(8, "little") + bytes((len(name),)) + name


def record_bytes(name: bytes, size: int) -> int:
    """Size of the record of a page of `size` bytes."""
    return _FIXED + len(name) + SUM_BYTES + size


def find_page(io: PageIO, descriptor: int, size: int, identity: bytes, name: bytes) -> bytes | None:
    """The page of this name in a segment of `size` bytes; None if it is missing or damaged."""
    at, before = 0, _MAGIC + identity
    for _ in range(PAGES):
        head = os.pread(descriptor, _LONGEST, at)
        if len(head) < _FIXED or not head.startswith(before):
            return None
        held = int.from_bytes(head[40:48], "little")
        page = at + _FIXED + head[48] + SUM_BYTES
        if page + held > size:
            return None
        if head[_FIXED : _FIXED + head[48]] == name:
            stored = head[page - at - SUM_BYTES : page - at]
            content = io.read(descriptor, page, held)
            whole = len(content) == held
            is_right = whole and stored == checksum(head[: _FIXED + head[48]], content)
            return content if is_right else None
        at = page + held
    return None


class Segment:
    """A file that is being filled, by one thread.

    Args:
        draft: its name while it is filled; the file does not exist yet.
        most_bytes: no page begins after so many bytes.
        is_shared: several pages, with hard links; else one page, to whose name it is renamed.
        fsync: flush the page before it gets its name; excludes is_shared.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(
        self, draft: str, identity: bytes, io: PageIO, most_bytes: int, is_shared: bool, fsync: bool
    ) -> None:
        assert not (is_shared and fsync)
        self._draft = draft
        self._identity = identity
        self._io = io
        self._most_bytes = most_bytes
        self._is_shared = is_shared
        self._fsync = fsync
        self._began = time.monotonic()
        self._at = 0
        self._names: set[bytes] = set()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(draft, flags, 0o600)

    def takes(self, name: bytes) -> bool:
        """Whether a page of this name may be added. A name occurs once per segment: a page that was
        found damaged is written again in another segment."""
        if not self._names:
            return True
        is_full = len(self._names) >= PAGES or self._at >= self._most_bytes
        is_young = time.monotonic() - self._began < _OPEN_S
        return self._is_shared and is_young and not is_full and name not in self._names

    def add(self, name: bytes, payload: bytes | memoryview, path: str) -> None:
        """Keep a page as `path`, unless that exists by now.

        Raises:
            OSError: it is not kept, and the segment must be closed.
        """
        head = head_of(self._identity, name, len(payload))
        self._io.write(self._descriptor, self._at, [head + checksum(head, payload), payload])
        if self._fsync:
            os.fsync(self._descriptor)
        self._names.add(name)
        self._at += record_bytes(name, len(payload))
        place = os.link if self._is_shared else os.rename
        with suppress(FileExistsError):
            try:
                place(self._draft, path)
            except FileNotFoundError:  # first page in its folder
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                place(self._draft, path)

    def close(self) -> None:
        """Take no more pages; pages with names stay."""
        os.close(self._descriptor)
        with suppress(OSError):  # renamed to the page's name, or removed as stale
            os.unlink(self._draft)


def can_link(draft: str) -> bool:
    """Whether the folder of `draft` has hard links; `draft` does not exist yet."""
    second = f"{draft}.link"
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.link(draft, second)
        return os.stat(draft).st_nlink == 2
    except OSError:
        return False
    finally:
        for path in (draft, second):
            with suppress(OSError):
                os.unlink(path)
