"""How workers answer a request: one worker alone, or a prefill and a decode worker together.

A pair uses SGLang's wire format. Both workers get the same body at the same time, with the address
of the prefill worker and a number for the transfer (`bootstrap_host`, `bootstrap_port`,
`bootstrap_room`; lists for a batch). The client gets the decode worker's response.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import orjson

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list
from banyan.base.thread_pool import off_loop
from banyan.router.upstream import UpstreamResponse, WorkerLost, WorkerUnreachable
from banyan.router.worker import Attempt, Worker
from banyan.server.http.limits import json_object


@dataclass
class OutgoingRequest:
    """A request as it is sent to workers.

    Attributes:
        target: path and query.
        headers: names in lower case.
        body: dropped once it cannot be sent again.
    """

    method: str
    target: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def headers_for(self, worker: Worker) -> Sequence[tuple[bytes, bytes]]:
        """The headers, with the worker's own API key instead of the client's if it has one."""
        if not worker.spec.api_key:
            return self.headers
        others = [h for h in self.headers if h[0] not in (b"authorization", b"x-api-key")]
        return [*others, (b"authorization", b"Bearer " + worker.spec.api_key.strip().encode())]


class Proxy(Protocol):
    """The workers that answer one request together."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    def asking(
        self, request: OutgoingRequest, attempts: Sequence[Attempt]
    ) -> AbstractAsyncContextManager[tuple[UpstreamResponse, Attempt]]:
        """Send the request; the response head and the attempt it belongs to.

        The rest of the response is dropped at the end of the block.

        Raises:
            WorkerUnreachable, WorkerLost: the attempt of the failing worker has is_good False.
        """
        ...


class SingleWorker:
    """One worker that answers alone."""

    def __init__(self, worker: Worker) -> None:
        self.workers = (worker,)

    @asynccontextmanager
    async def asking(
        self, request: OutgoingRequest, attempts: Sequence[Attempt]
    ) -> AsyncGenerator[tuple[UpstreamResponse, Attempt]]:
        (worker,), (attempt,) = self.workers, attempts
        try:
            answer = await worker.upstream.send(
                request.method, request.target, request.headers_for(worker), request.body
            )
        except (WorkerUnreachable, WorkerLost):
            attempt.is_good = False
            raise
        try:
            yield answer, attempt
        finally:
            answer.close()


PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")
"""Routes that a pair can answer."""
_BATCHES: Mapping[str, Sequence[str]] = {
    "/generate": ("text", "input_ids", "input_embeds"),
    "/v1/completions": ("prompt",),
}
_TRANSFER_ID_BITS = 63
MOST_BYTES = 64 << 20
"""Most bytes of a prefill worker's response; only a refusal is relayed to the client."""


class _Side:
    """One worker of a pair and the state of its response."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.answer: UpstreamResponse | None = None
        self.trouble: WorkerUnreachable | WorkerLost | RequestError | None = None

    async def send(self, request: OutgoingRequest, body: bytes, changed: asyncio.Event) -> None:
        worker = self.attempt.worker
        headers = request.headers_for(worker)
        try:
            self.answer = await worker.upstream.send(request.method, request.target, headers, body)
        except (WorkerUnreachable, WorkerLost) as error:
            self.trouble, self.attempt.is_good = error, False
        except RequestError as error:  # the request is at fault, not a worker
            self.trouble = error
        changed.set()

    async def read(self) -> None:
        """Read and drop the whole response, so that the worker can finish normally."""
        assert self.answer is not None
        with suppress(WorkerLost):  # the decode worker's response decides
            async for _ in self.answer.pieces():
                pass
            self.attempt.is_good = True

    @property
    def refusal(self) -> UpstreamResponse | None:
        """The response if its status is not 200."""
        return self.answer if self.answer is not None and self.answer.status != 200 else None


class WorkerPair:
    """A prefill and a decode worker that answer together; implements Proxy."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.workers = (prefill, decode)

    @asynccontextmanager
    async def asking(
        self, request: OutgoingRequest, attempts: Sequence[Attempt]
    ) -> AsyncGenerator[tuple[UpstreamResponse, Attempt]]:
        """The decode worker's response, or the prefill worker's refusal if that comes first."""
        prefill, decode = (_Side(attempt) for attempt in attempts)
        body = await body_for(request, self.workers[0])
        changed = asyncio.Event()
        tasks = [asyncio.create_task(s.send(request, body, changed)) for s in (prefill, decode)]
        body = b""
        is_read = False
        try:
            while (found := _outcome(prefill, decode)) is None:
                if prefill.answer is not None and not is_read:
                    is_read = True
                    tasks.append(asyncio.create_task(prefill.read()))
                changed.clear()
                await changed.wait()
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
    """The side whose response the client gets; None if not known yet. Raises a side's error."""
    if prefill.refusal is not None:
        return prefill
    for side in (prefill, decode):
        if side.trouble is not None:
            raise side.trouble
    return decode if decode.answer is not None else None


async def body_for(request: OutgoingRequest, prefill: Worker) -> bytes:
    """The body with the bootstrap fields; RequestError 400 if it is not a JSON object."""
    raw, path = request.body, request.target.partition(b"?")[0].decode()
    return await off_loop(len(raw), lambda: _with_bootstrap(raw, path, prefill))


def _with_bootstrap(raw: bytes, path: str, prefill: Worker) -> bytes:
    fields = json_object(raw)
    host, port = prefill.upstream.host, prefill.bootstrap_port
    host = f"[{host}]" if ":" in host else host
    count = _batch_size(path, fields)
    if count is None:
        transfer_id: object = secrets.randbits(_TRANSFER_ID_BITS)
        own = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": transfer_id}
    else:
        transfer_ids = [secrets.randbits(_TRANSFER_ID_BITS) for _ in range(count)]
        own = {
            "bootstrap_host": [host] * count,
            "bootstrap_port": [port] * count,
            "bootstrap_room": transfer_ids,
        }
    return orjson.dumps({**fields, **own})


def _batch_size(path: str, fields: Mapping[str, object]) -> int | None:
    """The number of prompts; None if the prompt is not a list of them."""
    for name in _BATCHES.get(path, ()):
        given = fields.get(name)
        if not is_list(given) or not given:
            continue
        first = given[0]
        if isinstance(first, str):
            return len(given)
        if is_list(first):  # token ids; with embeddings, one prompt is itself a list of lists
            is_one = name == "input_embeds" and not (first and is_list(first[0]))
            return None if is_one else len(given)
    return None
