"""HttpExchange: an HTTP request and its response, written straight to the ASGI `send`.

A large JSON body is read in a thread, next to the event loop.

A response is a whole body or a stream of events. `fail` ends either of them in order. `follow`
writes events in the call that delivers their chunk: a step of the engine delivers chunks to many
streams, and waking a task for each takes longer than encoding its event. A task runs only if a
stream has to wait.
"""

import asyncio
import time
from collections.abc import (
    AsyncIterable,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import orjson

from banyan.base.errors import RequestError
from banyan.base.fair_share import CALLER, Turns
from banyan.base.log import printable
from banyan.base.thread_pool import THREAD_BYTES, off_loop
from banyan.media.preparation import MediaService, NeedsMedia
from banyan.requests.generation import Chunks
from banyan.requests.request_spec import RequestContext
from banyan.server.errors import RETRY_AFTER_S, Json
from banyan.server.http.dialect import OPENAI
from banyan.server.http.limits import QUICK_BYTES, ClientGone, json_object

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
        self.large: Turns | None = None
        """Turns for the parsing of large bodies."""
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
            if len(body) > QUICK_BYTES and self.large is not None:
                raw = await self._parsed_in_turn(body, self.large)
                found = await off_loop(size, lambda: work(raw))
            else:
                found = await off_loop(size, lambda: work(json_object(body, self.media)))
        except NeedsMedia:
            raise
        except BaseException:
            self.drop_body()
            raise
        self.drop_body()
        return found

    async def peek(self) -> Json:
        """The body as a JSON object; RequestError 400 otherwise. The body stays in memory."""
        body = self.body
        if len(body) > QUICK_BYTES and self.large is not None:
            return await self._parsed_in_turn(body, self.large)
        return await off_loop(len(body), lambda: json_object(body, self.media))

    async def _parsed_in_turn(self, body: bytes, large: Turns) -> Json:
        """Parse next to the event loop only: each thread that parses makes it wait longer."""
        caller = CALLER.get()
        await large.enter(caller)
        try:
            return await off_loop(len(body), lambda: json_object(body, self.media))
        finally:
            large.leave(caller)

    def drop_body(self) -> None:
        self.body = b""
        self.release_body()

    async def optional_object(self) -> Json:
        """Like json_object, but the body may be empty, and fields may be in the query."""
        return {**self.query, **(await self.json_object() if self.body else {})}


Send = Callable[[dict[str, Any]], Awaitable[None]]

T = TypeVar("T")

Later = Callable[[], Awaitable[bytes]]
"""Makes a frame that needs waiting."""

SEND_TIMEOUT_S = 30.0
"""A client that reads nothing for this long is cut off, and its request is aborted."""

OF_LOAD = ("queue_full", "too_many_requests", "overloaded", "timed_out")
"""Codes of errors that are due to the load."""
WARNINGS_CHARS = 1000
ABORT = "banyan.abort"
"""Scope key: a function that cuts the connection."""
WRITE = "banyan.write"
"""Scope key: a function that writes a piece of a started, unfinished body. If it would have to wait
it writes nothing and returns False."""


class HttpExchange:
    """A request, and the methods that respond to it. `context` does not depend on HTTP.

    Args:
        scope, send: of ASGI.
        send_timeout_s: longest wait for a client that does not read.
        tokenizer_waits: tokenizing waits for other requests or processes at any size of text.
        is_strict: fields without effect are refused (--strict-requests).
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        send_timeout_s: float = SEND_TIMEOUT_S,
        tokenizer_waits: bool = False,
        is_strict: bool = False,
    ) -> None:
        self.request = HttpRequest(scope, tokenizer_waits)
        headers = self.request.headers
        names = {k.decode("latin-1"): v.decode("latin-1") for k, v in headers.items()}
        self.context = RequestContext(headers=names, is_strict=is_strict)
        self.dialect = OPENAI
        self.retry_after_s: Callable[[], int] = lambda: RETRY_AFTER_S
        """Seconds for Retry-After in errors due to the load."""
        self.page = ""
        """Origin of the web page that sent the request, if it may read the response; else ""."""
        self.is_probe = False
        """A health check; draining does not wait for it."""
        self.began_s = time.monotonic()
        self.status = 0
        """Status of the response; 0 until it starts."""
        self.refusal = ""
        """Code of the error in the response."""
        self.at_fault = ""
        """Field that the error names."""
        self.route = ""
        """Path of the route; "" = none."""
        self.trace = ""
        """Value of the header traceresponse; "" = not traced."""
        self.num_sent = 0
        """Bytes of the response so far."""
        self.started = False
        self.streaming = False
        self.ended = False
        self.ending: RequestError | ClientGone | None = None
        """Why `work` was cancelled by `stop`."""
        self.work: asyncio.Task[None] | None = None
        self._abort: Callable[[], None] = scope.get(ABORT, _nothing)
        self.write: Callable[[bytes], bool] = scope.get(WRITE, _never)
        """Writes a frame if that needs no waiting, and returns whether it did. The caller counts
        the bytes."""
        self._send = send
        self._send_timeout_s = send_timeout_s

    def stop(self, why: RequestError | ClientGone) -> None:
        """End the request from outside. The cancellation releases what its work holds."""
        if self.ending is None and self.work is not None and not self.work.done():
            self.ending = why
            self.work.cancel()

    async def json(
        self, body: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        await self.whole(orjson.dumps(body), status, "application/json", headers)

    async def text(self, body: str, status: int = 200) -> None:
        await self.whole(body.encode(), status, "text/plain; charset=utf-8")

    async def whole(
        self, body: bytes, status: int, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Respond with one body."""
        lines = self._head(kind) + [(b"content-length", b"%d" % len(body))]
        lines += [(k.encode(), v.encode("latin-1")) for k, v in (headers or {}).items()]
        await self._start(status, lines)
        self.ended = True
        await self._put(b"" if self.request.method == "HEAD" else body, more=False)

    async def pieces(self, pieces: AsyncIterable[bytes], size: int, kind: str) -> None:
        """Respond with a body of `size` bytes that is never in memory as a whole."""
        await self._start(200, [*self._head(kind), (b"content-length", b"%d" % size)])
        if self.request.method != "HEAD":
            async for piece in pieces:
                await self._put(piece)
        self.ended = True
        await self._put(b"", more=False)

    async def relay(self, status: int, lines: Sequence[tuple[bytes, bytes]]) -> None:
        """Start the response of another server: its status and headers, and the CORS headers.

        Calls of `piece` follow.
        """
        await self._start(status, [*lines, *_for_pages(self.page)])

    async def piece(self, body: bytes, is_last: bool = False) -> None:
        """Send bytes of a relayed response; waits like `event`."""
        self.ended = is_last
        await self._put(body, more=not is_last)

    async def begin_events(self) -> None:
        """Start a stream with status 200."""
        await self._start(200, self._head(self.dialect.media) + [(b"cache-control", b"no-cache")])
        self.streaming = True

    async def event(self, body: Json | bytes) -> None:
        """Send one event, or encoded frames. Waits while the client's buffer is full.

        Raises:
            ClientGone: the client did not read for too long.
        """
        frame = body if isinstance(body, bytes) else self.dialect.frame(body)
        if self.write(frame):
            self.num_sent += len(frame)
        else:
            await self._put(frame)

    async def end_events(self) -> None:
        self.ended = True
        await self._put(self.dialect.end, more=False)

    async def fail(self, error: RequestError) -> None:
        """End with an error: a status and a body, or the last event of a stream that has begun."""
        if self.ended:
            return
        self.refusal, self.at_fault = error.code, error.param
        if self.streaming:
            await self.event(self.dialect.error_event(error))
            await self.end_events()
        elif not self.started:
            retry: dict[str, str] = {}
            if error.status in (429, 503, 529):
                after_s = self.retry_after_s() if error.code in OF_LOAD else RETRY_AFTER_S
                retry["retry-after"] = str(after_s)
            await self.json(self.dialect.error_body(error), error.status, retry)

    def _head(self, kind: str) -> list[tuple[bytes, bytes]]:
        lines = [
            (b"content-type", kind.encode()),
            (b"x-request-id", self.context.id.encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        if given := self.request.headers.get(b"x-request-id"):
            lines.append((b"x-client-request-id", _ascii(given.decode("latin-1"), 128)))
        if self.trace:
            lines.append((b"traceresponse", self.trace.encode()))
        lines += _for_pages(self.page)
        if self.context.warnings:
            lines.append(
                (b"x-banyan-warnings", _ascii("; ".join(self.context.warnings), WARNINGS_CHARS))
            )
        return lines

    def cut(self) -> None:
        """Cut the connection, because the response cannot be ended in order."""
        self.ended = True
        self._abort()

    async def _start(self, status: int, lines: list[tuple[bytes, bytes]]) -> None:
        self.started, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": lines})

    async def _put(self, body: bytes, more: bool = True) -> None:
        self.num_sent += len(body)
        message = {"type": "http.response.body", "body": body, "more_body": more}
        steps = self._send(message).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:  # the usual case: the buffer is not full, no timer is needed
            return
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await _Begun(steps, waits_for)
        except TimeoutError:
            self._abort()
            raise ClientGone from None


class _Begun:
    """The rest of an awaitable after its first step."""

    def __init__(self, steps: Generator[object, object, None], waits_for: object) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[object, object, None]:
        try:
            yield self._waits_for
        except BaseException as error:  # pass a cancellation to the awaitable
            yield self._steps.throw(error)
        yield from self._steps


async def read_prompt(
    exchange: HttpExchange, work: Callable[[Json], T], media: MediaService | None
) -> T:
    """`work` of the JSON body, in a thread; with its pictures, if it has any.

    `work` runs twice if it has: it raises NeedsMedia, the pictures are prepared, and it finds them
    in `context.media`.

    Args:
        media: of the model; None = it takes no pictures, which `work` refuses.
    """
    try:
        return await exchange.request.read(work, waits=True)
    except NeedsMedia as needed:
        assert media is not None, "a model without pictures refuses them"
        exchange.context.warnings.clear()
        try:
            found = await media.prepare(needed.parts, exchange.context.tenant)
        except BaseException:
            exchange.request.drop_body()
            raise
        exchange.context.media.items |= found
    return await exchange.request.read(work, waits=True)


async def follow(
    exchange: HttpExchange, chunks: Chunks[T], frames: Callable[[T], bytes | Later]
) -> None:
    """Start a stream with the first chunk, and send the frame of each chunk.

    The chunks wait while the client's buffer is full or `frames` waits.

    Args:
        frames: encodes a chunk; b"" = nothing to send.
    """
    async for first in chunks:
        await exchange.begin_events()
        made = frames(first)
        while made is not None:
            frame = made if isinstance(made, bytes) else await made()
            if frame:
                await exchange.event(frame)
            made = await _write_ready(exchange, chunks, frames)


async def _write_ready(
    exchange: HttpExchange, chunks: Chunks[T], frames: Callable[[T], bytes | Later]
) -> bytes | Later | None:
    """Write until a frame has to wait, and return that; None at the end."""
    until: asyncio.Future[bytes | Later | None] = asyncio.get_running_loop().create_future()

    def more() -> None:
        if until.done():
            return
        try:
            while (chunk := chunks.take()) is not None:
                made = frames(chunk)
                if not isinstance(made, bytes) or (made and not exchange.write(made)):
                    until.set_result(made)
                    return
                exchange.num_sent += len(made)
                if chunks.is_quiet:
                    return
            if chunks.is_over:
                until.set_result(None)
        except Exception as error:
            until.set_exception(error)

    chunks.on_more(more)
    more()
    try:
        return await until
    finally:
        chunks.on_more(None)


def _never(piece: bytes) -> bool:
    """Default of WRITE."""
    return False


def _nothing() -> None:
    """Default of ABORT and of `release_body`."""


def _for_pages(page: str) -> list[tuple[bytes, bytes]]:
    """CORS headers that let a web page of the origin `page` read the response; "" = none."""
    if not page:
        return []
    return [
        (b"access-control-allow-origin", page.encode("latin-1")),
        (b"access-control-expose-headers", b"x-request-id, x-banyan-warnings"),
        (b"vary", b"origin"),
    ]


def _ascii(text: str, limit: int) -> bytes:
    """`text` as a header value: printable ASCII, everything else escaped."""
    return printable(text, limit).encode("ascii", "backslashreplace")
