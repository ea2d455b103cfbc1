"""Tool servers with the Model Context Protocol over HTTP, through the official package.

Addresses come only from the operator. Each session is a task of its own: an error in it becomes the
outcome of a call, and the next call opens another session.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx2
import mcp
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, Implementation, TextContent

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.server.errors import Json
from banyan.server.tool_servers.base import (
    ServerTool,
    ToolOutcome,
    gave,
    not_reached,
    not_understood,
    refused,
)

log = logger(__name__)

CALL_TIMEOUT_S = 60.0
START_TIMEOUT_S = 10.0
_MAX_PAGES = 32
MAX_ANSWER_BYTES = 4 << 20
"""Of an answer in one piece; the package bounds the events of a stream."""
_BAD_GATEWAY, _GATEWAY_TIMEOUT = 502, 504
_INTERNAL_ERROR = -32603
"""JSON-RPC: the response cannot be used."""

_Call = tuple[str, Json, "asyncio.Future[ToolOutcome]"]


class McpServer:
    """One tool server with the tools that it listed at the start."""

    def __init__(self, label: str, url: str, tools: Sequence[ServerTool]) -> None:
        self.label = label
        self.url = url
        self.tools: Mapping[str, ServerTool] = {tool.name: tool for tool in tools}

    def open(self) -> "McpLine":
        return McpLine(self.label, self.url)


class McpLine:
    """The calls of one response in one session, which opens at the first call."""

    def __init__(self, label: str, url: str) -> None:
        self._label = label
        self._url = url
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._session: asyncio.Task[None] | None = None

    async def call(self, name: str, arguments: Json) -> ToolOutcome:
        if self._session is not None and self._session.done():  # broken since the last call
            await self.close()
        if self._session is None:
            self._calls = asyncio.Queue()
            self._session = asyncio.create_task(_session(self._url, self._calls))
        answer: asyncio.Future[ToolOutcome] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((name, arguments, answer))
        either = (answer, self._session)
        await asyncio.wait(either, timeout=CALL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if self._session.done():
            (error,) = await asyncio.gather(self._session, return_exceptions=True)
            return self._broken(name, _cause(error))
        await self.close()
        return self._broken(name, f"no answer within {CALL_TIMEOUT_S:g} s", _GATEWAY_TIMEOUT)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)

    def _broken(self, name: str, why: str, code: int = _BAD_GATEWAY) -> ToolOutcome:
        log.warning("tool call failed server=%s tool=%s: %s", self._label, name, why)
        return not_reached(code, f"the tool server {self._label!r} failed: {why}")


async def open_server(urls: Sequence[str]) -> McpServer:
    """The tool server at the first of `urls` that responds.

    Raises:
        ConfigError: none responds.
    """
    reasons = []
    for url in urls:
        try:
            async with asyncio.timeout(START_TIMEOUT_S), _connected(url) as client:
                named = client.server_info.name if client.server_info else ""
                return McpServer(named or urlsplit(url).netloc, url, await _tools(client))
        except TimeoutError:
            reasons.append(f"{url}: no answer within {START_TIMEOUT_S:g} s")
        except Exception as error:  # of any kind, from the network to the peer's schemas
            reasons.append(f"{url}: {_cause(error)}")
    raise ConfigError(
        f"--tool-server names a server that cannot be used: {'; '.join(reasons)}",
        hint="Start it first, or correct the address",
    )


class _BoundedStream(httpx2.AsyncByteStream):
    """The bytes of an answer; an error when there are more than a tool server may send."""

    def __init__(self, source: httpx2.AsyncByteStream) -> None:
        self._source = source

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._source:
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                raise httpx2.ReadError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
            yield piece

    async def aclose(self) -> None:
        await self._source.aclose()


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        kind = response.headers.get("content-type", "")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.ReadError("a compressed answer, which was not asked for")
        if not kind.startswith("text/event-stream"):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _BoundedStream(response.stream)
        return response


def _http_client(
    headers: dict[str, str] | None = None,
    timeout: httpx2.Timeout | None = None,
    auth: httpx2.Auth | None = None,
) -> httpx2.AsyncClient:
    """A client that reads a bounded answer. The package follows redirects of one origin only."""
    return httpx2.AsyncClient(
        transport=_BoundedTransport(),
        headers=headers,
        timeout=timeout or httpx2.Timeout(CALL_TIMEOUT_S, read=5 * CALL_TIMEOUT_S),
        auth=auth,
    )


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[mcp.Client]:
    is_sse = urlsplit(url).path.rstrip("/").endswith("/sse")
    me = Implementation(name="banyan", version="1")
    async with _http_client() as http:
        transport = (
            sse_client(url, httpx_client_factory=_http_client)
            if is_sse
            else streamable_http_client(url, http_client=http)
        )
        async with mcp.Client(transport, client_info=me, cache=None) as client:
            yield client


async def _tools(client: mcp.Client) -> list[ServerTool]:
    found: list[ServerTool] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            hints = tool.annotations
            annotations = hints.model_dump(by_alias=True, exclude_none=True) if hints else None
            found.append(
                ServerTool(tool.name, tool.description or "", tool.input_schema, annotations)
            )
        cursor = page.next_cursor
        if not cursor:
            break
    return found


async def _session(url: str, calls: "asyncio.Queue[_Call]") -> None:
    """Run calls until cancelled; raises if the connection breaks."""
    async with _connected(url) as client:
        while True:
            name, arguments, answer = await calls.get()
            outcome = await _outcome(client, name, arguments)
            if not answer.done():
                answer.set_result(outcome)


async def _outcome(client: mcp.Client, name: str, arguments: Json) -> ToolOutcome:
    try:
        result = await client.call_tool(name, arguments)
    except mcp.MCPError as error:
        return not_understood(error.code, error.message)
    except (RuntimeError, ValueError) as error:
        return not_understood(_INTERNAL_ERROR, f"an unusable result: {_cause(error)}")
    return refused(_text(result)) if result.is_error else gave(_text(result))


def _text(result: CallToolResult) -> str:
    """A result as text for the model; other content is replaced by its kind."""
    parts = [
        part.text if isinstance(part, TextContent) else f"[{part.type}: left out]"
        for part in result.content
    ]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _cause(error: BaseException | None) -> str:
    """The first single error of a group, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return printable(f"{type(error).__name__}: {error}".removesuffix(": "))
