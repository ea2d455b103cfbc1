"""The router's parts that need no network: breaker, fleet, verdicts, frames, gate."""

import asyncio
from typing import Any, cast

import pytest

from banyan.base.errors import ConfigError, RequestError
from banyan.router.config import (
    DECODE,
    PLAIN,
    PREFILL,
    BreakerConfig,
    HealthConfig,
    LimitConfig,
    PoolConfig,
    RouterConfig,
    WorkerSpec,
)
from banyan.router.forward import MOST_HELD, EventBuffer, is_stream, is_worker_good
from banyan.router.policies import RoutingRequest
from banyan.router.state import AdmissionLimiter
from banyan.router.upstream import UpstreamResponse, checked_url
from banyan.router.worker import CircuitBreaker, CircuitState, Worker
from banyan.router.worker_pool import WorkerPool


def fail(breaker: CircuitBreaker, now: float) -> None:
    breaker.end(False, breaker.begin(now), now)


def test_a_breaker_opens_after_failures_that_come_together() -> None:
    breaker = CircuitBreaker(BreakerConfig(failures=3, window_s=10, open_s=5))
    for now in (0.0, 4.0, 11.0):
        fail(breaker, now)
        assert breaker.lets_in(now)
    fail(breaker, 12.0)
    assert breaker.state(12.0) is CircuitState.OPEN and not breaker.lets_in(16.9)


def test_a_success_between_failures_starts_the_count_again() -> None:
    breaker = CircuitBreaker(BreakerConfig(failures=3))
    for now in range(30):
        breaker.end(now % 3 == 2, breaker.begin(now), now)
        assert breaker.lets_in(now)


def test_what_says_nothing_of_a_worker_neither_counts_nor_starts_the_count_again() -> None:
    breaker = CircuitBreaker(BreakerConfig(failures=3))
    for now in range(100):
        breaker.end(None, breaker.begin(now), now)
    for now in (100, 102):
        fail(breaker, now)
        breaker.end(None, breaker.begin(now), now + 1)
        assert breaker.lets_in(now + 1)
    fail(breaker, 104)
    assert breaker.state(104) is CircuitState.OPEN


def test_a_trial_while_a_breaker_is_open_counts_like_any_other() -> None:
    breaker = CircuitBreaker(BreakerConfig(failures=1, successes=2, open_s=5))
    fail(breaker, 0.0)
    fail(breaker, 3.0)
    assert breaker.state(7.9) is CircuitState.OPEN and breaker.state(8.0) is CircuitState.HALF_OPEN
    fail(breaker, 8.0)
    for now in (9.0, 10.0):
        assert breaker.state(now) is CircuitState.OPEN
        breaker.end(True, breaker.begin(now), now)
    assert breaker.state(10.0) is CircuitState.CLOSED


@pytest.mark.parametrize("kind", [PLAIN, PREFILL, DECODE])
def test_where_all_breakers_are_open_the_one_that_failed_least_recently_is_tried(kind: str) -> None:
    some = tuple(WorkerSpec(f"http://w{at}", kind) for at in range(3))
    others = (
        () if kind == PLAIN else (WorkerSpec("http://p", PREFILL), WorkerSpec("http://d", DECODE))
    )
    pool = WorkerPool(
        RouterConfig(
            pool=PoolConfig(workers=some + others, is_paired=kind != PLAIN),
            breaker=BreakerConfig(failures=1),
            health=HealthConfig(is_off=True),
        )
    )
    mine = [w for w in pool.workers if w.spec.kind == kind]
    failed: list[Worker] = []
    for worker in (*mine[1:], mine[0]):
        with worker.attempt() as attempt:
            attempt.is_good = False
        failed.append(worker)
        if len(failed) < len(mine):
            assert pool.choose(kind, RoutingRequest()) not in failed
    tried: list[Worker] = []
    while (worker := pool.choose(kind, RoutingRequest(), tried)) is not None:
        tried.append(worker)
    assert tried == failed
    assert not pool.trouble() and pool.proxy(RoutingRequest(), (), kind != PLAIN) is not None
    failed[0].trouble = "away"
    assert pool.choose(kind, RoutingRequest()) is tried[1], "one that is not well is not tried"


LOAD = ("queue_full", "overloaded", "timed_out", "too_many_requests", "deadline_exceeded")


@pytest.mark.parametrize(
    ("status", "headers", "body", "asked", "verdict"),
    [
        *((status, {}, b"", {}, True) for status in (200, 204, 302, 400, 404, 413, 500, 501)),
        *((status, {}, b"", {}, None) for status in (429, 529)),
        *((status, {}, b"x", {}, False) for status in (502, 503, 504)),
        (503, {"retry-after": "5"}, b"", {}, None),
        (502, {"retry-after": "5"}, b"", {}, False),
        *((503, {}, b'{"error":{"code":"%s"}}' % code.encode(), {}, None) for code in LOAD),
        *((503, {}, b'{"code":"%s"}' % code.encode(), {}, None) for code in LOAD),
        (504, {}, b'{"error":{"code":"deadline_exceeded"}}', {}, None),
        (504, {}, b'{"error":"too late"}', {"x-request-timeout": "1"}, None),
        (503, {}, b'{"error":{"code":"engine_unavailable"}}', {}, False),
        (503, {}, b'{"error":{"code":["queue_full"]}}', {}, False),
        (503, {}, b'["queue_full"]', {}, False),
    ],
)
def test_what_an_answer_says_of_its_worker(
    status: int, headers: dict, body: bytes, asked: dict, verdict: bool | None
) -> None:
    def lines(given: dict) -> list[tuple[bytes, bytes]]:
        return [(name.encode(), value.encode()) for name, value in given.items()]

    answer = UpstreamResponse(cast(Any, None), status, lines(headers))
    assert is_worker_good(answer, body, lines(asked)) is verdict


