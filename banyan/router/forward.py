"""Forward a request to a worker, retry it on others while nothing was answered, relay the response.

Responses are relayed byte for byte as they arrive. The prompt is read, as text or as token ids, so
that a policy can choose a worker; validating it is the worker's task. A worker converts text to
token ids, because only workers have a tokenizer and a chat template.
"""

import asyncio
import random
import re
import time
import urllib.parse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import orjson

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import logger
from banyan.base.thread_pool import off_loop
from banyan.router.models import ModelServer, model_not_found
from banyan.router.policies import ROUTING_KEY, RoutingRequest
from banyan.router.proxy import PATHS, OutgoingRequest, Proxy
from banyan.router.state import RouterState
from banyan.router.upstream import Headers, UpstreamResponse, WorkerLost, WorkerUnreachable
from banyan.router.worker import Attempt, Worker
from banyan.scheduler.routing import BLOCK_BYTES, MAX_BLOCKS
from banyan.server.errors import unavailable
from banyan.server.http.auth import TENANT
from banyan.server.http.exchange import OF_LOAD, HttpExchange
from banyan.server.http.limits import DEADLINE, MAX_CONTAINERS, MAX_VALUES

log = logger(__name__)

WHOLE_BYTES = 1 << 20
"""Responses up to this size that are not streams are buffered, to be retried if they break."""
RETRIED_STATUSES = (429, 502, 503, 504)
"""Response statuses for which another worker is tried."""
FAILED = (502, 503, 504)
"""Statuses of a failing worker, or of a proxy in front of it."""
_BUSY = (429, 529)
_NEUTRAL_CODES = (*OF_LOAD, "deadline_exceeded", "queue_timeout", "rate_limited")
"""Error codes of a healthy worker that has too much load or too little time."""
_DEADLINE = DEADLINE.encode()
MOST_HELD = 1 << 20
"""Bytes of one event that are held back; a longer event is relayed in parts."""

_EVENT_ENDS = {
    b"text/event-stream": (b"\n\n", b"\r\n\r\n", b"\r\r"),
    b"application/x-ndjson": (b"\n",),
}
_TARGET = re.compile(rb"[\x21-\x7e]+")
_BODILESS = (204, 304)
_FORM_MODEL = re.compile(rb'name="?model"?\r\n(?:[^\r\n]{1,200}\r\n){0,4}\r\n([^\r\n]{1,200})\r\n')
_DURATION = re.compile(r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|)")
_FORM_BYTES = 64 << 10
"""Bytes at each end of a form in which its model is looked for."""
_LONGEST_S = 1e9
_HOP_BY_HOP = (
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"transfer-encoding",
    b"te",
    b"trailer",
    b"upgrade",
    b"expect",
    b"content-length",
)
_TENANT = TENANT.encode()
_TOKENIZE = "/tokenize"
_NOT_SENT = (*_HOP_BY_HOP, _TENANT, b"host", b"origin", b"proxy-authorization")
_NOT_RETURNED = (*_HOP_BY_HOP, b"date", b"server")


PROMPT_FIELDS = (
    "instructions",
    "system",
    "tools",
    "messages",
    "prompt",
    "text",
    "input_ids",
    "input",
)
"""Fields that hold prompt text in the supported APIs, roughly in the order the model reads them."""
MOST_BYTES = BLOCK_BYTES * MAX_BLOCKS
_THREAD_BYTES = 256 << 10
"""Larger bodies are parsed off the event loop; this size takes under a millisecond."""


_MOST_BODY_BYTES = 256 << 10
"""Larger bodies are routed by their text alone."""
_MOST_ANSWER_BYTES = 8 << 20
_TIMEOUT_S = 2.0
_MOST_ID = (1 << 31) - 1
_OWN = ("cache_salt", "extra_key", "lora_path", "input_embeds")
"""Fields that separate the prefixes of a request from other requests."""
_CHAT = ("messages", "tools", "chat_template_kwargs", "continue_final_message")


