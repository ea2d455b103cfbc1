"""Lines about the load while requests run."""

import logging

import pytest

from banyan.base.clock import VirtualClock
from banyan.engine.loop import StepLog
from banyan.messages.events import Finished, Stats
from banyan.messages.plan import SAMPLE, Row, StepPlan
from tests.engine.test_loop import generate, serving
from tests.support.flags import config_of

READS = StepPlan(step=1, rows=[Row(1, 0, 8)])
GENERATES = StepPlan(step=2, rows=[Row(1, 8, 1, want=SAMPLE)])
STATS = Stats(running=3, waiting=2, total_pages=50, held_pages=10, in_flight_pages=2)


@pytest.fixture
def lines(caplog, monkeypatch):
    told = logging.getLogger("banyan.engine.loop")
    monkeypatch.setattr(told, "handlers", [caplog.handler])
    monkeypatch.setattr(told, "propagate", False)
    caplog.set_level(logging.INFO, told.name)
    return lambda: caplog.messages


def test_so_many_steps_pass_between_two_lines(lines):
    log = StepLog(config_of("--decode-log-interval", "3").observe.step_log_interval)
    due = []
    for plan in [READS, *[GENERATES] * 6]:
        due.append(log.count(plan))
        if due[-1]:
            log.write(STATS, 1.0)
    assert due == [False, False, False, True, False, False, True]
    assert len(lines()) == 2


def test_no_interval_means_no_lines():
    log = StepLog(config_of("--decode-log-interval", "0").observe.step_log_interval)
    assert not any(log.count(GENERATES) for _ in range(100))


def test_a_line_tells_the_load_and_the_speed_of_the_time_with_work(lines):
    log, clock = StepLog(2), VirtualClock()
    log.begin_work(clock.now())
    log.count(GENERATES)
    clock.advance_to(1.0)
    log.end_work(clock.now())
    clock.advance_to(100.0)
    log.begin_work(clock.now())
    clock.advance_to(103.0)
    assert log.count(GENERATES)
    log.write(
        Stats(running=3, waiting=2, output_tokens=40, prompt_tokens=200, cached_tokens=50),
        clock.now(),
    )
    assert lines() == [
        "decode steps=2 running=3 waiting=2 tokens_per_s=10.0 pages=0/0 hit_rate=0.25"
    ]


def test_the_engine_writes_lines_while_a_request_runs(lines):
    with serving(check_ledger=False, step_log_interval=5) as (link, _, _):
        link.tell(generate("a", new=21))
        link.hear(Finished)
    assert len(lines()) == 4
    assert all(" running=1 waiting=0 " in line for line in lines())
    assert "pages=0/" not in lines()[0]
