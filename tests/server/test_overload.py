"""Deadlines that clients give, and when those who are refused should come again."""

import json
from dataclasses import replace

import httpx
import pytest

from banyan.base.clock import VirtualClock
from banyan.engine_client.client import Replica, ThroughputEstimate
from banyan.engine_client.metrics_observer import RequestOutcome
from banyan.messages.events import Stats
from banyan.requests.generation import Finish
from banyan.server.errors import RETRY_AFTER_S
from banyan.server.state import MOST_WAIT_S, wait_s
from tests.server.fakes import READY, Site, steps

FULL = Finish("abort", None, 503, "The request queue is full.", "queue_full")


def ask(site: Site, seconds: str, **fields: object) -> httpx.Response:
    headers = {"x-request-timeout": seconds}
    return site.http.post("/generate", json={"text": "a", **fields}, headers=headers)


def test_a_request_ends_at_its_deadline_and_is_aborted(site: Site) -> None:
    site.generator.hold_after = 0
    answer = ask(site, "0.2")
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert site.generator.closed.acquire(timeout=60)


def test_a_stream_ends_at_its_deadline_with_an_event(site: Site) -> None:
    site.generator.hold_after = 1
    answer = ask(site, "0.3", stream=True)
    assert answer.status_code == 200
    events = [e.removeprefix("data: ") for e in answer.text.split("\n\n")]
    assert json.loads(events[0])["text"] == "Hel"
    assert json.loads(events[1])["error"]["code"] == 504
    assert events[2:] == ["[DONE]", ""]


def test_what_is_done_in_time_is_left_alone(site: Site) -> None:
    assert ask(site, "30").json()["text"] == "Hello"
    assert ask(site, "1e5").json()["text"] == "Hello"


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf", "1e9", "9" * 400, "1_0x"])
def test_what_is_no_deadline_is_refused(site: Site, given: str) -> None:
    answer = ask(site, given)
    assert answer.status_code == 400 and "x-request-timeout" in answer.text
    assert not site.generator.asked


def test_a_refusal_for_the_load_says_when_the_queue_will_have_gone(site: Site) -> None:
    site.generator.script = lambda _: steps("", finish=FULL)
    busy = Replica(0, True, READY, Stats(waiting=30), ends_per_s=2.0)
    site.client.others = [busy, replace(busy, ends_per_s=1.0), replace(busy, alive=False)]
    site.client.stats = Stats(waiting=0)
    answer = ask(site, "30")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "20"


class Ends:
    """A meter."""

    def __init__(self) -> None:
        self.courses: list[RequestOutcome] = []

    def first_tokens(self, seconds: float) -> None:
        raise AssertionError

    def next_tokens(self, seconds: float, count: int) -> None:
        raise AssertionError

    def ended(self, outcome: RequestOutcome) -> None:
        self.courses.append(outcome)


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"model": "tiny", "prompt": "a"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"model": "tiny", "input": "a"}),
        ("/v1/embeddings", {"model": "tiny", "input": "a"}),
        ("/vertex_generate", {"instances": [{"text": "a"}]}),
    ],
)
def test_a_full_queue_refuses_a_request_before_it_is_read(
    site: Site, path: str, body: dict[str, object]
) -> None:
    observer = Ends()
    assert site.state.service is not None
    site.state.service = replace(site.state.service, metrics_observers=(observer,))
    site.client.others = [Replica(0, True, READY, Stats(waiting=30), ends_per_s=2.0)]
    site.client.stats = Stats()
    site.client.is_full = True
    answer = site.http.post(path, json=body)
    unread = site.http.post(path, content=b"{")
    for each in (answer, unread):
        assert each.status_code in (503, 529) and each.headers["retry-after"] == "15"
        assert "The request queue is full." in each.text
    assert not site.generator.asked
    assert [outcome.reason for outcome in observer.courses] == ["queue_full"] * 2
    assert observer.courses[0].request.id == answer.headers["x-request-id"]
    site.client.is_full = False
    assert site.http.post(path, content=b"{").status_code == 400


def test_refusals_for_other_reasons_keep_to_what_is_usual(site: Site) -> None:
    site.client.others = [Replica(0, True, READY, Stats(waiting=30), ends_per_s=0.1)]
    site.state.draining = True
    assert ask(site, "30").headers["retry-after"] == str(RETRY_AFTER_S)


def test_the_pace_is_that_of_late() -> None:
    clock, pace = VirtualClock(), ThroughputEstimate()
    pace.add(5, 9, clock.now())
    assert pace.per_s == 0.0
    for second in range(1, 400):
        clock.advance_to(float(second))
        pace.add(5 + (second if second < 200 else 200 + 4 * (second - 200)), 9, clock.now())
    assert pace.per_s == pytest.approx(4.0)
    pace.add(3, 9, clock.now() + 1)
    assert pace.per_s == 0.0, "a new engine counts from 0"


def test_heartbeats_may_come_as_often_as_requests_end() -> None:
    pace = ThroughputEstimate()
    for ended in range(20_000):
        pace.add(ended, 9, ended / 200)
    assert pace.per_s == pytest.approx(200)


@pytest.mark.parametrize("trickle", [0, 1])
def test_the_pace_is_that_of_times_in_which_somebody_waited(trickle: int) -> None:
    clock, pace = VirtualClock(), ThroughputEstimate()
    ended = 0
    for second in range(300):
        clock.advance_to(float(second))
        ended += 5 if second > 290 else trickle
        pace.add(ended, 30 if second >= 290 else 0, clock.now())
    assert pace.per_s == pytest.approx(5.0)
    assert wait_s(30, pace.per_s) == 6


def test_a_wait_is_bounded_and_never_nothing() -> None:
    assert wait_s(0, 5.0) == 1 and wait_s(10, 0.0) == RETRY_AFTER_S
    assert wait_s(7, 2.0) == 4 and wait_s(10**9, 0.001) == MOST_WAIT_S
