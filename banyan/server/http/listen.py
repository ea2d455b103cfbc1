"""The HTTP listener: the bound socket, the check of who can reach it, and uvicorn on top."""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import uvicorn

from banyan.base.errors import CapacityError, ConfigError
from banyan.base.log import logger
from banyan.base.os import is_loopback
from banyan.config.schema import ServerConfig
from banyan.server.http.app import App
from banyan.server.http.auth import ANY
from banyan.server.http.connection import connections
from banyan.server.http.tls import tls_context

log = logger(__name__)

_USER_TIMEOUT_MS = 60_000
"""The kernel drops a connection whose client acknowledges nothing for this long."""

_BACKLOG = 2048

CLOSING_S = 1.0
"""Time for last events to reach clients and for connections to close."""

Application = Callable[..., Awaitable[Any]]


def bind(server: ServerConfig) -> socket.socket:
    """A listening socket on the configured address."""
    where = f"{server.host}:{server.port}"
    try:
        found = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
    except OSError as error:
        raise ConfigError(
            f"--host {server.host!r} is no address of this machine: {error}"
        ) from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise CapacityError(
                f"{where} is in use", hint="Stop what listens there, or choose another --port"
            ) from None
        raise ConfigError(f"cannot listen on {where}: {error}") from None
    listener.setblocking(False)
    return listener


def check_exposure(server: ServerConfig) -> None:
    """Warn if anyone else can reach a server without a key.

    Raises:
        ConfigError: under --require-key.
    """
    if server.has_keys:
        return
    if ANY in server.allowed_origins:
        log.warning("any web page in a browser here can use this server; give --api-key as well")
    if is_loopback(server.host):
        return
    advice = "Give --api-key, or bind --host 127.0.0.1"
    if server.require_key:
        raise ConfigError(f"--host {server.host} without a key, under --require-key", hint=advice)
    rule = "!" * 78
    for line in (rule, f"Anyone who reaches {server.host} can use this server. {advice}.", rule):
        log.warning("%s", line)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers; the server process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def web_server(
    app: Application,
    keep_alive_s: int,
    closing_s: float,
    encryption: ssl.SSLContext | None = None,
) -> uvicorn.Server:
    """uvicorn over `app`; `serve([listener])` runs it until `should_exit`.

    Args:
        closing_s: time for connections to close in order.
        encryption: None = no TLS.
    """
    config = uvicorn.Config(
        app,
        http=connections(),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=int(closing_s),
    )
    config.load()
    config.ssl = encryption
    return _Uvicorn(config)


class HttpListener:
    """Serves `app` over HTTP on a bound socket.

    Raises:
        ConfigError: from the constructor, if the TLS files or flags are wrong.
    """

    def __init__(self, app: App[Any], listener: socket.socket, server: ServerConfig) -> None:
        self.app = app
        self.web = web_server(app, server.keep_alive_s, CLOSING_S, tls_context(server))
        self.url = address_of(listener, server.host, server.scheme)
        self._listener = listener
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self.web.serve([self._listener]))

    async def drain(self) -> None:
        await self.app.wait_idle()

    def end_all(self, text: str) -> None:
        self.app.end_all(text)

    async def stop(self, is_now: bool) -> None:
        self.web.should_exit = True
        self.web.force_exit = is_now
        if self._serving is not None:
            await self._serving


def address_of(listener: socket.socket, host: str, scheme: str) -> str:
    """The URL of a bound socket."""
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{listener.getsockname()[1]}"
