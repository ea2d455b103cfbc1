"""The lines of a batch: all are checked first, and then run through the handlers of their routes.

A line has the same effect as the same request over HTTP. Lines run only while other requests leave
the engine free.
"""

import asyncio
import codecs
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import orjson

from banyan.base.errors import RequestError
from banyan.base.fair_share import CALLER
from banyan.base.ids import fresh_id
from banyan.base.log import logger
from banyan.server.embeddings import create_embeddings
from banyan.server.errors import Json, error_body, internal
from banyan.server.http.exchange import HttpExchange
from banyan.server.http.limits import strict_json
from banyan.server.openai.chat_completions import chat_completions
from banyan.server.openai.completions import completions
from banyan.server.responses.route import create as create_response
from banyan.server.state import Handler, ServerState
from banyan.server.store.batches import AnswerLog, Fault, answer_line

log = logger(__name__)

MAX_LINES = 50_000
MAX_FAULTS = 20
"""Most faults that are reported for an input."""

RETRY_S = 0.5
"""Pause after the server refused a line because it was busy."""

LOW_PRIORITY = 100
"""Lines have a priority this much lower than requests without a priority."""

SLOT_WAIT_S = 1.0
NUM_RETRIES = 600

MAX_DEATHS = 2
"""A line fails for good after this many engines have died while they ran it."""

_KEYS = ("custom_id", "method", "url", "body")


def endpoints() -> dict[str, Handler]:
    """Routes that a batch may use."""
    return {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/v1/embeddings": create_embeddings,
        "/v1/responses": create_response,
    }


_LOST = ("engine_unavailable", "engine_stuck")
"""Error codes of lines whose engine was lost."""


class ServerEnding(Exception):
    """The server takes no requests. The rest of the batch waits for its next start or next engine.

    Args:
        running: custom_ids of the lines that ran when the engine died; () if it has not died.
    """

    def __init__(self, running: Sequence[str] = ()) -> None:
        super().__init__()
        self.running = tuple(running)


@dataclass(frozen=True)
class BatchLine:
    """One request of a batch."""

    custom_id: str
    url: str
    body: Json
    tenant: bytes = b""
    """Digest of the key that created the batch."""
    labels: str = ""
    """Metric labels of the batch."""


def read_lines(
    content: bytes, endpoint: str = "", tenant: bytes = b""
) -> tuple[list[BatchLine], list[Fault]]:
    """The requests of an input file and its faults. A file with faults must not run.

    Args:
        endpoint: the only route that lines may name; "" = any of `endpoints`.
        tenant: digest of the caller's key.
    """
    lines: list[BatchLine] = []
    faults: list[Fault] = []
    seen: Counter[str] = Counter()
    for number, text in enumerate(io.BytesIO(content.removeprefix(codecs.BOM_UTF8)), 1):
        if not text.strip():
            continue
        if len(lines) == MAX_LINES:
            faults.append(Fault("too_many_lines", f"more than {MAX_LINES} lines", number))
            break
        try:
            line = _line(text, endpoint, tenant)
        except RequestError as error:
            faults.append(Fault(error.code, error.text, number, error.param))
        else:
            lines.append(line)
            seen[line.custom_id] += 1
            if seen[line.custom_id] == 2:
                message = f"custom_id {line.custom_id[:80]!r} appears more than once"
                faults.append(Fault("duplicate_custom_id", message, number, "custom_id"))
        if len(faults) >= MAX_FAULTS:
            break
    if not lines and not faults:
        faults.append(Fault("empty_file", "the input file has no lines"))
    return lines, faults


