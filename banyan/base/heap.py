"""The memory of this process: what a start leaves behind goes back to the system.

Loading frees much that lies scattered between what stays. glibc keeps such memory for itself until
it is asked; other C libraries have no such call and need none. And it runs much of the libraries'
code once, and reads their tables: those pages are files', so the system has them again when they
are wanted.
"""

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_DONTNEED = 4
_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(/.*|\[.*)?")


def give_back() -> None:
    """Hand whole pages of freed memory to the system; takes milliseconds."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    trim(0)


def unmap_files() -> None:
    """Let go of the pages of libraries' code and constants that are in use; takes ten milliseconds.
    They stay in the system's cache of files while that has room; the next use of one takes a
    microsecond. Where the system does not tell what is mapped, nothing happens."""
    try:
        mappings = list(_as_on_disk(_SMAPS.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in mappings:
        advise(first, last - first, _DONTNEED)


def let_go() -> None:
    """Both: for a process that has just started, or pauses."""
    give_back()
    unmap_files()


def _as_on_disk(smaps: str) -> Iterator[tuple[int, int]]:
    """Addresses of what is mapped of files for oneself and not to write; of what differs from its
    file (addresses that were filled in, a debugger's marks) none."""
    first = last = 0
    is_read_only = False
    for line in smaps.splitlines():
        if found := _MAPPING.fullmatch(line):
            first, last = int(found[1], 16), int(found[2], 16)
            is_read_only = found[3] in ("r-xp", "r--p") and (found[4] or "").startswith("/")
        elif is_read_only and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield first, last