@pytest.mark.parametrize(
    "url",
    ["http://:pw@host", "http://me@host", "http://me:pw@host", "http://@host", "http://:@host:1"]
    + ["http://host/x", "http://host?x", "http://host#x", "http://host:0", "ftp://host", "host"]
    + ["http://host:70000", "http://h st", "http://", "http://h\u00f6st"],
)
def test_what_is_no_address_of_a_worker_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        checked_url(url)


def test_a_breaker_that_was_open_lets_in_one_at_a_time_until_enough_succeed() -> None:
    breaker = CircuitBreaker(BreakerConfig(failures=1, successes=2, open_s=5))
    fail(breaker, 0.0)
    assert breaker.lets_in(5.0)
    probe = breaker.begin(5.0)
    assert probe and not breaker.lets_in(5.0)
    breaker.end(True, probe, 5.1)
    assert breaker.state(5.1) is CircuitState.HALF_OPEN and breaker.lets_in(5.1)
    breaker.end(True, breaker.begin(5.2), 5.3)
    assert breaker.state(5.3) is CircuitState.CLOSED


def test_a_breaker_that_fails_its_trial_opens_again() -> None:
    breaker = CircuitBreaker(BreakerConfig(failures=1, open_s=5))
    fail(breaker, 0.0)
    fail(breaker, 5.0)
    assert breaker.state(9.9) is CircuitState.OPEN and breaker.state(10.0) is CircuitState.HALF_OPEN


def test_a_client_that_leaves_a_trial_speaks_neither_for_nor_against() -> None:
    breaker = CircuitBreaker(BreakerConfig(failures=1, successes=1, open_s=5))
    fail(breaker, 0.0)
    breaker.end(None, breaker.begin(6.0), 6.5)
    assert breaker.state(6.5) is CircuitState.HALF_OPEN and breaker.lets_in(6.5)


def test_a_breaker_may_never_open() -> None:
    breaker = CircuitBreaker(BreakerConfig(is_off=True))
    for _ in range(100):
        fail(breaker, 0.0)
    assert breaker.lets_in(0.0)


@pytest.mark.parametrize("mark", [b"\n\n", b"\r\n\r\n"])
def test_events_are_passed_on_whole_wherever_they_were_cut(mark: bytes) -> None:
    data = b"data: a" + mark + b"event: x\ndata: {}" + mark + b"tail"
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            frames = EventBuffer(b"text/event-stream; charset=utf-8")
            parts = data[:first], data[first:second], data[second:]
            got = [frames.ready(part) for part in parts]
            assert all(part.endswith(mark) for part in got if part)
            assert b"".join(got) + frames.rest() == data and frames.rest() == b"tail"


def test_lines_are_the_events_of_json_lines() -> None:
    frames = EventBuffer(b"application/x-ndjson")
    assert frames.ready(b'{"a":1}\n{"b"') == b'{"a":1}\n' and frames.rest() == b'{"b"'
    assert not is_stream(b"application/json") and is_stream(b"Text/Event-Stream;x=y")


def test_an_event_without_end_is_not_held_for_ever() -> None:
    frames = EventBuffer(b"text/event-stream")
    sent = sum(len(frames.ready(b"x" * 65536)) for _ in range(40))
    assert sent + len(frames.rest()) == 40 * 65536 and len(frames.rest()) <= MOST_HELD


def test_no_more_requests_begin_in_a_second_than_may() -> None:
    now = 0.0
    admission = AdmissionLimiter(LimitConfig(rate=2), lambda: now)

    async def ask() -> str:
        try:
            async with admission.slot():
                return "in"
        except RequestError as error:
            return error.code

    assert [asyncio.run(ask()) for _ in range(3)] == ["in", "in", "rate_limited"]
    now = 0.6
    assert [asyncio.run(ask()) for _ in range(2)] == ["in", "rate_limited"]


def test_who_waits_too_long_for_a_place_is_refused_and_leaves_the_queue() -> None:
    async def play() -> None:
        admission = AdmissionLimiter(LimitConfig(concurrent=1, waiting=5, waiting_s=0.02))
        async with admission.slot():
            with pytest.raises(RequestError) as caught:
                async with admission.slot():
                    raise AssertionError("there was no place")
            assert caught.value.code == "queue_timeout" and admission.waiting == 0
            leaving = asyncio.create_task(_enter(admission))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert admission.waiting == 0
        assert admission.inside == 0

    asyncio.run(play())


def test_places_go_to_who_waits_in_the_order_of_coming() -> None:
    async def play() -> list[int]:
        admission = AdmissionLimiter(LimitConfig(concurrent=2, waiting=50))
        order: list[int] = []
        most = 0

        async def work(number: int) -> None:
            nonlocal most
            async with admission.slot():
                most = max(most, admission.inside)
                order.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*(work(number) for number in range(20)))
        assert most == 2 and admission.inside == 0
        return order

    assert asyncio.run(play()) == list(range(20))


async def _enter(admission: AdmissionLimiter) -> None:
    async with admission.slot():
        raise AssertionError("there was no place")
