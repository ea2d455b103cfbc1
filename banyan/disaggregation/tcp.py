"""--disaggregation-transfer-backend tcp: plain connections, nothing to install.

mooncake and nixl use the same connections for control, and a transfer engine for the pages.
"""

import socket
from collections.abc import Callable

from banyan.base.log import logger
from banyan.base.os import is_loopback
from banyan.disaggregation.decode_side import DecodeSide
from banyan.disaggregation.prefill_side import PrefillSide
from banyan.disaggregation.transfer import OpenEngine, TransferOptions
from banyan.kv_transfer.page_mover import PageMover, Pages

log = logger(__name__)

_ANYWHERE = ("0.0.0.0", "::", "")


def open_tcp(pages: Pages, options: TransferOptions, wake: Callable[[], None]) -> PageMover:
    """ConfigError if a prefill server cannot listen."""
    kind = PrefillSide if options.is_prefill else DecodeSide
    return kind(pages, options, wake)


def open_with_engine(
    open_engine: OpenEngine, pages: Pages, options: TransferOptions, wake: Callable[[], None]
) -> PageMover:
    """A mover whose pages are written by a transfer engine."""
    host = options.host
    if host in _ANYWHERE:
        host = socket.gethostbyname(socket.gethostname())
    engine = open_engine(host, options)
    if not options.is_prefill:
        log.warning(
            "%s lets anyone who reaches its ports at %s write to, and read, the memory that pages "
            "land in%s; pages are checked, and not encrypted",
            engine.name,
            host,
            " (other users of this machine too)" * is_loopback(host),
        )
    kind = PrefillSide if options.is_prefill else DecodeSide
    return kind(pages, options, wake, engine)
