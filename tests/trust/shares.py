"""Who gets how much when too much comes: two callers of whom one asks ten times as often, and the
lowest priority beneath a crowd of the highest."""

import asyncio
import time
from dataclasses import dataclass, field

import httpx

from tests.system.serving import CALL_S

LOAD_S, WARM_S = 20.0, 4.0
EAGER, MODEST = 40, 4
TOKENS = 400
EVEN = 1.15
"""Shares of two who wait all the time differ by no more than this factor."""
HIGH = 30
WAIT_S = 2.0
"""The bound after which the lowest priority goes first."""


@dataclass
class Served:
    """When answers ended, seconds from the start, and how long each took."""

    ends_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def count(self, from_s: float, to_s: float) -> int:
        return sum(from_s <= at < to_s for at in self.ends_s)


async def crowd(
    url: str, size: int, until_s: float, served: Served, key: str = "", priority: int | None = None
) -> None:
    """So many clients, each of whom asks again as soon as it is answered."""
    began = time.monotonic()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    more = {} if priority is None else {"priority": priority}

    async def one(number: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=CALL_S, headers=headers) as client:
            while (sent := time.monotonic()) - began < until_s:
                body = {"input_ids": [5 + number, 6, 7], "sampling_params": params, **more}
                answer = await client.post("/generate", json=body)
                assert answer.status_code == 200, answer.text
                served.ends_s.append(time.monotonic() - began)
                served.took_s.append(time.monotonic() - sent)

    await asyncio.gather(*(one(number) for number in range(size)))


def test_two_callers_of_whom_one_asks_ten_times_as_often_get_equal_shares(server):
    eager, modest = Served(), Served()

    async def both(url: str) -> None:
        await asyncio.gather(
            crowd(url, EAGER, LOAD_S, eager, "eager-key"),
            crowd(url, MODEST, LOAD_S, modest, "modest-key"),
        )

    flags = ("--max-running-requests", "2", "--api-key", "eager-key modest-key")
    with server(*flags) as running:
        asyncio.run(both(running.url))
    theirs, ours = (served.count(WARM_S, LOAD_S) for served in (eager, modest))
    print(
        f"\nfigure: {EAGER} against {MODEST} clients for {LOAD_S:g} s: {theirs} and {ours} "
        f"answers, {theirs / max(1, ours):.2f} : 1"
    )
    assert ours > 10 and 1 / EVEN < theirs / ours < EVEN


def test_the_lowest_priority_waits_no_longer_than_the_bound(server):
    high, low = Served(), Served()

    async def both(url: str) -> None:
        above = asyncio.create_task(crowd(url, HIGH, LOAD_S, high, priority=100))
        await asyncio.sleep(WARM_S)  # the crowd waits by now
        await crowd(url, 1, LOAD_S - 2 * WARM_S, low, priority=0)
        await above

    flags = (
        *("--max-running-requests", "4", "--enable-priority-scheduling"),
        *("--priority-scheduling-max-wait", f"{WAIT_S:g}"),
        *("--priority-scheduling-preemption-threshold", "1000"),
    )
    with server(*flags) as running:
        asyncio.run(both(running.url))
        alone = Served()
        asyncio.run(crowd(running.url, 4, 1.0, alone))
    own_s = max(alone.took_s)
    print(
        f"\nfigure: beneath {HIGH} clients of a higher priority: {len(low.ends_s)} answers, the "
        f"longest after {max(low.took_s):.1f} s, of which {WAIT_S:g} s may be waited and "
        f"{own_s:.1f} s are its own"
    )
    assert len(low.ends_s) >= 3
    # A place is free when one of those that run has ended: that may take as long as one answer.
    assert max(low.took_s) < WAIT_S + 3 * own_s + 1
