"""The reports of a multi-step plan while it runs."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from banyan.messages.plan import SAMPLE, Row, StepPlan
from tests.runner.conftest import build_runner
from tests.support.runner_driver import Driver, Request, greedy

STEPS = 6


@pytest.fixture
def bell() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def prompted(model_config, bell: int) -> tuple[Driver, list[Request]]:
    """Two requests that have their first token."""
    driver = Driver(build_runner(model_config, is_recorded=True, multi_step=STEPS))
    driver.runner.wake_fd = bell
    requests = [Request([3, 1, 4], greedy(20)), Request([1, 5, 9, 2, 6], greedy(20))]
    driver.run(requests, limit=1)
    return driver, requests


def multi_step(driver: Driver, requests: list[Request], tell: int) -> StepPlan:
    rows = [Row(r.slot, r.known - 1, STEPS, drafts=STEPS - 1, want=SAMPLE) for r in requests]
    return driver.plan(rows=rows, steps=STEPS, report_every=tell)


@pytest.mark.parametrize(("tell", "rings"), [(0, 0), (1, 5), (2, 2), (4, 1)])
def test_the_engine_is_rung_behind_each_so_many_steps_but_the_last(
    model_config, bell, tell, rings, monkeypatch
):
    monkeypatch.setattr("banyan.runner.multi_step._PACE_NS", 0)
    driver, requests = prompted(model_config, bell)
    result = driver.runner.launch(multi_step(driver, requests, tell)).result()
    assert [len(tokens) for tokens in result.tokens] == [4 * STEPS] * 2
    if rings:
        assert os.eventfd_read(bell) == rings
    else:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bell)


def test_steps_that_take_next_to_nothing_ring_once_for_many(model_config, bell, monkeypatch):
    monkeypatch.setattr("banyan.runner.multi_step._PACE_NS", 3600 * 10**9)
    driver, requests = prompted(model_config, bell)
    driver.runner.launch(multi_step(driver, requests, 1)).result()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(bell)


def test_what_is_reported_of_a_burst_is_the_beginning_of_its_result(
    model_config, bell, monkeypatch
):
    """Asked for in the middle of it: as soon as its last step but one has reported its progress."""
    driver, requests = prompted(model_config, bell)
    runner = driver.runner
    plan = multi_step(driver, requests, 1)
    seen = []
    multi_steps = runner.forward.multi_steps
    run = multi_steps._recording.multi_step

    def run_and_look(rows, inputs):
        ran = run(rows, inputs)
        seen.append(
            (
                int(inputs.steps_done[0]),
                runner.tokens_so_far(plan.step),
                runner.tokens_so_far(plan.step + 1),
            )
        )
        return ran

    monkeypatch.setattr(multi_steps._recording, "multi_step", run_and_look)
    result = runner.launch(plan).result()
    ((reported, tokens, others),) = seen
    assert reported == STEPS - 1, "the last step's tokens come with the result"
    assert others is None
    assert runner.tokens_so_far(plan.step) is None, "it runs no longer"
    for row, whole in enumerate(result.tokens):
        assert tokens[row] == whole[: 4 * reported]
    right = [Request(list(r.prompt), greedy(1 + STEPS)) for r in requests]
    Driver(build_runner(model_config, is_recorded=True)).run(right)
    for row, request in enumerate(right):
        assert np.frombuffer(result.tokens[row], np.int32).tolist() == request.output[1:]
