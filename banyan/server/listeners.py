"""The listeners of a server. Each one accepts requests on a socket: HTTP, or gRPC (--grpc-mode)."""

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from banyan.base.table import Table
from banyan.config.schema import ServerConfig
from banyan.server.http.listen import bind
from banyan.server.state import ServerState

HTTP = "http"
GRPC = "grpc"


class Listener(Protocol):
    """Accepts requests on one socket."""

    @property
    def url(self) -> str:
        """The address that clients connect to."""
        ...

    async def start(self) -> None:
        """Accept connections. Requests are refused with a reason until the service is ready."""
        ...

    async def drain(self) -> None:
        """Return when no request is open, apart from health checks."""
        ...

    def end_all(self, text: str) -> None:
        """End all open requests with an error that says `text`."""
        ...

    async def stop(self, is_now: bool) -> None:
        """Close all connections, and return when they are closed.

        Args:
            is_now: do not give them time to close in order.
        """
        ...


OpenListener = Callable[[ServerState, socket.socket], Listener]

LISTENERS: Table[OpenListener] = Table(
    "listener",
    {
        HTTP: "banyan.server.routes:open_http_listener",
        GRPC: "banyan.server.grpc.listener:GrpcListener",
    },
)


def bind_listeners(server: ServerConfig) -> list[tuple[str, socket.socket]]:
    """The names of the listeners that `server` asks for, each with its bound socket.

    The first one has the server's own port.

    Raises:
        CapacityError: a port is in use.
        ConfigError: an address cannot be bound.
    """
    if not server.grpc_mode:
        return [(HTTP, bind(server))]
    bound = [(GRPC, bind(server))]
    if server.grpc_http_port is not None:
        try:
            bound.append((HTTP, bind(replace(server, port=server.grpc_http_port))))
        except Exception:
            bound[0][1].close()
            raise
    return bound
