"""Priorities: who goes first, who makes room, and what happens where they are switched off."""

import pytest

from banyan.messages.events import Failed, Finished
from banyan.scheduler.budget import Priorities
from tests.scheduler.driver import Driver, asked, continuation

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
HONOURED = "--enable-priority-scheduling"


def driver(gap=10, **more) -> Driver:
    priorities = Priorities(are_honoured=True, preemption_gap=gap)
    return Driver(**{"max_running": 1, "priorities": priorities, **more})


def started(*flags) -> Driver:
    """One that runs one request at a time, with these flags."""
    return Driver(spec=asked("--max-running-requests", "1", *flags))


def order_of_ends(running: Driver) -> list[str]:
    running.run()
    return list(running.ends)


def test_a_request_far_above_takes_the_place_of_the_lowest_that_runs():
    running = started(HONOURED, "--priority-scheduling-preemption-threshold", "4")
    running.submit("low", PROMPT, new=20, priority=0)
    running.step()
    running.submit("near", PROMPT, priority=3)
    running.submit("far", PROMPT, priority=4)
    assert order_of_ends(running) == ["far", "near", "low"]
    assert running.ends["low"].retractions == 1
    assert running.outputs["low"] == continuation(PROMPT, 20)


def test_a_gap_of_zero_never_preempts():
    running = started(HONOURED, "--disable-priority-preemption")
    running.submit("low", PROMPT, new=20, priority=0)
    running.step()
    running.submit("high", PROMPT, priority=1000)
    assert order_of_ends(running) == ["low", "high"]
    assert running.ends["low"].retractions == 0


def test_nobody_is_retracted_while_there_is_room():
    running = driver(max_running=2)
    running.submit("low", PROMPT, new=20, priority=0)
    running.step()
    running.submit("high", PROMPT, priority=1000)
    assert order_of_ends(running) == ["high", "low"]
    assert running.ends["low"].retractions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_only_as_many_are_retracted_as_the_newcomer_needs(depth):
    running = driver(max_running=4, pages=17, depth=depth)
    for i in range(4):
        running.submit(f"low{i}", [i, *PROMPT], new=8, priority=0)
    running.step()
    running.submit("high", PROMPT * 2, new=4, priority=50)
    assert order_of_ends(running)[0] == "high"
    assert 1 <= sum(running.ends[f"low{i}"].retractions for i in range(4)) <= 3
    assert all(running.outputs[f"low{i}"] == continuation([i, *PROMPT], 8) for i in range(4))


def test_lower_numbers_go_first_when_configured():
    running = started(HONOURED, "--schedule-low-priority-values-first")
    running.submit("busy", PROMPT, priority=5)
    running.step()
    for name, priority in (("five", 5), ("one", 1), ("minus", -2)):
        running.submit(name, PROMPT, priority=priority)
    assert order_of_ends(running) == ["busy", "minus", "one", "five"]


@pytest.mark.parametrize(("flags", "order"), [((), "0123"), ((HONOURED,), "3210")])
def test_requests_are_equal_unless_priorities_are_honoured(flags, order):
    running = started(*flags)
    for number in range(4):
        running.submit(str(number), PROMPT, priority=number)
    assert order_of_ends(running) == list(order)


def test_a_priority_is_refused_where_it_would_be_ignored():
    running = started("--abort-on-priority-when-disabled")
    running.submit("plain", PROMPT)
    running.submit("proud", PROMPT, priority=3)
    running.run()
    assert isinstance(running.ends["plain"], Finished)
    refused = running.ends["proud"]
    assert isinstance(refused, Failed) and refused.status == 400
    assert "priority 3" in refused.text


def test_a_full_queue_makes_room_for_a_higher_request():
    running = driver(max_queued=2)
    running.submit("busy", PROMPT, new=20, priority=20)
    running.step()
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 1)):
        running.submit(name, PROMPT, priority=priority)
    running.run()
    assert isinstance(running.ends["a"], Finished) and isinstance(running.ends["c"], Finished)
    evicted, refused = running.ends["b"], running.ends["d"]
    assert (evicted.status, refused.status) == (503, 503)
    assert "higher priority" in evicted.text and "queue is full" in refused.text


def test_as_many_lower_requests_go_as_a_higher_one_has_tokens():
    running = driver(max_queued_tokens=20)
    running.submit("busy", PROMPT, new=20, priority=20)
    running.step()
    for name, priority, length in (("a", 2, 10), ("b", 0, 5), ("c", 0, 5)):
        running.submit(name, [7] * length, priority=priority)
    running.submit("wide", [8] * 11, priority=1)  # more than the two beneath it have
    running.submit("high", [8] * 10, priority=1)
    running.run()
    assert running.ends["wide"].status == 503
    assert {running.ends[name].status for name in "bc"} == {503}
    assert isinstance(running.ends["a"], Finished) and isinstance(running.ends["high"], Finished)