def _line(text: bytes, endpoint: str, tenant: bytes) -> BatchLine:
    line = strict_json(text)
    if not isinstance(line, dict):
        raise RequestError("the line is not a JSON object", code="invalid_json_line")
    custom_id, url, body = line.get("custom_id"), line.get("url"), line.get("body")
    if unknown := [key for key in line if key not in _KEYS]:
        raise RequestError(f"unknown field {unknown[0][:40]!r}", param=unknown[0][:40])
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512:
        raise RequestError("custom_id must be a text of 1 to 512 characters", param="custom_id")
    if line.get("method") != "POST":
        raise RequestError("method must be POST", param="method")
    known = [endpoint] if endpoint else list(endpoints())
    if url not in known:
        raise RequestError(f"url must be {' or '.join(known)}", param="url")
    if not isinstance(body, dict):
        raise RequestError("body must be an object", param="body")
    for name in ("stream", "background"):
        if body.get(name):
            raise RequestError(f"a line of a batch has one answer; leave out {name}", param="body")
    return BatchLine(custom_id, url, body, tenant)


async def run_lines(
    state: ServerState,
    lines: Sequence[BatchLine],
    answers: AnswerLog,
    on_progress: Callable[[], None],
    share: float = 0.5,
    deaths: Mapping[str, int] | None = None,
    labels: str = "",
) -> None:
    """Run every line without an answer in `answers`, and write the answers in groups.

    Lines that ran when an engine died run first, one at a time. So only the line that kills engines
    fails.

    Args:
        on_progress: called after each group of answers is on disk.
        share: most of the engine's running requests that may be lines, as a fraction; owners whose
            batches start now divide it.
        deaths: custom_id -> engines that died while they ran this line.
        labels: metric labels, as in the header of the batch.

    Raises:
        ServerEnding: the server is shutting down, or its engine has died.
        CapacityError: the answers cannot be written.
        RequestError: 507; the storage is full.
    """
    max_running = state.started().ready.max_running
    deaths = deaths or {}
    lines = [replace(line, labels=labels) for line in lines] if labels else lines
    left = [line for line in lines if line.custom_id not in answers.answered]
    deadly = [line for line in left if deaths.get(line.custom_id, 0) >= MAX_DEATHS]
    suspected = [line for line in left if 0 < deaths.get(line.custom_id, 0) < MAX_DEATHS]
    if deadly:
        await answers.keep([_given_up(line) for line in deadly])
        on_progress()
    if suspected:
        async with state.storage.batches.suspects:
            await _run_group(state, suspected, answers, on_progress, 1, max_running)
    others = [line for line in left if line.custom_id not in deaths]
    width = max(1, int(max_running * share / max(1, state.storage.batches.num_working)))
    await _run_group(state, others, answers, on_progress, width, max_running)


async def _run_group(
    state: ServerState,
    lines: Sequence[BatchLine],
    answers: AnswerLog,
    on_progress: Callable[[], None],
    width: int,
    max_running: int,
) -> None:
    """Run `lines`, `width` of them at once; raises the errors of `run_lines`."""
    waiting, running = iter(lines), dict[str, None]()
    done: asyncio.Queue[tuple[str, bool, bytes] | BaseException | None] = asyncio.Queue(width)
    workers = [
        asyncio.create_task(_work(state, waiting, running, done, max_running)) for _ in range(width)
    ]
    num_working = width
    try:
        while num_working:
            group = [await done.get()]
            while not done.empty():
                group.append(done.get_nowait())
            ready = [a for a in group if isinstance(a, tuple)]
            if ready:
                await answers.keep(ready)
                on_progress()
            for ended in (a for a in group if not isinstance(a, tuple)):
                if ended is not None:
                    raise ended
                num_working -= 1
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(
    state: ServerState,
    waiting: Iterator[BatchLine],
    running: dict[str, None],
    done: "asyncio.Queue[tuple[str, bool, bytes] | BaseException | None]",
    max_running: int,
) -> None:
    """Run lines until none is left. The last item in `done` is None or an exception."""
    try:
        for line in waiting:
            while len(state.open) >= max_running:
                await state.open.wait_change(SLOT_WAIT_S)
            running[line.custom_id] = None
            answer = await _run_line(state, line)
            del running[line.custom_id]
            await done.put(answer)
    except ServerEnding:
        await done.put(ServerEnding(() if state.draining and not state.dead else tuple(running)))
    except Exception as error:
        await done.put(error)
    else:
        await done.put(None)


