"""/metrics for Prometheus, and the custom labels of requests.

No metric contains text of a request. Requests can set only labels that the operator has listed, in
one header. Their values are limited in length and number, since each new set of values adds a
series to every metric.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

from banyan.base.errors import ConfigError, RequestError
from banyan.base.json_types import is_object
from banyan.base.log import logger, printable
from banyan.config.schema import Config, ObserveConfig
from banyan.engine_client.client import Replica
from banyan.engine_client.metrics_observer import MetricsExporter
from banyan.requests.request_spec import RequestContext
from banyan.server.http.exchange import HttpExchange
from banyan.server.state import ServerState

log = logger(__name__)

MOST_SETS = 100
"""Different sets of label values; later ones count as OTHER."""
LONGEST = 100
"""Characters of a label value."""
OTHER = "other"
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_NAME = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN = ("le", "model_name", "engine_type", "cache_source", "tp_rank", "pp_rank", "dp_rank")


async def show_metrics(exchange: HttpExchange, state: ServerState) -> None:
    if state.metrics is None:
        raise RequestError(
            "This server has no metrics",
            status=404,
            code="not_enabled",
            hint="Start it with --enable-metrics.",
        )
    await exchange.whole(state.metrics.export(), 200, state.metrics.kind)


def open_metrics(
    config: Config,
    name: str,
    replicas: Callable[[], list[Replica]],
    labels: "CustomLabels | None" = None,
) -> MetricsExporter | None:
    """The metrics; None without --enable-metrics, which alone loads the library."""
    if not config.observe.metrics:
        return None
    from banyan.server.admin.prometheus import PrometheusMetrics

    return PrometheusMetrics(config, name, replicas, labels)


class CustomLabels:
    """Reads the metric labels of requests, and sets them for a request's task and its child tasks.

    Args:
        header: name of the header: a JSON object of texts.
        names: the labels to use; others are ignored.
    """

    def __init__(self, header: str, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.none = ("",) * len(self.names)
        """The values of a request without labels."""
        self._header = header
        self._sets: set[tuple[str, ...]] = {self.none}
        self._now: ContextVar[tuple[str, ...]] = ContextVar("metric labels", default=self.none)

    @contextlib.contextmanager
    def context(self, context: RequestContext) -> Iterator[None]:
        """Set the labels of this request within the block.

        Raises:
            RequestError: the header is no JSON object, or a listed label is not a short text.
        """
        given = context.headers.get(self._header, "")
        before = self._now.set(self._read(given) if given else self.none)
        try:
            yield
        finally:
            self._now.reset(before)

    def now(self) -> tuple[str, ...]:
        """A value for each label; "" if the request has none."""
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
        # isprintable: a lone surrogate cannot be encoded and would break every later /metrics
        if not isinstance(value, str) or len(value) > LONGEST or not value.isprintable():
            raise RequestError(
                f"{name} in the header {self._header} must be a text of at most {LONGEST} "
                "printable characters.",
                param=self._header,
            )
        return value


def open_labels(observe: ObserveConfig) -> CustomLabels | None:
    """None if no custom labels are configured."""
    if not observe.metrics or not observe.label_names:
        return None
    return CustomLabels(observe.labels_header.lower(), observe.label_names)


def check_labels(observe: ObserveConfig) -> None:
    """Raises:
    ConfigError: a label or the header has an illegal name.
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
