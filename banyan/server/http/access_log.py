"""Lines about exchanges: one for each (--log-level-http), one for each request that is refused
before it could begin (--log-requests), and, without being asked, one for the first of each kind
that is refused or not honoured in full, so that a misconfigured client is seen. Knows no routes.
"""

import logging
import time

from banyan.base.log import logger, printable
from banyan.config.serving import ObserveConfig
from banyan.engine_client.request_log import write_line
from banyan.server.http.exchange import HttpExchange

log = logger(__name__)

_PATH_CHARS = 200
_REFUSED = 400
_KIND = ("status", "reason", "field")
_ONCE = {"told": "the first of its kind"}
MAX_KINDS = 100
"""Of refusals and warnings that leave a line; clients make them up."""


class AccessLog:
    """
    Args:
        level: "info" and "debug" show a line for each exchange, whatever --log-level is.
    """

    def __init__(self, level: str) -> None:
        self._told: set[tuple[object, ...]] = set()
        self._shows = level in ("debug", "info")
        if self._shows:
            log.setLevel(logging.INFO)

    def tell(self, exchange: HttpExchange, has_begun: bool, observe: ObserveConfig) -> None:
        """An exchange has ended.

        Args:
            has_begun: a request of it went to the engine, whose end is logged there.
            observe: as it is now; operators may change it.
        """
        path = printable(exchange.path, _PATH_CHARS)
        if self._shows:
            log.info(
                "http method=%s path=%s status=%d seconds=%.3f peer=%s id=%s",
                *(printable(exchange.method, 20), path, exchange.status),
                *(time.monotonic() - exchange.began_s, exchange.peer, exchange.context.id),
            )
        as_json = observe.log_requests and observe.log_format == "json"
        place = printable(exchange.route, _PATH_CHARS) or path
        for text in exchange.context.warnings:
            if self._is_new("warning", place, text.partition(":")[0]):
                what = printable(text, _PATH_CHARS)
                write_line("not honoured in full", {"route": place, "what": what, **_ONCE}, as_json)
        if exchange.status < _REFUSED or has_begun or exchange.is_probe:
            return
        facts = {
            "id": exchange.context.id,
            "route": path,
            "status": exchange.status,
            "reason": exchange.refusal or None,
            "field": printable(exchange.at_fault, _PATH_CHARS) or None,
            "peer": exchange.peer,
        }
        if observe.log_requests:
            write_line("request refused", facts, as_json)
        elif self._is_new("refusal", place, *(facts[name] for name in _KIND)):
            write_line("request refused", {**facts, **_ONCE}, as_json)

    def _is_new(self, *kind: object) -> bool:
        """Whether this kind has not been told of, and there is room to remember it."""
        if kind in self._told or len(self._told) > MAX_KINDS:
            return False
        self._told.add(kind)
        if len(self._told) > MAX_KINDS:
            write_line("too many kinds of refusals and warnings", {"told": MAX_KINDS}, False)
            return False
        return True
