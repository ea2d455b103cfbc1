"""Whose turn it is: equal shares for callers, an end to waiting, and an end to requests that take
too long."""

from array import array
from collections import Counter

import pytest

from banyan.messages.events import Failed, Finished
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams
from tests.scheduler.driver import Driver, asked, continuation
from tests.scheduler.test_growth import spec_under

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ONE = ("--max-running-requests", "1")


def submit(running: Driver, name: str, caller: bytes = b"", new: int = 4, **fields) -> None:
    tokens = array("i", [*PROMPT, len(running.outputs), *name.encode()]).tobytes()
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    running.receive(Generate(request=name, tokens=tokens, sampling=params, caller=caller, **fields))


def first_ends(running: Driver, number: int) -> list[str]:
    """The requests that end first."""
    while len(running.ends) < number:
        running.step()
    return list(running.ends)[:number]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_two_callers_get_equal_shares_however_many_requests_they_bring(policy):
    running = Driver(policy=policy, max_running=2)
    for i in range(40):
        submit(running, f"busy-{i}", b"busy")
    for i in range(4):
        submit(running, f"calm-{i}", b"calm")
    served = Counter(name.partition("-")[0] for name in first_ends(running, 8))
    assert served == {"busy": 4, "calm": 4}
    running.run()
    assert all(isinstance(end, Finished) for end in running.ends.values())


def test_a_caller_of_twice_the_weight_gets_twice_the_share():
    running = Driver(spec=asked(*ONE))
    for i in range(40):
        submit(running, f"heavy-{i}", b"heavy", weight=2.0)
        submit(running, f"light-{i}", b"light")
    served = Counter(name.partition("-")[0] for name in first_ends(running, 30))
    assert served["heavy"] == pytest.approx(20, abs=2)


def test_shares_are_of_tokens_and_not_of_requests():
    running = Driver(spec=asked(*ONE))
    for i in range(40):
        submit(running, f"long-{i}", b"long", new=60)
        submit(running, f"short-{i}", b"short", new=4)
    served = Counter(name.partition("-")[0] for name in first_ends(running, 24))
    assert served["short"] > 3 * served["long"]


def test_nothing_is_saved_up_while_a_caller_is_away():
    running = Driver(spec=asked(*ONE))
    submit(running, "returns-first", b"returns")
    for i in range(30):
        submit(running, f"stays-{i}", b"stays")
    first_ends(running, 20)
    for i in range(10):
        submit(running, f"returns-{i}", b"returns")
    served = Counter(name.partition("-")[0] for name in first_ends(running, 30)[20:])
    assert served["returns"] == pytest.approx(5, abs=1)


def test_priorities_decide_before_shares():
    running = Driver(max_running=1)
    submit(running, "now", b"a", new=30)
    running.step()
    for i in range(3):
        submit(running, f"low-{i}", b"b")
        submit(running, f"high-{i}", b"a", priority=1)
    names = first_ends(running, 4)
    assert names == ["now", "high-0", "high-1", "high-2"]


def test_callers_change_no_answer():
    running = Driver(max_running=3, pages=30)
    for i in range(12):
        submit(running, f"r-{i}", b"ab"[i % 2 : i % 2 + 1], new=12)
    prompts = {
        r.id: list(array("i", r.generate.tokens))
        for r in running.core.scheduler.request_table.alive
    }
    running.run()
    for name, prompt in prompts.items():
        assert running.outputs[name] == continuation(prompt, 12)


@pytest.mark.parametrize("wait_s", ["0", "10"])
def test_who_has_waited_longest_goes_before_those_of_higher_priority(wait_s):
    running = Driver(
        spec=asked(
            *(*ONE, "--enable-priority-scheduling", "--disable-priority-preemption"),
            *("--priority-scheduling-max-wait", wait_s),
        )
    )
    submit(running, "now", new=30)
    running.step()
    submit(running, "low")
    running.now = 11.0
    for i in range(3):
        submit(running, f"high-{i}", priority=5)
    names = first_ends(running, 5)
    assert names.index("low") == (1 if wait_s == "10" else 4)


def test_who_waits_too_long_for_a_place_ends_alone():
    running = Driver(spec=spec_under(*ONE, REQ_WAITING_TIMEOUT="3"))
    submit(running, "runs", new=20)
    running.step()
    submit(running, "waits")
    running.now = 3.5
    submit(running, "fresh")
    running.run()
    end = running.ends["waits"]
    assert isinstance(end, Failed) and (end.status, end.code) == (503, "timed_out")
    assert "has waited for 3.5 s; 3 s are allowed" in end.text
    assert isinstance(running.ends["runs"], Finished)
    assert isinstance(running.ends["fresh"], Finished)


def test_who_runs_too_long_ends_alone():
    running = Driver(spec=spec_under(REQ_RUNNING_TIMEOUT="3", REQ_WAITING_TIMEOUT="-1"))
    submit(running, "long", new=50)
    running.step()
    running.now = 2.0
    submit(running, "later", new=50)
    running.step()
    running.now = 4.0
    running.run()
    end = running.ends["long"]
    assert isinstance(end, Failed) and end.status == 503
    assert "has run for 4.0 s; 3 s are allowed" in end.text
    assert isinstance(running.ends["later"], Finished)


def test_a_queue_is_put_in_order_only_where_somebody_may_enter(monkeypatch):
    asked_for = Counter[str]()

    def order(waiting, probe):
        asked_for["order"] += 1
        return waiting

    running = Driver(max_running=1)
    monkeypatch.setattr(running.core.scheduler, "_policy", order)
    submit(running, "first", new=20)
    submit(running, "second", new=1)
    running.run()
    assert list(running.ends) == ["first", "second"]
    assert asked_for["order"] <= 4
