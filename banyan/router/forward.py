"""One request on its way: to a worker, to another one as long as nothing was answered, and the
answer back, byte for byte and as it comes.
"""

import asyncio
import random
import re
import time
import urllib.parse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from banyan.base.errors import RequestError
from banyan.base.log import logger
from banyan.router.body import prompt_of
from banyan.router.pairs import PATHS
from banyan.router.policies import ROUTING_KEY, Asked
from banyan.router.prompt_tokens import tokens_of
from banyan.router.proxy import Outgoing, Proxy
from banyan.router.state import RouterState
from banyan.router.stream_frames import Frames, is_stream
from banyan.router.upstream import Answer, Lost, NotReached
from banyan.router.verdict import FAILED, speaks_for_worker
from banyan.router.worker import Try, Worker
from banyan.server.errors import unavailable
from banyan.server.http.exchange import HttpExchange

log = logger(__name__)

WHOLE_BYTES = 1 << 20
"""Answers up to this size that are no streams are sent on when all of them is here, so that one
that breaks off can be asked for again."""
AGAIN = (429, 502, 503, 504)
"""Statuses that another worker may do better than."""
_TARGET = re.compile(rb"[\x21-\x7e]+")
_BODILESS = (204, 304)
_OWN_TO_A_CONNECTION = (
    *(b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"te", b"trailer"),
    *(b"upgrade", b"expect", b"content-length"),
)
_NOT_SENT = (*_OWN_TO_A_CONNECTION, b"host", b"origin", b"proxy-authorization")
_NOT_RETURNED = (*_OWN_TO_A_CONNECTION, b"date", b"server")


