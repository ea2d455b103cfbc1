"""A server with scripted answers, over real sockets, on the test's own event loop."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

CHUNKED, LENGTH, UNTIL_CLOSE = "chunked", "length", "until close"


@dataclass
class Script:
    """One answer.

    Attributes:
        pieces: written one by one, with the event loop given a turn between them.
        framing: how the client learns where the body ends.
        is_cut: the connection breaks before the end of the body.
        hold: waited for before anything is answered.
    """

    pieces: list[bytes] = field(default_factory=list)
    status: int = 200
    framing: str = CHUNKED
    is_cut: bool = False
    hold: asyncio.Event | None = None


Answer = Callable[[str, dict], Script]
"""(route, request body) -> what to say."""


@dataclass
class Scripted:
    url: str = ""
    asked: list[tuple[str, dict]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0

    def bodies(self, route: str) -> list[dict]:
        return [body for path, body in self.asked if path == route]


@contextlib.asynccontextmanager
async def scripted_server(answer: Answer) -> AsyncIterator[Scripted]:
    seen = Scripted()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await _exchange(reader, writer, answer, seen):
                pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    seen.url = f"http://{host}:{port}"
    async with server:
        yield seen


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer, seen: Scripted
) -> bool:
    """One request and its answer; False when the connection has ended."""
    head = await reader.readuntil(b"\r\n\r\n")
    request, *lines = head.decode().strip().split("\r\n")
    route = request.split()[1]
    headers = dict(line.split(": ", 1) for line in lines)
    raw = await reader.readexactly(int(headers["content-length"]))
    body = json.loads(raw) if raw else {}
    seen.asked.append((route, body))
    seen.headers.append(headers)
    script = answer(route, body)
    if script.hold is not None:
        await script.hold.wait()
    writer.write(_head(script))
    for piece in script.pieces:
        framed = b"%x\r\n%s\r\n" % (len(piece), piece) if script.framing == CHUNKED else piece
        writer.write(framed)
        await writer.drain()
        await asyncio.sleep(0)
    if script.is_cut or script.framing == UNTIL_CLOSE:
        return False
    if script.framing == CHUNKED:
        writer.write(b"0\r\n\r\n")
    return headers["connection"] == "keep-alive"


def _head(script: Script) -> bytes:
    lines = [f"HTTP/1.1 {script.status} Scripted"]
    if script.framing == CHUNKED:
        lines.append("transfer-encoding: chunked")
    elif script.framing == LENGTH:
        missing = 1 if script.is_cut else 0
        lines.append(f"content-length: {sum(map(len, script.pieces)) + missing}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def whole(body: object, status: int = 200) -> Script:
    return Script([json.dumps(body).encode()], status, LENGTH)


def native_stream(prompt_tokens: int, texts: list[str], cached: int = 0) -> Script:
    """Cumulative events with counts, one token each."""
    pieces = [
        event(
            {
                "text": "".join(texts[: n + 1]),
                "output_ids": list(range(n + 1)),
                "meta_info": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": n + 1,
                    "cached_tokens": cached,
                    "finish_reason": None,
                },
            }
        )
        for n in range(len(texts))
    ]
    return Script([*pieces, DONE])


def completion_stream(prompt_tokens: int, texts: list[str]) -> Script:
    """One chunk a text, usage at the end."""
    chunks = [event({"choices": [{"index": 0, "text": t, "finish_reason": None}]}) for t in texts]
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts)}
    return Script([*chunks, event({"choices": [], "usage": usage}), DONE])


def models(name: str = "tiny") -> Script:
    return whole({"object": "list", "data": [{"id": name, "object": "model"}]})
