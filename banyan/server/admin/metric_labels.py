"""Labels that requests bring for their metrics: names that the operator has listed, in one header.

Their values are bounded in length and number, since each new set of them is one more of every
figure. They hold for the task of one exchange and those that it starts. Knows no figures.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

from banyan.base.errors import ConfigError, RequestError
from banyan.base.json_types import is_object
from banyan.base.log import logger, printable
from banyan.config.serving import ObserveConfig
from banyan.server.http.exchange import HttpExchange

log = logger(__name__)

MOST_SETS = 100
"""Different sets of values that are told apart; later ones count as OTHER."""
LONGEST = 100
"""Characters of a value."""
OTHER = "other"
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_NAME = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN = ("le", "model_name", "engine_type", "cache_source", "tp_rank", "pp_rank", "dp_rank")


class CustomLabels:
    """
    Args:
        header: of requests; a JSON object of texts.
        names: of labels that it may have; others are left out.
    """

    def __init__(self, header: str, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.none = ("",) * len(self.names)
        """Values of a request that brings none."""
        self._header = header
        self._sets: set[tuple[str, ...]] = {self.none}
        self._now: ContextVar[tuple[str, ...]] = ContextVar("metric labels", default=self.none)

    @contextlib.contextmanager
    def context(self, exchange: HttpExchange) -> Iterator[None]:
        """What is counted within has the labels of this request.

        Raises:
            RequestError: the header is no JSON object, or a listed name has no short text.
        """
        given = exchange.header(self._header.encode())
        before = self._now.set(self._read(given) if given else self.none)
        try:
            yield
        finally:
            self._now.reset(before)

    def now(self) -> tuple[str, ...]:
        """A value for each name, "" where the request brings none."""
        return self._now.get()

    def _read(self, text: str) -> tuple[str, ...]:
        try:
            found: object = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not is_object(found):
            raise RequestError(
                f"The header {self._header} must be a JSON object of texts.", param=self._header
            )
        values = tuple(self._value(name, found.get(name, "")) for name in self.names)
        if values not in self._sets:
            if len(self._sets) > MOST_SETS:
                return (OTHER,) * len(self.names)
            self._sets.add(values)
            if len(self._sets) > MOST_SETS:
                log.warning(
                    "metrics have %d sets of custom labels; others count as %r", MOST_SETS, OTHER
                )
        return values

    def _value(self, name: str, value: object) -> str:
        # half a surrogate pair could never be told to anybody, and would end every later /metrics
        if not isinstance(value, str) or len(value) > LONGEST or not value.isprintable():
            raise RequestError(
                f"{name} in the header {self._header} must be a text of at most {LONGEST} "
                "printable characters.",
                param=self._header,
            )
        return value


def open_labels(observe: ObserveConfig) -> CustomLabels | None:
    """None where no figure has any."""
    if not observe.metrics or not observe.label_names:
        return None
    return CustomLabels(observe.labels_header.lower(), observe.label_names)


def check_labels(observe: ObserveConfig) -> None:
    """Raises:
    ConfigError: a name or the header cannot be one.
    """
    for name in observe.label_names:
        if not _NAME.fullmatch(name) or name in _TAKEN or observe.label_names.count(name) > 1:
            raise ConfigError(
                f"--tokenizer-metrics-allowed-custom-labels {printable(name, 80)!r}: a label has a "
                "name of letters, digits and _, once, and none that figures have anyway "
                f"({', '.join(_TAKEN)})"
            )
    if not _HEADER.fullmatch(observe.labels_header):
        raise ConfigError(
            f"--tokenizer-metrics-custom-labels-header {printable(observe.labels_header, 80)!r}: a "
            "header's name has letters, digits and -"
        )
