"""Tracing: what the server needs of whoever traces its requests. Knows no way to do it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from banyan.requests.generation import Generator
from banyan.server.http.exchange import HttpExchange

Around = Callable[[HttpExchange], AbstractContextManager[None]]
"""What the handling of one request runs within; RequestError when the request is refused for it."""


class Tracing(Protocol):
    """Called on the event loop. No span carries anything of a request's text."""

    def context(self, exchange: HttpExchange) -> AbstractContextManager[None]:
        """The span of one HTTP request, within the caller's trace where its headers name one."""
        ...

    def watch(self, generator: Generator) -> Generator:
        """`generator`, with a span for each sequence, and in it one for each of its phases."""
        ...

    def close(self) -> None:
        """Send what has not been sent yet. May take long; no call after it."""
        ...
