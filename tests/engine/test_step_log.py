"""Lines about the load while requests run."""

import logging

import pytest

from banyan.base.clock import VirtualClock
from banyan.base.trace import Marks
from banyan.engine.step_log import StepLog
from banyan.messages.events import Finished, Stats
from banyan.messages.plan import SAMPLE, Join, Row, StepPlan
from banyan.messages.sampling_params import SamplingParams
from tests.engine.test_loop import generate, serving
from tests.support.flags import config_of

READS = StepPlan(step=1, rows=[Row(1, 0, 8)])
GENERATES = StepPlan(step=2, rows=[Row(1, 8, 1, want=SAMPLE)])
STATS = Stats(running=3, waiting=2, total_pages=50, held_pages=10, in_flight_pages=2)


@pytest.fixture
def lines(caplog, monkeypatch):
    log = logging.getLogger("banyan.engine.step_log")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    caplog.set_level(logging.INFO, log.name)
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
    clock = VirtualClock()
    logs = [StepLog(2), StepLog(2, is_plain=True)]
    for log in logs:
        log.capacity = 1000
        log.begin_work(clock.now())
        log.count(GENERATES)
    clock.advance_to(1.0)
    for log in logs:
        log.end_work(clock.now())
    clock.advance_to(100.0)
    for log in logs:
        log.begin_work(clock.now())
    clock.advance_to(103.0)
    counts = {"output_tokens": 40, "prompt_tokens": 200, "cached_tokens": 50}
    pages = {"total_pages": 50, "held_pages": 10, "in_flight_pages": 2}
    for log in logs:
        assert log.count(GENERATES)
        log.write(Stats(running=3, waiting=2, **counts, **pages), clock.now())
    assert lines() == [
        "Decode batch. #running-req: 3, #token: 240, token usage: 0.24, "
        "gen throughput (token/s): 10.00, #queue-req: 2",
        "decode steps=2 running=3 waiting=2 tokens_per_s=10.0 pages=12/50 hit_rate=0.25",
    ]


def test_drafts_are_shown_by_the_tokens_that_a_step_accepts(lines):
    log = StepLog(1)
    log.count(GENERATES)
    log.write(Stats(verify_rows=4, correct_drafts=6), 0.0)
    assert "accept len: 2.50, gen throughput" in lines()[0]


def test_a_step_that_computes_prompts_has_a_line(lines):
    log = StepLog(40)
    joins = [Join(slot, b"", 64, SamplingParams(max_new_tokens=8)) for slot in (1, 2)]
    chunk, rest = Row(2, 16, 24), Row(2, 40, 24, want=SAMPLE)
    plans = [
        StepPlan(step=1, joins=joins, rows=[Row(1, 0, 8, want=SAMPLE), chunk]),
        StepPlan(step=2, rows=[Row(1, 8, 1, want=SAMPLE), rest]),
        StepPlan(step=3, rows=[Row(1, 9, 1, want=SAMPLE), Row(2, 64, 1, want=SAMPLE)]),
    ]
    for plan in plans:
        if (prompts := log.prompts_of(plan))[0]:
            log.write_prompts(prompts, STATS)
    assert lines() == [
        "Prefill batch. #new-seq: 2, #new-token: 32, #cached-token: 16, token usage: 0.24, "
        "#running-req: 1, #queue-req: 2",
        "Prefill batch. #new-seq: 1, #new-token: 24, #cached-token: 0, token usage: 0.24, "
        "#running-req: 2, #queue-req: 2",
    ]


def test_a_slot_that_is_left_before_its_prompt_is_computed_is_forgotten():
    log = StepLog(40)
    join = Join(1, b"", 64, SamplingParams(max_new_tokens=8))
    assert log.prompts_of(StepPlan(step=1, joins=[join], rows=[Row(1, 0, 8)])) == (1, 8, 0)
    assert log.prompts_of(StepPlan(step=2, leaves=[1], rows=[])) == (0, 0, 0)
    assert log.prompts_of(StepPlan(step=3, rows=[Row(1, 8, 8)])) == (0, 0, 0)


def test_the_parts_of_a_step_are_shown_with_their_times(lines):
    marks = Marks("engine")
    log = StepLog(2, costs=[marks])
    for _ in range(2):
        marks.begin()
        marks.end("plan")
        marks.end("send")
        log.count(GENERATES)
    log.write(STATS, 1.0)
    assert "time cost of the engine for each decode step: plan: " in lines()[1]
    assert lines()[1].endswith(" ms") and ", send: " in lines()[1]
    assert marks.totals == {}


def test_the_engine_writes_lines_while_a_request_runs(lines):
    with serving(check_ledger=False, step_log=StepLog(5)) as (link, _, _):
        link.tell(generate("a", new=21))
        link.hear(Finished)
    (first, *others) = lines()
    assert first.startswith("Prefill batch. #new-seq: 1, #new-token: 3, #cached-token: 0, ")
    assert len(others) == 4
    assert all(line.startswith("Decode batch. #running-req: 1, ") for line in others)
