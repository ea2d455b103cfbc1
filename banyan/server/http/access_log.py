"""The access log.

It has a line for each HTTP request (--log-level-http), and for each request that is refused before
it reaches the engine (--log-requests). Without these flags it has a line for the first error and
warning of each kind, so that a misconfigured client is noticed.
"""

import logging
import time

from banyan.base.log import logger, printable
from banyan.config.schema import ObserveConfig
from banyan.engine_client.request_log import write_line
from banyan.server.http.exchange import HttpExchange

log = logger(__name__)

_PATH_CHARS = 200
_REFUSED = 400
_KIND = ("status", "reason", "field")
_ONCE = {"told": "the first of its kind"}
MAX_KINDS = 100
"""Kinds of errors and warnings that are logged. Clients could make up any number of them."""


class AccessLog:
    """Logs HTTP requests at their end.

    Args:
        level: "info" and "debug" log every request, whatever --log-level is.
    """

    def __init__(self, level: str) -> None:
        self._logged: set[tuple[object, ...]] = set()
        self._shows = level in ("debug", "info")
        if self._shows:
            log.setLevel(logging.INFO)

    def log_end(self, exchange: HttpExchange, has_begun: bool, observe: ObserveConfig) -> None:
        """Log the end of an HTTP request.

        Args:
            has_begun: it sent requests to the engine, which logs their end.
            observe: the current settings; operators may change them.
        """
        path = printable(exchange.path, _PATH_CHARS)
        if self._shows:
            log.info(
                "http method=%s path=%s status=%d seconds=%.3f peer=%s id=%s",
                printable(exchange.method, 20),
                path,
                exchange.status,
                time.monotonic() - exchange.began_s,
                exchange.peer,
                exchange.context.id,
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
        """Whether this kind was not logged before, and is among the first MAX_KINDS."""
        if kind in self._logged or len(self._logged) > MAX_KINDS:
            return False
        self._logged.add(kind)
        if len(self._logged) > MAX_KINDS:
            write_line("too many kinds of refusals and warnings", {"told": MAX_KINDS}, False)
            return False
        return True
