"""HttpRequest: what a client sent, and the reading of its JSON body off the event loop."""

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from banyan.base.errors import RequestError
from banyan.base.thread_pool import THREAD_BYTES, off_loop
from banyan.media.preparation import NeedsMedia
from banyan.server.errors import Json
from banyan.server.http.limits import json_object

Scope = MutableMapping[str, Any]

T = TypeVar("T")

MAX_QUERY_FIELDS = 32


class HttpRequest:
    """One request.

    Args:
        scope: of ASGI.
        tokenizer_waits: tokenizing waits for other requests or processes at any size of text.
    """

    def __init__(self, scope: Scope, tokenizer_waits: bool = False) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.peer: str = (scope.get("client") or ("", 0))[0]
        self.raw_query: bytes = scope.get("query_string", b"")
        self.tail = ""
        """Rest of the path after a route that ends in "/"."""
        self.body = b""
        """Empty once it has been parsed."""
        self.release_body: Callable[[], None] = _nothing
        """Called when the body is no longer in memory."""
        self._tokenizer_waits = tokenizer_waits

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def query(self) -> dict[str, str]:
        try:
            text = self.raw_query.decode("latin-1")
            return dict(parse_qsl(text, max_num_fields=MAX_QUERY_FIELDS))
        except ValueError:
            raise RequestError(
                f"the query has more than {MAX_QUERY_FIELDS} fields", code="invalid_query"
            ) from None

    async def json_object(self) -> Json:
        """The body as a JSON object; RequestError 400 otherwise."""
        return await self.read(lambda raw: raw)

    @property
    def media(self) -> str:
        """What the client calls its body, in lower case and without parameters."""
        return self.header(b"content-type").partition(";")[0].strip().lower()

    async def read(self, work: Callable[[Json], T], waits: bool = False) -> T:
        """Parse the body as JSON and return `work` of it; in a thread if the body is large.

        Do all work that grows with the request in `work`. The body is dropped afterwards, except
        when `work` raises NeedsMedia: then it is read again.

        Args:
            waits: `work` waits for another process; it runs in a thread whatever the size.
        """
        body = self.body
        size = len(body) + (THREAD_BYTES + 1 if waits or self._tokenizer_waits else 0)
        try:
            found = await off_loop(size, lambda: work(json_object(body, self.media)))
        except NeedsMedia:
            raise
        except BaseException:
            self.drop_body()
            raise
        self.drop_body()
        return found

    def drop_body(self) -> None:
        self.body = b""
        self.release_body()

    async def optional_object(self) -> Json:
        """Like json_object, but the body may be empty, and fields may be in the query."""
        return {**self.query, **(await self.json_object() if self.body else {})}


def _nothing() -> None:
    """Default of `release_body`."""
