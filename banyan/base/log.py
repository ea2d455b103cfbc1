"""Logging: one line per event, key=value, with the role of the process as prefix."""

import logging
import sys
from collections.abc import Iterable

_ALWAYS = logging.CRITICAL + 1
_FORMAT = "[%(asctime)s %(role)s] %(message)s"
BARE = {"is_bare": True}
"""`extra` of a line without time and role: a record for programs."""


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if record.__dict__.get("is_bare"):
            return record.getMessage()
        return super().format(record)


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


def start_logging(role: str, level: str = "info") -> None:
    """Send the package's log lines to stderr, marked with this process's role ("rank1")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
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
