"""Tool servers that began well and then hang, lead elsewhere, lie or die in a call: the call has an
error in time, and the next one works.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("mcp", reason="the package mcp is not installed")

from banyan.server.tool_servers import mcp_server
from banyan.server.tool_servers.base import MAX_OUTPUT_CHARS, ToolOutcome

HONEST = "honest"
LIMIT_S = 2.0


class Turncoat(ThreadingHTTPServer):
    """A tool server with one tool, whose calls go wrong in `way` until it is HONEST."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.way = HONEST
        self.elsewhere = ""
        self.ended = threading.Event()
        self.num_calls = self.num_bytes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/mcp"


class _Handler(BaseHTTPRequestHandler):
    server: Turncoat
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""

    def do_GET(self) -> None:
        self._answer(405, b"")

    do_DELETE = do_GET

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        results = {
            "initialize": {
                "protocolVersion": asked.get("params", {}).get("protocolVersion"),
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "turncoat", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "seen"}]},
        }
        if asked.get("method") == "tools/call":
            self.server.num_calls += 1
            if self.server.way != HONEST:
                self._lie(asked, results["tools/call"])
                return
        if "id" not in asked:
            self._answer(202, b"")
        elif asked["method"] in results:
            self._answer(200, _said(asked["id"], results[asked["method"]]))
        else:
            error = {"code": -32601, "message": "no such method"}
            self._answer(
                200, json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}).encode()
            )

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", headers.pop("kind", "application/json"))
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _lie(self, asked: dict, result: dict) -> None:
        turncoat, id = self.server, asked["id"]
        match turncoat.way:
            case "hangs":
                turncoat.ended.wait(60)
                self.close_connection = True
            case "closes":
                self.close_connection = True
            case "leads elsewhere":
                self._answer(307, b"", Location=turncoat.elsewhere)
            case "leads in a circle":
                self._answer(307, b"", Location=turncoat.url)
            case "fails":
                self._answer(500, b"<html>")
            case "garbage":
                self._answer(200, b"\xff\x00{")
            case "no answer":
                self._answer(202, b"")
            case "the answer of another":
                self._answer(200, _said(id + 1000 if isinstance(id, int) else "x", result))
            case "another shape":
                self._answer(200, _said(id, {"content": "text", "isError": 7}))
            case "deep":
                self._answer(200, b"[" * 100_000)
            case "long":
                self._answer(
                    200, _said(id, {"content": [{"type": "text", "text": "x" * (8 << 20)}]})
                )
            case "endless" | "endless events":
                self._endless("events" in turncoat.way)
            case "control characters":
                text = "\x1b[31m\x00\u202e" + "y" * (1 << 20)
                error = {"code": 1, "message": text}
                self._answer(200, json.dumps({"jsonrpc": "2.0", "id": id, "error": error}).encode())
            case other:
                raise AssertionError(other)

    def _endless(self, is_stream: bool) -> None:
        self.close_connection = True
        self.send_response(200)
        kind = "text/event-stream" if is_stream else "application/json"
        self.send_header("Content-Type", kind)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b"data: " if is_stream else b'"')
            while not self.server.ended.is_set():
                self.wfile.write(b"x" * 65536)
                self.server.num_bytes += 65536


def _said(id: object, result: dict) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id, "result": result}).encode()


@contextlib.contextmanager
def turncoat() -> Iterator[Turncoat]:
    with Turncoat() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield found
        finally:
            found.ended.set()
            found.shutdown()
            thread.join()


WAYS = (
    *("hangs", "closes", "leads elsewhere", "leads in a circle", "fails", "garbage", "no answer"),
    *("the answer of another", "another shape", "deep", "long", "endless", "endless events"),
    "control characters",
)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_goes_wrong_is_an_error_in_time_and_the_next_one_works(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_server, "CALL_TIMEOUT_S", LIMIT_S)

    async def calls(lying: Turncoat) -> tuple[ToolOutcome, ...]:
        server = await mcp_server.open_server([lying.url])
        line = server.open()
        try:
            first = await line.call("look", {})
            lying.way = way
            second = await line.call("look", {})
            lying.way = HONEST
            lying.ended.set()
            return first, second, await line.call("look", {})
        finally:
            await line.close()

    with turncoat() as lying, turncoat() as other:
        lying.elsewhere = other.url
        first, second, third = asyncio.run(asyncio.wait_for(calls(lying), 60))
        assert first.output == third.output == "seen"
        assert second.error is not None and not second.output, second
        assert len(json.dumps(second.error)) < 2 * MAX_OUTPUT_CHARS
        assert not other.num_calls and lying.num_bytes < 64 << 20
        assert lying.num_calls < 30
