"""The memory of this process: what a start leaves behind goes back to the system.

Loading frees much that lies scattered between what stays. glibc keeps such memory for itself until
it is asked; other C libraries have no such call and need none. And it runs much of the libraries'
code once: those pages are files', so the system has them again when they are run.
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


def unmap_code() -> None:
    """Let go of the pages of libraries' code that are in use. They stay in the system's cache of
    files while that has room; the next run of one takes a microsecond. Where the system does not
    tell what is mapped, nothing happens."""
    try:
        mappings = list(_code(_SMAPS.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in mappings:
        advise(first, last - first, _DONTNEED)


def _code(smaps: str) -> Iterator[tuple[int, int]]:
    """Addresses of files' code; of what differs from its file (a debugger's marks) none."""
    first = last = 0
    is_code = False
    for line in smaps.splitlines():
        if found := _MAPPING.fullmatch(line):
            first, last = int(found[1], 16), int(found[2], 16)
            is_code = found[3] == "r-xp" and (found[4] or "").startswith("/")
        elif is_code and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield first, last
