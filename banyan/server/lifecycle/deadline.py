"""The end of a process at a stated time after a signal, also where no line of Python runs any more
because a thread of a native library keeps the interpreter's lock. Knows no server.

Python learns of a signal when a thread next takes the lock, so what bounds that must be code
without Python. Three parts of the system do it: faulthandler, whose handler needs no lock, writes
into a pipe and passes the signal on to Python; the kernel signals that there is something to read
(O_ASYNC); and that signal's handler is the C library's `alarm`. A handler is called with its
signal's number, which `alarm` takes for seconds; its own signal ends the process.
"""

import ctypes
import faulthandler
import fcntl
import math
import os
import signal
from collections.abc import Iterable

STUCK = signal.SIGIO
"""Whose number is how many seconds a process without Python still has: 29."""


def bound(numbers: Iterable[signal.Signals]) -> None:
    """From here on one of these signals ends the process within STUCK seconds, unless `put_off` is
    called. Their handlers have to be set before."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(STUCK, ctypes.cast(libc.alarm, ctypes.c_void_p))
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETSIG, STUCK)
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    for number in numbers:
        faulthandler.register(number, writer, all_threads=False, chain=True)


def put_off(seconds: float) -> None:
    """Python runs: the process has this many seconds more."""
    signal.alarm(math.ceil(seconds))