@dataclass(frozen=True)
class BufferedResponse:
    """A refusal, kept as the response in case no other worker answers."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


async def forward(exchange: HttpExchange, state: RouterState) -> None:
    """Handler of routes whose requests generate: any worker, or any pair of workers, answers."""
    is_paired = state.settings.pool.is_paired
    if is_paired and exchange.request.path not in PATHS:
        raise RequestError(
            f"{exchange.request.path} is not shared by prefill and decode servers",
            status=501,
            code="not_routed",
            hint=f"These are: {', '.join(PATHS)}",
        )
    await _forward(exchange, state, RETRIED_STATUSES, is_paired)


async def forward_to_any(exchange: HttpExchange, state: RouterState) -> None:
    """Handler of routes that any worker answers without running the model."""
    await _forward(exchange, state, RETRIED_STATUSES, False)


async def forward_to_owner(exchange: HttpExchange, state: RouterState) -> None:
    """Handler of routes about state of one worker: tries the workers in turn until one has it."""
    await _forward(exchange, state, (*RETRIED_STATUSES, 404), False)


async def forward_response(exchange: HttpExchange, state: RouterState) -> None:
    """Handler of POST /v1/responses, which may continue a response that one worker stores."""
    continues = (
        b'"previous_response_id"' in exchange.request.body and not state.settings.pool.is_paired
    )
    await (forward_to_owner if continues else forward)(exchange, state)


async def _forward(
    exchange: HttpExchange, state: RouterState, again: Sequence[int], is_paired: bool
) -> None:
    if state.draining:
        raise unavailable("the router is shutting down; send the request elsewhere", "draining")
    began_s = time.monotonic()
    limit_s = state.settings.limits.request_s
    try:
        async with state.admission.slot(), asyncio.timeout(limit_s):
            await ForwardedRequest(exchange, state, again, is_paired).run()
    except TimeoutError:
        raise RequestError(
            f"the request did not end within {limit_s:g} s", status=504, code="timeout"
        ) from None
    finally:
        if state.metrics is not None:
            seconds = time.monotonic() - began_s
            state.metrics.ended(exchange.route, exchange.status, seconds)


class ForwardedRequest:
    """One request: chooses workers, retries and relays the response.

    Args:
        again: statuses for which another worker is tried.
        is_paired: the request needs a prefill and a decode worker.
    """

    def __init__(
        self, exchange: HttpExchange, state: RouterState, again: Sequence[int], is_paired: bool
    ) -> None:
        self._exchange = exchange
        self._request = outgoing(exchange, state)
        self._state = state
        self._again = again
        self._is_paired = is_paired
        self._retry = state.settings.retry
        self._pause_s = self._retry.first_pause_s
        self._tried: list[Worker] = []
        """Workers that did not answer or refused."""
        self._kept: BufferedResponse | None = None
        self._why = ""
        self._has_lost_worker = False
        self._model: ModelServer | None = None

    async def run(self) -> None:
        """Answer the client.

        Raises:
            RequestError: 503 if no worker answers; 404 if none has the model.
        """
        name, keep_s = "", None
        if self._state.settings.pool.by_model:
            name, keep_s = await model_of(self._exchange)
            name = await self._find_model(name)
        try:
            await self._answer(name)
        finally:
            if self._model is not None and self._state.models is not None:
                self._state.models.keep_for(self._model, keep_s)

    async def _find_model(self, name: str) -> str:
        """The name of the model that the request needs; "" = any."""
        models, has_body = self._state.models, bool(self._exchange.request.body)
        if models is not None and (has_body or self._again is RETRIED_STATUSES):
            self._model = await models.find(name)
            return self._model.name
        workers = self._state.pool.workers
        if name and workers and not any(worker.serves(name) for worker in workers):
            raise model_not_found(name, sorted({one for w in workers for one in w.models}))
        return name

    async def _answer(self, model: str) -> None:
        exchange, pool = self._exchange, self._state.pool
        # A model that this router started has one worker, so there is nothing to choose.
        is_choice = pool.reads_prompts and self._model is None
        is_read = is_choice and bool(exchange.request.body)
        prompt = await prompt_of(exchange.request.body) if is_read else b""
        tokenizer_worker = pool.tokenizer_worker if is_read else None
        tokens: Sequence[int] = ()
        if tokenizer_worker is not None:
            own = self._request.headers_for(tokenizer_worker)
            headers = [(name, value) for name, value in own if name == b"authorization"]
            headers += signed_caller(exchange, self._state, "POST", _TOKENIZE)
            tokens = await tokens_of(exchange.request.body, headers, tokenizer_worker)
        asked = RoutingRequest(prompt, exchange.request.header(ROUTING_KEY), tokens, model)
        most = len(pool.workers) if self._again is not RETRIED_STATUSES else 1 + self._retry.most
        for number in range(1 if self._retry.is_off else most):
            proxy = await self._pick(asked)
            if proxy is None:
                break
            if number and self._state.metrics is not None:
                self._state.metrics.retried(exchange.route)
            if await self._is_answered(proxy):
                return
        if self._kept is not None:
            await exchange.relay(self._kept.status, self._kept.headers)
            await exchange.piece(self._kept.body, is_last=True)
            return
        trouble = self._state.trouble(exchange)
        raise unavailable(self._why or trouble or "no worker took it", "no_worker")

    async def _pick(self, asked: RoutingRequest) -> Proxy | None:
        """Choose untried workers; if there are none and none has refused, pause and retry all."""
        if self._model is not None and self._state.models is not None:
            await self._state.models.load(self._model)
        proxy = self._state.pool.proxy(asked, self._tried, self._is_paired)
        if proxy is None and self._tried and self._kept is None:
            jitter = random.uniform(-self._retry.jitter, self._retry.jitter)
            await asyncio.sleep(self._pause_s * (1 + jitter))
            self._pause_s = min(self._pause_s * self._retry.growth, self._retry.longest_pause_s)
            self._tried.clear()
            proxy = self._state.pool.proxy(asked, (), self._is_paired)
        return proxy

    async def _is_answered(self, proxy: Proxy) -> bool:
        """Send the request to these workers; whether the client got a response.

        A request whose worker died is retried once only: the request may be the cause.

        Raises:
            RequestError: 503 if a second worker died, or one died in the middle of the response.
        """
        attempts: list[Attempt] = []
        try:
            with ExitStack() as stack:
                attempts += [stack.enter_context(worker.attempt()) for worker in proxy.workers]
                async with proxy.asking(self._request, attempts) as (answer, attempt):
                    try:
                        if await self._relay(answer, attempt):
                            return True
                    except WorkerLost:
                        attempt.is_good = False
                        raise
            self._tried += proxy.workers
            return False
        except (WorkerUnreachable, WorkerLost) as error:
            self._blame([attempt.worker for attempt in attempts if attempt.is_good is False], error)
            return False

    def _blame(self, workers: Sequence[Worker], error: WorkerUnreachable | WorkerLost) -> None:
        """Record why there is no response; RequestError 503 if no other worker may be tried."""
        self._tried += workers
        context = self._exchange.context
        why = f"{' and '.join(w.url for w in workers)} was asked: {error}"
        log.warning("not answered id=%s %s", context.id, why)
        sees = self._state.sees_workers(self._exchange)
        self._why = why if sees else "a worker was asked and did not answer"
        for worker in workers:
            worker.check_soon.set()
        if isinstance(error, WorkerUnreachable):
            return
        has_started = self._exchange.started
        if has_started:
            if self._state.metrics is not None:
                self._state.metrics.broke_off(self._exchange.route)
            if not self._exchange.streaming:
                self._exchange.cut()
        if self._has_lost_worker or has_started:
            raise unavailable(self._why, "worker_lost") from None
        self._has_lost_worker = True

    async def _relay(self, answer: UpstreamResponse, attempt: Attempt) -> bool:
        """Relay a response; False if another worker should be tried.

        Raises:
            WorkerLost: the connection ended before the response did.
        """
        media, length = answer.header(b"content-type"), answer.header(b"content-length")
        lines = [line for line in answer.headers if line[0] not in _NOT_RETURNED]
        is_short = length.isdigit() and int(length[:20]) <= WHOLE_BYTES
        if not is_stream(media) and is_short:
            body = await answer.whole(WHOLE_BYTES)
            attempt.is_good = is_worker_good(answer, body, self._request.headers)
            if answer.status in FAILED:
                attempt.worker.check_soon.set()  # it may be shutting down
            if answer.status not in _BODILESS:
                lines.append((b"content-length", b"%d" % len(body)))
            if answer.status in self._again:
                self._kept = BufferedResponse(answer.status, lines, body)
                return False
            await self._exchange.relay(answer.status, lines)
            await self._exchange.piece(body, is_last=True)
            return True
        if length and not is_stream(media) and answer.status not in _BODILESS:
            lines.append((b"content-length", length))
        await self._stream(answer, lines, media)
        attempt.is_good = is_worker_good(answer, b"", self._request.headers)
        return True

    async def _stream(
        self, answer: UpstreamResponse, lines: Sequence[tuple[bytes, bytes]], media: bytes
    ) -> None:
        """Relay a body as it arrives; the head is sent with the first piece."""
        exchange = self._exchange
        events = EventBuffer(media) if is_stream(media) else None
        async for piece in answer.pieces():
            ready = events.ready(piece) if events is not None else piece
            if not ready:
                continue
            if not exchange.started:
                await exchange.relay(answer.status, lines)
                exchange.streaming = events is not None
                exchange.request.drop_body()
                self._request.body = b""
            await exchange.piece(ready)
        if not exchange.started:
            await exchange.relay(answer.status, lines)
        await exchange.piece(events.rest() if events is not None else b"", is_last=True)


def outgoing(exchange: HttpExchange, state: RouterState) -> OutgoingRequest:
    """The request as it is sent to workers, with its caller if there is a secret to sign that.

    Raises:
        RequestError: 400 if the query has bytes that HTTP cannot carry.
    """
    target = urllib.parse.quote(exchange.request.path).encode()
    if exchange.request.raw_query:
        target += b"?" + exchange.request.raw_query
    if not _TARGET.fullmatch(target):
        raise RequestError("the query has a byte that is no printable ASCII", code="invalid_query")
    headers = [
        (name, value.strip(b" \t"))
        for name, value in exchange.request.headers.items()
        if name not in _NOT_SENT and not name.startswith(b"sec-")
    ]
    method = "GET" if exchange.request.method == "HEAD" else exchange.request.method
    headers += signed_caller(exchange, state, method, exchange.request.path)
    return OutgoingRequest(method, target, headers, exchange.request.body)


def signed_caller(exchange: HttpExchange, state: RouterState, method: str, path: str) -> Headers:
    """The header that names the caller of a request to a worker; none without a secret."""
    context = exchange.context
    if state.signer is None or not context.tenant:
        return []
    value = state.signer.sign(context.tenant, context.is_admin, method, path)
    return [(_TENANT, value.encode())]


async def model_of(exchange: HttpExchange) -> tuple[str, float | None]:
    """The model that a request names, "" = none, and the seconds that it is to stay loaded
    (Ollama's `keep_alive`), None = not said.

    Raises:
        RequestError: 400 if the body is no JSON object.
    """
    raw = exchange.request.body
    if not raw:
        return "", None
    if exchange.request.header(b"content-type").startswith("multipart/"):
        ends = raw[:_FORM_BYTES], raw[-_FORM_BYTES:]  # the file may come first or last
        found = next((match for part in ends if (match := _FORM_MODEL.search(part))), None)
        return (found[1].decode("utf-8", "replace") if found else ""), None
    fields = await exchange.request.peek()
    name = fields.get("model") or fields.get("name") or ""
    return name if isinstance(name, str) else "", _seconds(fields.get("keep_alive"))


def _seconds(said: object) -> float | None:
    """Seconds of a `keep_alive`: a number, or a number with a unit; None if it is neither."""
    if isinstance(said, (int, float)) and not isinstance(said, bool):
        return float(max(-1, min(said, _LONGEST_S)))
    found = _DURATION.fullmatch(said) if isinstance(said, str) else None
    if found is None:
        return None
    seconds = float(found[1]) * {"ms": 0.001, "": 1, "s": 1, "m": 60, "h": 3600}[found[2]]
    return max(-1.0, min(seconds, _LONGEST_S))


def is_worker_good(answer: UpstreamResponse, body: bytes, asked: Headers) -> bool | None:
    """Whether a response shows that its worker is healthy.

    None if it shows neither: the worker refused because of load, or because of a short deadline.

    Args:
        body: the response body, if known.
        asked: headers of the request.
    """
    if answer.status in _BUSY:
        return None
    if answer.status not in FAILED:
        return True
    if answer.status == 503 and answer.header(b"retry-after"):
        return None
    if answer.status == 504 and any(name == _DEADLINE for name, _ in asked):
        return None
    return None if _code_of(body) in _NEUTRAL_CODES else False


def _code_of(body: bytes) -> str:
    """The error code of a response in the form of OpenAI or SGLang; "" if it has none."""
    try:
        found: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    error = found.get("error") if is_object(found) else None
    code = error.get("code") if is_object(error) else None
    if code is None and is_object(found):
        code = found.get("code")
    return code if isinstance(code, str) else ""


def is_stream(media: bytes) -> bool:
    """Whether the content type is an event stream."""
    return media.partition(b";")[0].strip().lower() in _EVENT_ENDS


class EventBuffer:
    """Holds a stream back to event boundaries, so that a client never gets half an event.

    No byte is changed, dropped or reordered.

    Args:
        media: content type of the stream.
    """

    def __init__(self, media: bytes) -> None:
        self._ends = _EVENT_ENDS[media.partition(b";")[0].strip().lower()]
        self._rest = b""

    def ready(self, piece: bytes) -> bytes:
        """Add a piece; the bytes that can be sent now, up to the last whole event."""
        if not self._rest and piece.endswith(self._ends):
            return piece
        searched = max(0, len(self._rest) - 3)  # an end marker may be split over pieces
        data = self._rest + piece
        found = [(data.rfind(mark, searched), len(mark)) for mark in self._ends]
        end = max(at + size if at >= 0 else 0 for at, size in found)
        if len(data) - end > MOST_HELD:
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """The bytes after the last whole event, at the end of the stream."""
        return self._rest


async def prompt_of(body: bytes) -> bytes:
    """The first MOST_BYTES of the prompt, or of the body if it cannot be parsed."""
    size = 0 if len(body) <= _THREAD_BYTES else len(body)
    return await off_loop(size, lambda: _prompt_of(body))


def _prompt_of(body: bytes) -> bytes:
    if body.count(b",") > MAX_VALUES or body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        return body[:MOST_BYTES]
    try:
        fields: object = orjson.loads(body)
        if not is_object(fields):
            return body[:MOST_BYTES]
        parts = [fields[name] for name in PROMPT_FIELDS if name in fields]
        return b"".join(map(_as_bytes, parts))[:MOST_BYTES]
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, UnicodeEncodeError):
        return body[:MOST_BYTES]


def _as_bytes(part: object) -> bytes:
    return part.encode() if isinstance(part, str) else orjson.dumps(part)


async def tokens_of(body: bytes, headers: Headers, worker: Worker) -> list[int]:
    """Token ids of the prompt, from the body or from the /tokenize route of `worker`.

    Empty if unknown: a batch, separated prefixes, invalid ids, or no answer from the worker.
    """
    question = question_of(body)
    if is_list(question):
        return _ids(question)
    if not question:
        return []
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            sent = [*headers, (b"content-type", b"application/json")]
            asked = orjson.dumps(question)
            answer = await worker.upstream.send("POST", _TOKENIZE.encode(), sent, asked)
            reply: object = orjson.loads(await answer.whole(_MOST_ANSWER_BYTES))
    except (WorkerUnreachable, WorkerLost, TimeoutError, orjson.JSONDecodeError):
        return []
    found = reply.get("tokens") if answer.status == 200 and is_object(reply) else None
    return _ids(found) if is_list(found) else []


def _ids(found: Sequence[object]) -> list[int]:
    """The token ids; empty if one is invalid, because a worker refuses such a prompt."""
    ids = [token for token in found if type(token) is int and 0 <= token <= _MOST_ID]
    return ids if len(ids) == len(found) else []


def question_of(body: bytes) -> object:
    """The token ids in the body, or the body of a /tokenize request; None if there is neither."""
    if len(body) > _MOST_BODY_BYTES:
        return None
    try:
        fields: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not is_object(fields) or any(fields.get(name) for name in _OWN):
        return None
    for name in ("input_ids", "prompt", "text"):
        given = fields.get(name)
        if isinstance(given, str) and name != "input_ids":
            return {"prompt": given}
        if is_list(given) and given and all(type(token) is int for token in given):
            return given
    if is_list(fields.get("messages")):
        return {name: fields[name] for name in _CHAT if fields.get(name)}
    return None
