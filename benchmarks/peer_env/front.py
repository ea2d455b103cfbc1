"""A thin /v1/completions over an engine that has no HTTP server of its own. Needs aiohttp.

The engine runs in one thread; tokens come back through `emit`. Just enough of the API for load and
for log-probabilities: prompts as token ids or text, stream, max_tokens, ignore_eos, logprobs.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Work:
    """One request. `emit(new ids, is_last, log-probabilities)` may be called from any thread."""

    ids: list[int]
    max_tokens: int
    ignore_eos: bool
    top: int
    emit: Callable[[list[int], bool, list[dict[str, float]]], None]
    logprobs: list[dict[str, float]] = field(default_factory=list)


class Inbox:
    """Requests on their way to the engine's thread."""

    def __init__(self) -> None:
        self._waiting: list[Work] = []
        self._lock = threading.Condition()

    def put(self, work: Work) -> None:
        with self._lock:
            self._waiting.append(work)
            self._lock.notify()

    def take(self, wait: bool) -> list[Work]:
        """Everything that waits; with `wait`, at least one."""
        with self._lock:
            while wait and not self._waiting:
                self._lock.wait()
            taken, self._waiting = self._waiting, []
        return taken


def serve(
    port: int,
    inbox: Inbox,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    run_engine: Callable[[], None],
) -> None:
    """Answer until the process is stopped."""

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        ids = encode(prompt) if isinstance(prompt, str) else prompt
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[list[int], bool, list[dict[str, float]]]] = asyncio.Queue()

        def emit(new: list[int], is_last: bool, logprobs: list[dict[str, float]]) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, (new, is_last, logprobs))

        ignore_eos, top = bool(body.get("ignore_eos")), int(body.get("logprobs") or 0)
        inbox.put(Work(ids, int(body.get("max_tokens", 16)), ignore_eos, top, emit))
        stream = None
        if body.get("stream"):
            stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await stream.prepare(request)
        made: list[int] = []
        scores: list[dict[str, float]] = []
        is_last = False
        while not is_last:
            new, is_last, logprobs = await queue.get()
            made += new
            scores += logprobs
            if stream is not None and new:
                choice = {"index": 0, "text": decode(new), "finish_reason": None}
                await stream.write(_event({"choices": [choice]}))
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": len(made),
            "total_tokens": len(ids) + len(made),
        }
        if stream is not None:
            await stream.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
            return stream
        choice = {
            "index": 0,
            "text": decode(made),
            "finish_reason": "length",
            "logprobs": {"tokens": [f"token_id:{i}" for i in made], "top_logprobs": scores},
        }
        return web.json_response({"choices": [choice], "usage": usage})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    threading.Thread(target=run_engine, name="engine", daemon=True).start()
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def _event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"
