"""Amounts and turns that callers share: one caller's load refuses no other."""

import asyncio
import threading
from contextlib import suppress

import pytest

from banyan.base.fair_share import CALLER, FairShare, TurnQueue, Turns
from banyan.base.thread_pool import Pool

WAIT_S = 60.0


def fill(share: FairShare, caller: bytes, amount: int = 1) -> int:
    """What a caller can get at once."""
    while share.fits(caller, amount):
        share.take(caller, amount)
    return share.held_by(caller)


@pytest.mark.parametrize("most", [2, 3, 6, 64, 1000, 1 << 32])
def test_a_caller_that_takes_all_it_can_leaves_something_for_the_next(most: int) -> None:
    share, amount = FairShare(most), max(1, most >> 10)
    flood = fill(share, b"flood", amount)
    assert flood >= most * 7 // 8 - 1
    assert fill(share, b"next", amount) >= 1 and share.total <= most
    for caller in (b"flood", b"next"):
        share.give_back(caller, share.held_by(caller))
    assert share.total == 0


def test_without_keys_all_is_for_everybody() -> None:
    assert fill(FairShare(10), b"") == 10


def test_the_heaviest_is_who_asks_where_both_hold_as_much() -> None:
    share = FairShare(10)
    share.take(b"one", 3)
    share.take(b"two", 2)
    assert share.heaviest() == b"one"
    assert share.heaviest(b"two", 1) == b"two" and share.heaviest(b"new", 1) == b"one"


def test_callers_take_turns_and_keep_their_own_order() -> None:
    queue: TurnQueue[str] = TurnQueue(FairShare(1, reserved=0))
    for number in range(50):
        queue.put(b"flood", f"f{number}")
    queue.put(b"next", "n0")
    order: list[str] = []
    while (found := queue.get()) is not None:
        caller, item = found
        order.append(item)
        queue.out.give_back(caller)
    assert order.index("n0") <= 1
    assert [item for item in order if item[0] == "f"] == [f"f{n}" for n in range(50)]


@pytest.mark.parametrize("number", [2, 6])
def test_a_pool_full_of_one_callers_endless_jobs_works_for_others(number: int) -> None:
    pool, gate = Pool(number), threading.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        CALLER.set(b"flood")
        flood = [loop.run_in_executor(pool, gate.wait, WAIT_S) for _ in range(10 * number)]
        CALLER.set(b"next")
        try:
            assert [await loop.run_in_executor(pool, int, "5") for _ in range(20)] == [5] * 20
        finally:
            gate.set()
        await asyncio.gather(*flood)

    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
        return
    raise AssertionError("the other caller's jobs did not run")


async def idle() -> None:
    """Let the other tasks go on until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def ordered() -> list[str]:
    """The order in which tasks of two callers get the one place, some of them cancelled."""
    turns, order = Turns(FairShare(1, reserved=0)), list[str]()
    gate = asyncio.Event()

    async def work(caller: bytes, name: str) -> None:
        await turns.enter(caller)
        try:
            order.append(name)
            assert turns.inside == 1
            await gate.wait()
        finally:
            turns.leave(caller)

    tasks = [asyncio.create_task(work(b"flood", f"f{n}")) for n in range(6)]
    await idle()
    tasks.append(asyncio.create_task(work(b"next", "n0")))
    await idle()
    tasks[2].cancel()  # while it waits
    tasks[0].cancel()  # while it has the place: the next caller is let in
    tasks[5].cancel()
    await idle()
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert turns.inside == 0
    return order


def test_places_go_to_callers_in_turn_and_none_is_lost() -> None:
    assert asyncio.run(ordered()) == ["f0", "f1", "n0", "f3", "f4"]


async def cancelled_when_let_in() -> Turns:
    turns = Turns(FairShare(1, reserved=0))
    await turns.enter(b"a")
    waiting = asyncio.create_task(turns.enter(b"b"))
    await idle()
    turns.leave(b"a")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return turns


def test_a_task_that_is_let_in_and_cancelled_at_once_gives_its_place_back() -> None:
    turns = asyncio.run(cancelled_when_let_in())
    assert turns.inside == 0 and turns.is_free(b"c")
