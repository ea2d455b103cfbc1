"""Logging: one line per event, key=value, with the role of the process as prefix.

With --log-format json each line on standard error is a JSON object. This package writes objects
itself. What else writes there (libraries, warnings, stack traces, child processes) writes into a
pipe, and a small process (`python -m banyan.base.log`) makes an object of each such line. It ends
with the last writer, so the last lines of a crash arrive too.
"""

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import IO

_ALWAYS = logging.CRITICAL + 1
_FORMAT = "[%(asctime)s %(role)s] %(message)s"
BARE = {"is_bare": True}
"""`extra` of a line without time and role: a record for programs."""


_MAX_LINE_BYTES = 16 << 20
_LAST_LINES_S = 2.0
"""Time for the last lines of a process that ends."""


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if record.__dict__.get("is_bare"):
            return record.getMessage()
        return super().format(record)


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        if record.__dict__.get("is_bare"):
            return record.getMessage()
        level = "info" if record.levelno == _ALWAYS else record.levelname.lower()
        fields = {"logger": record.name}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _object(record.created, level, self._role, record.getMessage(), fields)


class _RoleFilter(logging.Filter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = self._role
        return True


def logger(name: str) -> logging.Logger:
    """The logger of one module; `name` is the module's __name__."""
    return logging.getLogger(name)


def start_logging(role: str, level: str = "info", as_json: bool = False) -> None:
    """Send the package's log lines to stderr, marked with this process's role ("rank1").

    Args:
        as_json: each line is a JSON object.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter(role) if as_json else _Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S")
    )
    handler.addFilter(_RoleFilter(role))
    root = logging.getLogger("banyan")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def log_always(log: logging.Logger, lines: Iterable[str]) -> None:
    """Log lines at every log level."""
    for line in lines:
        log.log(_ALWAYS, "%s", line)


class Once:
    """Logs each warning once, even if many layers issue it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._logged = log, set[str]()

    def __call__(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self._log.warning("%s", text)


def set_level(level: str) -> None:
    """Set the log level of this process ("debug" … "error")."""
    logging.getLogger("banyan").setLevel(level.upper())


def printable(text: str, limit: int = 200) -> str:
    """`text` made safe for a log line: control characters escaped, cut at `limit` characters."""
    safe = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return safe if len(text) <= limit else safe[:limit] + "…"


def _object(moment_s: float, level: str, role: str, text: str, fields: dict[str, str]) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment_s))
    line = {"time": f"{moment}.{int(moment_s % 1 * 1000):03}+00:00", "level": level, "role": role}
    return json.dumps({**line, "message": text, **fields})


def wrap_standard_error() -> None:
    """Send what this process and its future children write to standard error through
    `wrap_lines`, in a process of its own."""
    reading, writing = os.pipe()
    original = os.dup(2)
    wrapper = subprocess.Popen([sys.executable, "-m", "banyan.base.log"], stdin=reading)
    os.dup2(writing, 2)
    os.close(reading)
    os.close(writing)

    def finish() -> None:
        sys.stderr.flush()
        os.dup2(original, 2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            wrapper.wait(_LAST_LINES_S)

    atexit.register(finish)


def wrap_lines(source: IO[bytes], target: IO[bytes]) -> None:
    """Copy lines until the end of `source`; a line that is no JSON object becomes one."""
    while line := source.readline(_MAX_LINE_BYTES):
        text = line.decode(errors="replace").rstrip("\n")
        if text and not _is_object(text):
            text = _object(time.time(), "info", "other", text, {})
        if text:
            target.write(f"{text}\n".encode())
            target.flush()


def _is_object(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it ends when nobody can write any more
    wrap_lines(sys.stdin.buffer, sys.stderr.buffer)
