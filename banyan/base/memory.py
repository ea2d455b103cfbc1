"""Memory of this process: return freed memory to the system, and report slow garbage collections.

Loading a model frees much memory that is scattered between live objects. glibc keeps it until
`malloc_trim` is called. Other C libraries have no such call and do not need it. The start also runs
much library code only once; those pages are backed by files, so the system can load them again.
"""

import ctypes
import gc
import re
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import ConfigError
from banyan.base.log import logger

log = logger(__name__)

_DONTNEED = 4
_SMAPS = Path("/proc/self/smaps")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(/.*|\[.*)?")


def give_back() -> None:
    """Return whole pages of freed memory to the system; takes milliseconds."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    trim(0)


def runs_the_process() -> bool:
    """Whether this thread is the main one: an engine's is, if the process is its own."""
    return threading.current_thread() is threading.main_thread()


def unmap_files() -> None:
    """Drop the resident pages of library code and constants; takes ten milliseconds.

    They stay in the system's page cache while it has space; then the next use of a page takes one
    microsecond. Without /proc/self/smaps nothing happens.
    """
    try:
        mappings = list(_as_on_disk(_SMAPS.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in mappings:
        advise(first, last - first, _DONTNEED)


def address_space_bytes() -> int:
    """Address space that this process uses now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def bound_address_space(limit_bytes: int) -> None:
    """Let allocations above `limit_bytes` fail; a lower limit of the system (`ulimit -v`) stays."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hard))


def let_go() -> None:
    """Do both, in a process that has just started or pauses."""
    give_back()
    unmap_files()


def _as_on_disk(smaps: str) -> Iterator[tuple[int, int]]:
    """Address ranges of private read-only file mappings without changed pages.

    Relocations and breakpoints of a debugger change pages; dropping these would lose the change.
    """
    first = last = 0
    is_read_only = False
    for line in smaps.splitlines():
        if found := _MAPPING.fullmatch(line):
            first, last = int(found[1], 16), int(found[2], 16)
            is_read_only = found[3] in ("r-xp", "r--p") and (found[4] or "").startswith("/")
        elif is_read_only and line.startswith("Anonymous:") and line.split()[1] == "0":
            yield first, last


class SlowGc:
    """A `gc.callbacks` entry that logs slow collections (--gc-warning-threshold-secs).

    Args:
        threshold_s: longer collections are logged.
    """

    def __init__(self, threshold_s: float, clock: Clock | None = None) -> None:
        self._threshold_s = threshold_s
        self._clock = clock or WallClock()
        self._began_s = 0.0

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        """Called by the interpreter before and after each collection."""
        if phase == "start":
            self._began_s = self._clock.now()
            return
        took_s = self._clock.now() - self._began_s
        if took_s > self._threshold_s:
            log.warning(
                "garbage collection took seconds=%.3f generation=%d freed=%d",
                took_s,
                info["generation"],
                info["collected"],
            )


def set_gc_threshold(thresholds: Sequence[int]) -> None:
    """Set one to three thresholds of this process's collector; () = leave the interpreter's.

    Raises:
        ConfigError: more than three.
    """
    if len(thresholds) > 3:
        raise ConfigError(f"--gc-threshold takes one to three numbers, got {len(thresholds)}")
    if thresholds:
        gc.set_threshold(*thresholds)


def report_slow_gc(threshold_s: float) -> None:
    """Log slow collections of this process from now on; 0 = none."""
    if threshold_s > 0:
        gc.callbacks.append(SlowGc(threshold_s))
