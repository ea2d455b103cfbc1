"""The lines of a batch: read and checked before any runs, then asked one by one like any request.

A line goes through the handler of its route, so that it means what the same request over HTTP
means. It takes only seats that others leave free. Knows no files and no batch objects.
"""

import asyncio
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import orjson

from banyan.base.errors import RequestError
from banyan.base.ids import fresh_id
from banyan.base.log import logger
from banyan.server.embeddings.openai import create_embeddings
from banyan.server.errors import Json, error_body, internal
from banyan.server.http.exchange import HttpExchange
from banyan.server.http.limits import strict_json
from banyan.server.openai.chat.route import chat_completions
from banyan.server.openai.completions import completions
from banyan.server.responses.route import create as create_response
from banyan.server.state import Handler, ServerState
from banyan.server.store.batch_output import AnswerLog, answer_line
from banyan.server.store.batches import Fault

log = logger(__name__)

MAX_LINES = 50_000
MAX_FAULTS = 20
"""Faults of an input that are told."""

RETRY_S = 0.5
"""Pause after a line was turned away because the server was busy."""

LOW_PRIORITY = 100
"""How far below requests without a priority the lines of a batch stand."""

SEAT_WAIT_S = 1.0
NUM_RETRIES = 600

MAX_DEATHS = 2
"""Engines that may die while they run a line; then it has failed and is not asked again."""

_KEYS = ("custom_id", "method", "url", "body")


def endpoints() -> dict[str, Handler]:
    """Routes that a batch may ask."""
    return {
        "/v1/chat/completions": chat_completions,
        "/v1/completions": completions,
        "/v1/embeddings": create_embeddings,
        "/v1/responses": create_response,
    }


_LOST = ("engine_unavailable", "engine_stuck")
"""Codes of answers that an engine has not given because it was lost."""


class ServerEnding(Exception):
    """The server takes no requests; the rest of the batch is for its next start, or for the next
    engine.

    Args:
        running: custom_ids of the lines that ran when the engine died; () when it lives.
    """

    def __init__(self, running: Sequence[str] = ()) -> None:
        super().__init__()
        self.running = tuple(running)


@dataclass(frozen=True)
class Line:
    """One request of a batch."""

    custom_id: str
    url: str
    body: Json
    tenant: bytes = b""
    """Whose request it is: of the credential that made the batch."""
    labels: str = ""
    """Of the batch."""


def read_lines(
    content: bytes, endpoint: str = "", tenant: bytes = b""
) -> tuple[list[Line], list[Fault]]:
    """The requests of an input file, and what is wrong with it; with faults none may run.

    Args:
        endpoint: the only route that lines may name; "" = any of `endpoints`.
        tenant: who asks.
    """
    lines: list[Line] = []
    faults: list[Fault] = []
    seen: Counter[str] = Counter()
    for number, text in enumerate(io.BytesIO(content), 1):
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
                told = f"custom_id {line.custom_id[:80]!r} appears more than once"
                faults.append(Fault("duplicate_custom_id", told, number, "custom_id"))
        if len(faults) >= MAX_FAULTS:
            break
    if not lines and not faults:
        faults.append(Fault("empty_file", "the input file has no lines"))
    return lines, faults


def _line(text: bytes, endpoint: str, tenant: bytes) -> Line:
    line = strict_json(text)
    if not isinstance(line, dict):
        raise RequestError("the line is no JSON object", code="invalid_json_line")
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
    return Line(custom_id, url, body, tenant)


async def run_lines(
    state: ServerState,
    lines: Sequence[Line],
    answers: AnswerLog,
    told: Callable[[], None],
    share: float = 0.5,
    deaths: Mapping[str, int] | None = None,
    labels: str = "",
) -> None:
    """Ask every line that `answers` does not hold, and log the answers in groups.

    Lines that ran when an engine died come first and one at a time, so that the one that kills
    engines is found, and only that one fails.

    Args:
        told: called after every group that has reached the disk.
        share: of the seats, the most that these lines take.
        deaths: custom_id -> engines that died while they ran this line.
        labels: under which they count, as the header of the batch has them.

    Raises:
        ServerEnding: the server is shutting down, or its engine has died.
        CapacityError: the answers cannot be written.
        RequestError: 507, no room is left for them.
    """
    lora_targets = state.started().ready.max_running
    deaths = deaths or {}
    lines = [replace(line, labels=labels) for line in lines] if labels else lines
    left = [line for line in lines if line.custom_id not in answers.answered]
    deadly = [line for line in left if deaths.get(line.custom_id, 0) >= MAX_DEATHS]
    suspected = [line for line in left if 0 < deaths.get(line.custom_id, 0) < MAX_DEATHS]
    if deadly:
        await answers.keep([_given_up(line) for line in deadly])
        told()
    await _run_group(state, suspected, answers, told, 1, lora_targets)
    others = [line for line in left if line.custom_id not in deaths]
    await _run_group(state, others, answers, told, max(1, int(lora_targets * share)), lora_targets)


