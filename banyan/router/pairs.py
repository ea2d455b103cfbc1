"""Pairs: a prefill and a decode worker that answer one request together, in SGLang's wire format.

Both get the same body, at the same time, with where the prefill worker can be met and under which
number (`bootstrap_host`, `bootstrap_port`, `bootstrap_room`; lists for a batch). The answer is the
decode worker's. Knows nothing of what passes between the two.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import orjson

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list
from banyan.base.thread_pool import off_loop
from banyan.router.proxy import Outgoing
from banyan.router.upstream import Answer, Lost, NotReached
from banyan.router.worker import Try, Worker
from banyan.server.http.limits import json_object

PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
"""Routes whose bodies have the fields of a pair."""
_BATCHES: Mapping[str, Sequence[str]] = {
    "/generate": ("text", "input_ids", "input_embeds"),
    "/v1/completions": ("prompt",),
}
_ROOM_BITS = 63
MOST_BYTES = 64 << 20
"""Of a prefill worker's answer, of which only a refusal goes to the client."""


class _Side:
    """One of the two, and how far it is."""

    def __init__(self, attempt: Try) -> None:
        self.attempt = attempt
        self.answer: Answer | None = None
        self.trouble: NotReached | Lost | RequestError | None = None

    async def send(self, request: Outgoing, body: bytes, news: asyncio.Event) -> None:
        worker = self.attempt.worker
        headers = request.headers_for(worker)
        try:
            self.answer = await worker.upstream.send(request.method, request.target, headers, body)
        except (NotReached, Lost) as error:
            self.trouble, self.attempt.is_good = error, False
        except RequestError as error:  # of the request itself; no worker is at fault
            self.trouble = error
        news.set()

    async def read(self) -> None:
        """Take the whole answer, so that the worker can end in order."""
        assert self.answer is not None
        with suppress(Lost):  # the other one's answer tells
            async for _ in self.answer.pieces():
                pass
            self.attempt.is_good = True

    @property
    def refusal(self) -> Answer | None:
        """An answer that is not what was asked for."""
        return self.answer if self.answer is not None and self.answer.status != 200 else None


class Pair:
    """Implements Proxy."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.workers = (prefill, decode)

    @asynccontextmanager
    async def asking(
        self, request: Outgoing, tries: Sequence[Try]
    ) -> AsyncGenerator[tuple[Answer, Try]]:
        """The decode worker's answer; the prefill worker's where that refuses before."""
        prefill, decode = (_Side(attempt) for attempt in tries)
        body = await body_for(request, self.workers[0])
        news = asyncio.Event()
        tasks = [asyncio.create_task(s.send(request, body, news)) for s in (prefill, decode)]
        body = b""
        is_read = False
        try:
            while (found := _outcome(prefill, decode)) is None:
                if prefill.answer is not None and not is_read:
                    is_read = True
                    tasks.append(asyncio.create_task(prefill.read()))
                news.clear()
                await news.wait()
            if found is decode and prefill.answer is not None and not is_read:
                tasks.append(asyncio.create_task(prefill.read()))
            assert found.answer is not None
            yield found.answer, found.attempt
        finally:
            for task in tasks:
                task.cancel()
            for side in (prefill, decode):
                if side.answer is not None:
                    side.answer.close()


def _outcome(prefill: _Side, decode: _Side) -> _Side | None:
    """Whose answer is that of both; None = it is not known yet. Raises what went wrong."""
    if prefill.refusal is not None:
        return prefill
    for side in (prefill, decode):
        if side.trouble is not None:
            raise side.trouble
    return decode if decode.answer is not None else None


async def body_for(request: Outgoing, prefill: Worker) -> bytes:
    """The request's body with the fields of a pair; RequestError 400: it is no JSON object."""
    raw, path = request.body, request.target.partition(b"?")[0].decode()
    return await off_loop(len(raw), lambda: _with_room(raw, path, prefill))


def _with_room(raw: bytes, path: str, prefill: Worker) -> bytes:
    fields = json_object(raw)
    host, port = prefill.upstream.host, prefill.spec.bootstrap_port
    host = f"[{host}]" if ":" in host else host
    count = _batch_size(path, fields)
    if count is None:
        room: object = secrets.randbits(_ROOM_BITS)
        own = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    else:
        rooms = [secrets.randbits(_ROOM_BITS) for _ in range(count)]
        own = {
            "bootstrap_host": [host] * count,
            "bootstrap_port": [port] * count,
            "bootstrap_room": rooms,
        }
    return orjson.dumps({**fields, **own})


def _batch_size(path: str, fields: Mapping[str, object]) -> int | None:
    """How many prompts a request has; None = it is no list of them."""
    for name in _BATCHES.get(path, ()):
        given = fields.get(name)
        if not is_list(given) or not given:
            continue
        first = given[0]
        if isinstance(first, str):
            return len(given)
        if is_list(first):  # of ids; of vectors, one prompt is a list of lists itself
            is_one = name == "input_embeds" and not (first and is_list(first[0]))
            return None if is_one else len(given)
    return None
