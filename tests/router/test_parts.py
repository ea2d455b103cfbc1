"""The router's parts that need no network: breaker, frames, gate."""

import asyncio

import pytest

from banyan.base.errors import RequestError
from banyan.router.breaker import Breaker, BreakerRule, Circuit
from banyan.router.config import LimitConfig
from banyan.router.gate import Gate
from banyan.router.stream_frames import MOST_HELD, Frames, is_stream


def fail(breaker: Breaker, now: float) -> None:
    breaker.end(False, breaker.begin(now), now)


def test_a_breaker_opens_after_failures_that_come_together() -> None:
    breaker = Breaker(BreakerRule(failures=3, window_s=10, open_s=5))
    for now in (0.0, 4.0, 11.0):
        fail(breaker, now)
        assert breaker.lets_in(now)
    fail(breaker, 12.0)
    assert breaker.state(12.0) is Circuit.OPEN and not breaker.lets_in(16.9)


def test_a_breaker_that_was_open_lets_in_one_at_a_time_until_enough_succeed() -> None:
    breaker = Breaker(BreakerRule(failures=1, successes=2, open_s=5))
    fail(breaker, 0.0)
    assert breaker.lets_in(5.0)
    probe = breaker.begin(5.0)
    assert probe and not breaker.lets_in(5.0)
    breaker.end(True, probe, 5.1)
    assert breaker.state(5.1) is Circuit.HALF_OPEN and breaker.lets_in(5.1)
    breaker.end(True, breaker.begin(5.2), 5.3)
    assert breaker.state(5.3) is Circuit.CLOSED


def test_a_breaker_that_fails_its_trial_opens_again() -> None:
    breaker = Breaker(BreakerRule(failures=1, open_s=5))
    fail(breaker, 0.0)
    fail(breaker, 5.0)
    assert breaker.state(9.9) is Circuit.OPEN and breaker.state(10.0) is Circuit.HALF_OPEN


def test_a_client_that_leaves_a_trial_speaks_neither_for_nor_against() -> None:
    breaker = Breaker(BreakerRule(failures=1, successes=1, open_s=5))
    fail(breaker, 0.0)
    breaker.end(None, breaker.begin(6.0), 6.5)
    assert breaker.state(6.5) is Circuit.HALF_OPEN and breaker.lets_in(6.5)


def test_a_breaker_may_never_open() -> None:
    breaker = Breaker(BreakerRule(failures=0))
    for _ in range(100):
        fail(breaker, 0.0)
    assert breaker.lets_in(0.0)


@pytest.mark.parametrize("mark", [b"\n\n", b"\r\n\r\n"])
def test_events_are_passed_on_whole_wherever_they_were_cut(mark: bytes) -> None:
    data = b"data: a" + mark + b"event: x\ndata: {}" + mark + b"tail"
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            frames = Frames(b"text/event-stream; charset=utf-8")
            parts = data[:first], data[first:second], data[second:]
            got = [frames.ready(part) for part in parts]
            assert all(part.endswith(mark) for part in got if part)
            assert b"".join(got) + frames.rest() == data and frames.rest() == b"tail"


def test_lines_are_the_events_of_json_lines() -> None:
    frames = Frames(b"application/x-ndjson")
    assert frames.ready(b'{"a":1}\n{"b"') == b'{"a":1}\n' and frames.rest() == b'{"b"'
    assert not is_stream(b"application/json") and is_stream(b"Text/Event-Stream;x=y")


def test_an_event_without_end_is_not_held_for_ever() -> None:
    frames = Frames(b"text/event-stream")
    sent = sum(len(frames.ready(b"x" * 65536)) for _ in range(40))
    assert sent + len(frames.rest()) == 40 * 65536 and len(frames.rest()) <= MOST_HELD


def test_no_more_requests_begin_in_a_second_than_may() -> None:
    now = 0.0
    gate = Gate(LimitConfig(rate=2), lambda: now)

    async def ask() -> str:
        try:
            async with gate.place():
                return "in"
        except RequestError as error:
            return error.code

    assert [asyncio.run(ask()) for _ in range(3)] == ["in", "in", "rate_limited"]
    now = 0.6
    assert [asyncio.run(ask()) for _ in range(2)] == ["in", "rate_limited"]


def test_who_waits_too_long_for_a_place_is_refused_and_leaves_the_queue() -> None:
    async def play() -> None:
        gate = Gate(LimitConfig(concurrent=1, waiting=5, waiting_s=0.02))
        async with gate.place():
            with pytest.raises(RequestError) as caught:
                async with gate.place():
                    raise AssertionError("there was no place")
            assert caught.value.code == "queue_timeout" and gate.waiting == 0
            leaving = asyncio.create_task(_enter(gate))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert gate.waiting == 0
        assert gate.inside == 0

    asyncio.run(play())


def test_places_go_to_who_waits_in_the_order_of_coming() -> None:
    async def play() -> list[int]:
        gate = Gate(LimitConfig(concurrent=2, waiting=50))
        order: list[int] = []
        most = 0

        async def work(number: int) -> None:
            nonlocal most
            async with gate.place():
                most = max(most, gate.inside)
                order.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*(work(number) for number in range(20)))
        assert most == 2 and gate.inside == 0
        return order

    assert asyncio.run(play()) == list(range(20))


async def _enter(gate: Gate) -> None:
    async with gate.place():
        raise AssertionError("there was no place")
