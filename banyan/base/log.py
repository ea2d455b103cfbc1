"""Logging: one line per event that a human would act on, key=value, with a role prefix."""

import logging
import sys
from collections.abc import Iterable

_ALWAYS = logging.CRITICAL + 1
_FORMAT = "[%(asctime)s %(role)s] %(message)s"
BARE = {"is_bare": True}
"""`extra` of a line that stands without time and role: records that programs read."""


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
    """Warns of each thing once: what many layers have in common is no news from each of them."""

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._told = log, set[str]()

    def __call__(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._log.warning("%s", text)


def set_level(level: str) -> None:
    """Show lines of `level` ("debug" … "error") and above from here on, in this process."""
    logging.getLogger("banyan").setLevel(level.upper())


def printable(text: str, limit: int = 200) -> str:
    """`text` made safe for a log line: control characters escaped, cut at `limit` characters."""
    safe = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return safe if len(text) <= limit else safe[:limit] + "…"