async def _run_line(state: ServerState, line: BatchLine) -> tuple[str, bool, bytes]:
    """The answer to a line. A refusal because of the load is retried, NUM_RETRIES times at most."""
    for attempt in range(NUM_RETRIES):
        reply = await _send(state, line)
        if reply.status not in (429, 503) or attempt == NUM_RETRIES - 1:
            break
        if state.dead or state.draining or _is_lost(reply):
            raise ServerEnding
        await asyncio.sleep(RETRY_S)
    response: Json = {
        "status_code": reply.status,
        "request_id": reply.id,
        "body": orjson.loads(reply.body),
    }
    if reply.warnings:
        response["warnings"] = reply.warnings
    id = fresh_id()
    return line.custom_id, reply.status == 200, answer_line(id, line.custom_id, response)


def _is_lost(reply: "_Reply") -> bool:
    """Whether the engine that ran the line was lost."""
    if reply.status != 503:
        return False
    error = orjson.loads(reply.body).get("error")
    return isinstance(error, dict) and error.get("code") in _LOST


def _given_up(line: BatchLine) -> tuple[str, bool, bytes]:
    """The answer to a line that failed because engines died of it."""
    message = f"The engine has died {MAX_DEATHS} times while it ran this line; it is not run again"
    error = RequestError(message, status=500, code="engine_died")
    response: Json = {"status_code": 500, "request_id": fresh_id(), "body": error_body(error)}
    id = fresh_id()
    return line.custom_id, False, answer_line(id, line.custom_id, response)


@dataclass
class _Reply:
    """The response of a handler."""

    id: str
    warnings: list[str]
    status: int = 0
    body: bytes = b""

    async def send(self, message: dict[str, Any]) -> None:
        """ASGI's `send`."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]


def labels_header(state: ServerState) -> bytes:
    """Name of the header with metric labels."""
    return state.config.observe.labels_header.lower().encode()


def _body(state: ServerState, line: BatchLine, exchange: HttpExchange) -> Json:
    """The body of a line at the priority of batches. Its response is not stored."""
    body = _with_priority(state, line.body)
    if line.url != "/v1/responses":
        return body
    if body.get("store") is True:
        exchange.context.warn("store: the response is in the output file and is not stored")
    return {**body, "store": False}


def _with_priority(state: ServerState, body: Json) -> Json:
    """The body with a low priority, if priorities are enabled and it has none."""
    schedule = state.config.schedule
    if not schedule.priorities:
        return body
    return {"priority": -LOW_PRIORITY if not schedule.low_priority_first else LOW_PRIORITY, **body}


async def _send(state: ServerState, line: BatchLine) -> _Reply:
    """Run one line through the handler of its route."""
    reply = _Reply("", [])
    labels = [(labels_header(state), line.labels.encode("latin-1"))] if line.labels else []
    scope = {"method": "POST", "path": line.url, "headers": labels}
    server = state.config.server
    exchange = HttpExchange(
        scope, reply.send, tokenizer_waits=server.tokenizer_waits, is_strict=server.strict_requests
    )
    reply.id, reply.warnings = exchange.context.id, exchange.context.warnings
    exchange.context.tenant = line.tenant
    exchange.context.key_name = state.keys.name_of(line.tenant)
    CALLER.set(line.tenant)
    exchange.request.body = json.dumps(_body(state, line, exchange)).encode()
    try:
        # this task has inherited the labels of the request that created the first batch
        with nullcontext() if state.labels is None else state.labels(exchange.context):
            await endpoints()[line.url](exchange, state)
    except RequestError as error:
        await exchange.fail(error)
    except Exception:
        log.exception("line of a batch failed id=%s path=%s", exchange.context.id, line.url)
        await exchange.fail(internal(exchange.context.id))
    return reply
