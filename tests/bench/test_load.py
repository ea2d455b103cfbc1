"""Load: arrivals, the limit on concurrency, and what it says about itself."""

import asyncio
import math
import statistics

import pytest

from banyan.bench.datasets import Prompt
from banyan.bench.http import ExchangeError
from banyan.bench.serving import SelfWatch, poisson_times, run_load, trace_times


def test_arrivals_of_a_poisson_process_have_its_mean_and_spread() -> None:
    times = poisson_times(20_000, 50.0, seed=1)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 0.0 and min(gaps) >= 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(0.02, rel=0.03)
    assert times == poisson_times(20_000, 50.0, seed=1)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert poisson_times(3, math.inf, seed=1) == [0.0] * 3


def test_a_trace_starts_at_its_first_request_and_can_be_stretched() -> None:
    prompts = [Prompt("", [], 1, 1, at) for at in (7.0, 8.0, 10.5)]
    assert trace_times(prompts, 2.0) == [0.0, 2.0, 7.0]


@pytest.mark.asyncio
async def test_no_more_requests_are_open_than_allowed_and_all_places_are_used() -> None:
    now = most = 0

    async def send(index: int) -> int:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(5):
            await asyncio.sleep(0)
        now -= 1
        return index * 10

    reported: list[int] = []
    run = await run_load(20, send, [0.0] * 20, max_concurrency=4, progress=reported.append)
    assert most == 4
    assert run.outcomes == [index * 10 for index in range(20)]
    assert reported == list(range(1, 21))


@pytest.mark.asyncio
async def test_an_open_loop_does_not_wait_for_answers() -> None:
    started = 0
    all_started = asyncio.Event()

    async def send(index: int) -> int:
        nonlocal started
        started += 1
        if started == 50:
            all_started.set()
        await all_started.wait()
        return index

    run = await run_load(50, send, poisson_times(50, 5000.0, seed=2))
    assert len(run.outcomes) == 50
    assert len(run.watch.send_lag_s) == 50


@pytest.mark.asyncio
async def test_a_failed_request_is_an_outcome_and_the_others_go_on() -> None:
    async def send(index: int) -> int:
        if index == 1:
            raise ExchangeError("broken")
        return index

    run = await run_load(3, send, [0.0] * 3, max_concurrency=1)
    assert run.outcomes[0] == 0 and run.outcomes[2] == 2
    assert str(run.outcomes[1]) == "broken"


@pytest.mark.asyncio
async def test_a_run_that_is_cut_keeps_what_is_over_and_no_more() -> None:
    hangs = asyncio.Event()

    async def send(index: int) -> int:
        if index in (1, 3):
            hangs.set()
            await asyncio.Event().wait()
        return index

    task = asyncio.create_task(run_load(5, send, [0.0] * 5, max_concurrency=2))
    await hangs.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    run = await task
    assert (run.is_cut, run.outcomes, run.over) == (True, [0, 2], [0, 2])


@pytest.mark.asyncio
async def test_a_run_that_is_cut_before_anything_is_over_is_cancelled() -> None:
    task = asyncio.create_task(run_load(2, lambda index: asyncio.Event().wait(), [0.0] * 2))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_a_bug_in_the_sender_is_not_taken_for_a_failed_request() -> None:
    async def send(index: int) -> int:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        await run_load(2, send, [0.0] * 2)


def test_a_load_generator_that_was_the_bottleneck_says_so() -> None:
    assert SelfWatch(0.2, [0.001] * 99, [0.001]).warnings() == []
    (busy,) = SelfWatch(0.95).warnings()
    assert "95%" in busy
    (late,) = SelfWatch(0.2, [0.05] * 10).warnings()
    assert "50.0 ms late" in late
