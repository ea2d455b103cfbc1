"""The interface of tool servers: named tools, and sessions in which they are called.

A call never raises. Errors are outcomes that the model sees.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from banyan.base.errors import RequestError
from banyan.server.errors import Json

MAX_OUTPUT_CHARS = 64 << 10
"""A longer output of a tool is truncated, with a note."""


@dataclass(frozen=True)
class ServerTool:
    """One tool with the JSON schema of its arguments."""

    name: str
    description: str
    schema: Json
    annotations: Json | None = None

    @property
    def is_read_only(self) -> bool:
        """Whether the server declares that calls change nothing."""
        return bool(self.annotations) and self.annotations.get("readOnlyHint") is True


@dataclass(frozen=True)
class ToolOutcome:
    """The result of a call: `output`, or the `error` of an mcp_call item."""

    output: str = ""
    error: Json | None = None


def gave(text: str) -> ToolOutcome:
    return ToolOutcome(output=_cut(text))


def refused(text: str) -> ToolOutcome:
    """The tool reported a failure."""
    return ToolOutcome(error={"type": "mcp_tool_execution_error", "content": _cut(text)})


def not_understood(code: int, message: str) -> ToolOutcome:
    """The tool server refused the call with a JSON-RPC error."""
    return ToolOutcome(error={"type": "mcp_protocol_error", "code": code, "message": _cut(message)})


def not_reached(code: int, message: str) -> ToolOutcome:
    """The tool server cannot be reached (502) or did not respond in time (504)."""
    return ToolOutcome(error={"type": "http_error", "code": code, "message": _cut(message)})


def _cut(text: str) -> str:
    if len(text) <= MAX_OUTPUT_CHARS:
        return text
    return f"{text[:MAX_OUTPUT_CHARS]}\n[cut: {MAX_OUTPUT_CHARS} of {len(text)} characters]"


class ToolConnection(Protocol):
    """Runs the tool calls of one response, one after the other."""

    async def call(self, name: str, arguments: Json) -> ToolOutcome: ...

    async def close(self) -> None: ...


class ToolServer(Protocol):
    """A tool server from --tool-server.

    Attributes:
        label: its own name.
        url: its address; "" = in this process.
        tools: by name, as listed at the start.
    """

    label: str
    url: str
    tools: Mapping[str, ServerTool]

    def open(self) -> ToolConnection: ...


@dataclass(frozen=True)
class ToolServers:
    """The tool servers of --tool-server by label. No others are ever called."""

    by_label: Mapping[str, ToolServer] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.by_label)

    def __iter__(self) -> Iterator[ToolServer]:
        return iter(self.by_label.values())

    def find(self, label: str, url: str, param: str) -> ToolServer:
        """The server with this address, or with this label if no address is given.

        Raises:
            RequestError: 400; there is no such server.
        """
        if not self.by_label:
            raise RequestError(
                "this server was started without tool servers, and calls no address of a request",
                param=param,
                code="not_available",
                hint="Start it with --tool-server, or offer a function instead",
            )
        found = self.by_label.get(label)
        if url:
            found = next((s for s in self if s.url and _same(s.url, url)), None)
        if found is None:
            wanted = f"server_url {url[:200]!r}" if url else f"server_label {label[:80]!r}"
            labels = ", ".join(self.by_label)
            raise RequestError(
                f"{wanted} is none of this server's tool servers, whose labels are: {labels}",
                param=param,
                code="not_available",
            )
        return found


def _same(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")