@dataclass(frozen=True)
class Kept:
    """An answer that its client gets when nobody does better."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


async def forward(exchange: HttpExchange, state: RouterState) -> None:
    """Handler of the routes whose requests need steps: any worker answers, or any pair."""
    is_paired = state.settings.fleet.is_paired
    if is_paired and exchange.path not in PATHS:
        raise RequestError(
            f"{exchange.path} is not shared by prefill and decode servers",
            status=501,
            code="not_routed",
            hint=f"These are: {', '.join(PATHS)}",
        )
    await _forward(exchange, state, AGAIN, is_paired)


async def tell(exchange: HttpExchange, state: RouterState) -> None:
    """Handler of the routes that any worker answers without a step."""
    await _forward(exchange, state, AGAIN, False)


async def seek(exchange: HttpExchange, state: RouterState) -> None:
    """Handler of routes about what one worker keeps: asks one after the other, until one has it."""
    await _forward(exchange, state, (*AGAIN, 404), False)


async def respond(exchange: HttpExchange, state: RouterState) -> None:
    """Handler of new responses, which may go on from one that some worker keeps."""
    goes_on = b'"previous_response_id"' in exchange.body and not state.settings.fleet.is_paired
    await (seek if goes_on else forward)(exchange, state)


async def _forward(
    exchange: HttpExchange, state: RouterState, again: Sequence[int], is_paired: bool
) -> None:
    if state.draining:
        raise unavailable("the router is shutting down; send the request elsewhere", "draining")
    began_s = time.monotonic()
    limit_s = state.settings.limits.request_s
    try:
        async with state.gate.place(), asyncio.timeout(limit_s):
            await Course(exchange, state, again, is_paired).run()
    except TimeoutError:
        raise RequestError(
            f"the request did not end within {limit_s:g} s", status=504, code="timeout"
        ) from None
    finally:
        if state.figures is not None:
            seconds = time.monotonic() - began_s
            state.figures.ended(exchange.route, exchange.status, seconds)


class Course:
    """What one request goes through.

    Args:
        again: statuses that another worker may do better than.
        is_paired: it takes a prefill and a decode worker.
    """

    def __init__(
        self, exchange: HttpExchange, state: RouterState, again: Sequence[int], is_paired: bool
    ) -> None:
        self._exchange = exchange
        self._request = outgoing(exchange)
        self._state = state
        self._again = again
        self._is_paired = is_paired
        self._retry = state.settings.retry
        self._pause_s = self._retry.first_pause_s
        self._tried: list[Worker] = []
        """Those that did not answer, or refused."""
        self._kept: Kept | None = None
        self._why = ""
        self._has_lost = False

    async def run(self) -> None:
        """Answer, or RequestError 503."""
        exchange, fleet = self._exchange, self._state.fleet
        is_read = fleet.reads_prompts and bool(exchange.body)
        prompt = await prompt_of(exchange.body) if is_read else b""
        speaker = fleet.speaker if is_read else None
        tokens: Sequence[int] = ()
        if speaker is not None:
            tokens = await tokens_of(exchange.body, self._request.headers, speaker)
        asked = Asked(prompt, exchange.header(ROUTING_KEY), tokens)
        most = len(fleet.workers) if self._again is not AGAIN else 1 + self._retry.most
        for number in range(1 if self._retry.is_off else most):
            proxy = await self._pick(asked)
            if proxy is None:
                break
            if number and self._state.figures is not None:
                self._state.figures.retried(exchange.route)
            if await self._is_answered(proxy):
                return
        if self._kept is not None:
            await exchange.relay(self._kept.status, self._kept.headers)
            await exchange.piece(self._kept.body, is_last=True)
            return
        raise unavailable(self._why or fleet.trouble() or "no worker took it", "no_worker")

    async def _pick(self, asked: Asked) -> Proxy | None:
        """Workers that have not been tried; where there are none, and none has refused, those that
        have been, after a pause."""
        proxy = self._state.fleet.proxy(asked, self._tried, self._is_paired)
        if proxy is None and self._tried and self._kept is None:
            jitter = random.uniform(-self._retry.jitter, self._retry.jitter)
            await asyncio.sleep(self._pause_s * (1 + jitter))
            self._pause_s = min(self._pause_s * self._retry.growth, self._retry.longest_pause_s)
            self._tried.clear()
            proxy = self._state.fleet.proxy(asked, (), self._is_paired)
        return proxy

    async def _is_answered(self, proxy: Proxy) -> bool:
        """Whether the client has its answer. A request that a worker was lost with is sent to one
        more: it may be the reason.

        Raises:
            RequestError: 503; a worker was lost with this request once more, or in its answer.
        """
        tries: list[Try] = []
        try:
            with ExitStack() as stack:
                tries += [stack.enter_context(worker.trying()) for worker in proxy.workers]
                async with proxy.asking(self._request, tries) as (answer, attempt):
                    try:
                        if await self._relay(answer, attempt):
                            return True
                    except Lost:
                        attempt.is_good = False
                        raise
            self._tried += proxy.workers
            return False
        except (NotReached, Lost) as error:
            self._blame([attempt.worker for attempt in tries if attempt.is_good is False], error)
            return False

    def _blame(self, workers: Sequence[Worker], error: NotReached | Lost) -> None:
        """Note why there is no answer; RequestError 503 where nobody else may be asked."""
        self._tried += workers
        self._why = f"{' and '.join(w.url for w in workers)} was asked: {error}"
        log.warning("not answered id=%s %s", self._exchange.context.id, self._why)
        for worker in workers:
            worker.doubted.set()
        if isinstance(error, NotReached):
            return
        has_started = self._exchange.started
        if has_started:
            if self._state.figures is not None:
                self._state.figures.broke_off(self._exchange.route)
            if not self._exchange.streaming:
                self._exchange.cut()
        if self._has_lost or has_started:
            raise unavailable(self._why, "worker_lost") from None
        self._has_lost = True

    async def _relay(self, answer: Answer, attempt: Try) -> bool:
        """Hand an answer on; False when another worker should be asked. Lost: it broke off."""
        media, length = answer.header(b"content-type"), answer.header(b"content-length")
        lines = [line for line in answer.headers if line[0] not in _NOT_RETURNED]
        is_short = length.isdigit() and int(length[:20]) <= WHOLE_BYTES
        if not is_stream(media) and is_short:
            body = await answer.whole(WHOLE_BYTES)
            attempt.is_good = speaks_for_worker(answer, body, self._request.headers)
            if answer.status in FAILED:
                attempt.worker.doubted.set()  # it may be leaving
            if answer.status not in _BODILESS:
                lines.append((b"content-length", b"%d" % len(body)))
            if answer.status in self._again:
                self._kept = Kept(answer.status, lines, body)
                return False
            await self._exchange.relay(answer.status, lines)
            await self._exchange.piece(body, is_last=True)
            return True
        if length and not is_stream(media) and answer.status not in _BODILESS:
            lines.append((b"content-length", length))
        await self._stream(answer, lines, media)
        attempt.is_good = speaks_for_worker(answer, b"", self._request.headers)
        return True

    async def _stream(
        self, answer: Answer, lines: Sequence[tuple[bytes, bytes]], media: bytes
    ) -> None:
        """Hand on a body as it comes; its head goes with the first piece of it."""
        exchange = self._exchange
        frames = Frames(media) if is_stream(media) else None
        async for piece in answer.pieces():
            ready = frames.ready(piece) if frames is not None else piece
            if not ready:
                continue
            if not exchange.started:
                await exchange.relay(answer.status, lines)
                exchange.streaming = frames is not None
                exchange.drop_body()
                self._request.body = b""
            await exchange.piece(ready)
        if not exchange.started:
            await exchange.relay(answer.status, lines)
        await exchange.piece(frames.rest() if frames is not None else b"", is_last=True)


def outgoing(exchange: HttpExchange) -> Outgoing:
    """The request as workers get it; RequestError 400: HTTP cannot carry its query."""
    target = urllib.parse.quote(exchange.path).encode()
    if exchange.raw_query:
        target += b"?" + exchange.raw_query
    if not _TARGET.fullmatch(target):
        raise RequestError("the query has a byte that is no printable ASCII", code="invalid_query")
    headers = [
        (name, value.strip(b" \t"))
        for name, value in exchange.headers.items()
        if name not in _NOT_SENT and not name.startswith(b"sec-")
    ]
    method = "GET" if exchange.method == "HEAD" else exchange.method
    return Outgoing(method, target, headers, exchange.body)
