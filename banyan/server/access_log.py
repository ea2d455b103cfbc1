"""Lines about exchanges: one for each (--log-level-http), and one for each request that is refused
before it could begin (--log-requests). Knows no routes.
"""

import logging
import time

from banyan.base.log import logger, printable
from banyan.config.schema import ObserveConfig
from banyan.frontend.request_log import write_line
from banyan.server.exchange import Exchange

log = logger(__name__)

_PATH_CHARS = 200
_REFUSED = 400


class AccessLog:
    """
    Args:
        level: "info" and "debug" show a line for each exchange, whatever --log-level is.
    """

    def __init__(self, level: str) -> None:
        self._shows = level in ("debug", "info")
        if self._shows:
            log.setLevel(logging.INFO)

    def tell(self, exchange: Exchange, has_begun: bool, observe: ObserveConfig) -> None:
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
                *(time.monotonic() - exchange.began_s, exchange.peer, exchange.id),
            )
        if observe.log_requests and exchange.status >= _REFUSED and not has_begun:
            facts = {
                "id": exchange.id,
                "route": path,
                "status": exchange.status,
                "reason": exchange.refusal or None,
                "peer": exchange.peer,
            }
            write_line("request refused", facts, observe.log_format == "json")
