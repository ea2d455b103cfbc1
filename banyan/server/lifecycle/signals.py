"""Signals of the server process: the deadline after a signal to end, and the operator's SIGQUIT
handler (--custom-sigquit-handler).

The deadline also holds if no line of Python runs any more, because a thread of a native library
keeps the interpreter's lock. Python handles a signal only when a thread takes the lock, so the
bound must work without Python. Three parts of the system do it: faulthandler, whose handler needs
no lock, writes into a pipe and passes the signal on to Python; the kernel signals that there is
something to read (O_ASYNC); and the handler of that signal is the C library's `alarm`. A handler is
called with the number of its signal, which `alarm` takes as seconds; SIGALRM ends the process.
"""

import ctypes
import faulthandler
import fcntl
import math
import os
import signal
from collections.abc import Iterable
from types import FrameType

from banyan.base.log import logger, printable
from banyan.base.table import load_named

log = logger(__name__)

STUCK = signal.SIGIO
"""Its number is the seconds that a process without running Python has left: 29."""


def set_deadline_on(numbers: Iterable[signal.Signals]) -> None:
    """From now on each of these signals ends the process within STUCK seconds, unless
    `extend_deadline` is called. Install their handlers before."""
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


def extend_deadline(seconds: float) -> None:
    """Python runs: give the process this many more seconds."""
    signal.alarm(math.ceil(seconds))


def install_sigquit_handler(name: str, checkpoint: str) -> None:
    """Call the operator's function on SIGQUIT, as SGLang does, with the signal's number and frame.

    It runs in the main thread. An exception in it is logged.

    Raises:
        ConfigError: the function does not exist, or it lies in the checkpoint's folder.
    """
    handler = load_named("--custom-sigquit-handler", name, checkpoint)

    def call(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except Exception:
            log.exception("--custom-sigquit-handler %s failed", printable(name))

    signal.signal(signal.SIGQUIT, call)