async def _run_group(
    state: ServerState,
    lines: Sequence[Line],
    answers: AnswerLog,
    told: Callable[[], None],
    width: int,
    lora_targets: int,
) -> None:
    """Ask `lines`, `width` of them at once; errors as of `run_lines`."""
    waiting, running = iter(lines), dict[str, None]()
    done: asyncio.Queue[tuple[str, bool, bytes] | BaseException | None] = asyncio.Queue(width)
    workers = [
        asyncio.create_task(_work(state, waiting, running, done, lora_targets))
        for _ in range(width)
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
                told()
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
    waiting: Iterator[Line],
    running: dict[str, None],
    done: "asyncio.Queue[tuple[str, bool, bytes] | BaseException | None]",
    lora_targets: int,
) -> None:
    """Ask lines until none is left; says None at the end, or what went wrong."""
    try:
        for line in waiting:
            while len(state.open) >= lora_targets:
                await state.open.wait_change(SEAT_WAIT_S)
            running[line.custom_id] = None
            answer = await _answered(state, line)
            del running[line.custom_id]
            await done.put(answer)
    except ServerEnding:
        await done.put(ServerEnding(() if state.draining and not state.dead else tuple(running)))
    except Exception as error:
        await done.put(error)
    else:
        await done.put(None)


async def _answered(state: ServerState, line: Line) -> tuple[str, bool, bytes]:
    """The answer to a line; being turned away for want of room is none, until that lasts."""
    for attempt in range(NUM_RETRIES):
        reply = await _ask(state, line)
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
    """Whether the engine was lost that ran the line."""
    if reply.status != 503:
        return False
    error = orjson.loads(reply.body).get("error")
    return isinstance(error, dict) and error.get("code") in _LOST


def _given_up(line: Line) -> tuple[str, bool, bytes]:
    """The answer to a line that is not asked again, because engines died of it."""
    told = f"The engine has died {MAX_DEATHS} times while it ran this line; it is not asked again"
    error = RequestError(told, status=500, code="engine_died")
    response: Json = {"status_code": 500, "request_id": fresh_id(), "body": error_body(error)}
    id = fresh_id()
    return line.custom_id, False, answer_line(id, line.custom_id, response)


@dataclass
class _Reply:
    """What a handler answered."""

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
    """Name of the header that has the labels of a request."""
    return state.config.observe.labels_header.lower().encode()


def _body(state: ServerState, line: Line, exchange: HttpExchange) -> Json:
    """What a line asks, at the priority of batches. Its answer is in the file and nowhere else."""
    body = _with_priority(state, line.body)
    if line.url != "/v1/responses":
        return body
    if body.get("store") is True:
        exchange.context.warn("store: the file has the response; it is not kept beside")
    return {**body, "store": False}


def _with_priority(state: ServerState, body: Json) -> Json:
    """The body with a priority below every other, where priorities count and it has none."""
    schedule = state.config.schedule
    if not schedule.priorities:
        return body
    return {"priority": -LOW_PRIORITY if not schedule.low_priority_first else LOW_PRIORITY, **body}


async def _ask(state: ServerState, line: Line) -> _Reply:
    """One line through the handler of its route."""
    reply = _Reply("", [])
    labels = [(labels_header(state), line.labels.encode("latin-1"))] if line.labels else []
    scope = {"method": "POST", "path": line.url, "headers": labels}
    server = state.config.server
    exchange = HttpExchange(
        scope, reply.send, words_wait=server.words_wait, is_strict=server.strict_requests
    )
    reply.id, reply.warnings = exchange.context.id, exchange.context.warnings
    exchange.context.tenant = line.tenant
    exchange.body = json.dumps(_body(state, line, exchange)).encode()
    try:
        # a worker's task began within whichever request made the first batch
        with nullcontext() if state.labels is None else state.labels(exchange):
            await endpoints()[line.url](exchange, state)
    except RequestError as error:
        await exchange.fail(error)
    except Exception:
        log.exception("line of a batch failed id=%s path=%s", exchange.context.id, line.url)
        await exchange.fail(internal(exchange.context.id))
    return reply
