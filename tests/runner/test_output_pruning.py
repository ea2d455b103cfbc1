"""Behind the last attention a step goes on with the tokens of its outputs alone, and who wants more
of it gets it all the same."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from banyan.messages.plan import HIDDEN, SAMPLE, SCORE, Row
from banyan.ops.api import OpTime
from banyan.runner.runner import ModelRunner
from tests.runner.conftest import VOCAB, Elsewhere, build_runner
from tests.support.runner_driver import Driver, Request, greedy

DIM, INNER, HEADS_OF_QKV, LAYERS = 32, 64, 64, 2
BEFORE = 2 * DIM * (HEADS_OF_QKV + DIM)
"""Operations of a token's projections to queries, keys, values, and back."""
BEHIND = 2 * DIM * 3 * INNER
HEAD = 2 * DIM * VOCAB
PROMPT = [(7 * i) % VOCAB for i in range(40)]


def products(stages: list[OpTime]) -> float:
    return sum(stage.operations for stage in stages if stage.name.startswith("linear"))


def fed_by(runner: ModelRunner, request: Request, chunk: int) -> list[int]:
    """Rows that come to the last feed-forward block, step by step."""
    seen: list[int] = []
    block = runner.model.layers[LAYERS - 1].mlp
    block.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    Driver(runner).run([request], chunk)
    return seen


def hidden(runner: ModelRunner, wants: int, counts: list[int]) -> np.ndarray:
    """Hidden states of a request's tokens, by rows of so many, the last of which are decoded."""
    driver, request = Driver(runner), Request(PROMPT, greedy(len(counts)))
    join, grant = driver.enter(request)
    parts, found, start = {"joins": [join], "grants": [grant]}, list[bytes](), 0
    for count in counts:
        want = wants | (SAMPLE if start + count >= len(PROMPT) else 0)
        row = Row(request.slot, start, count, want=want)
        result = runner.launch(driver.plan(rows=[row], **parts)).result()
        assert not result.error and not result.failed
        found += result.hidden
        parts, start = {}, start + count
    return np.frombuffer(b"".join(found), np.float32).reshape(-1, DIM)


def test_the_last_feed_forward_block_of_a_recorded_prompt_runs_on_outputs_alone(model_config):
    runner = build_runner(model_config, is_recorded=True)
    driver, request = Driver(runner), Request(PROMPT, greedy(2))
    join, grant = driver.enter(request)
    first, rest = (driver.row(request, 30), Row(request.slot, 30, 10, want=SAMPLE))

    runner.launch(driver.plan(joins=[join], grants=[grant], rows=[first])).result()
    middle = products(runner.forward.op_times())
    runner.launch(driver.plan(rows=[rest])).result()
    last = products(runner.forward.op_times())

    assert middle == 30 * (LAYERS * BEFORE + (LAYERS - 1) * BEHIND)
    assert last == 10 * (LAYERS * BEFORE + (LAYERS - 1) * BEHIND) + BEHIND + HEAD


@pytest.mark.parametrize("platform", [None, Elsewhere()])
def test_and_so_does_that_of_a_step_that_calls_the_model(model_config, platform):
    runner = build_runner(model_config, platform=platform)

    assert fed_by(runner, Request(PROMPT, greedy(1)), chunk=16)[-3:] == [1, 1, 1]


def test_whose_prompt_is_scored_runs_on_all(model_config):
    runner = build_runner(model_config)

    assert fed_by(runner, Request(PROMPT, greedy(1), score_from=0), chunk=16) == [16, 16, 8]


@pytest.mark.parametrize("wants", [HIDDEN, HIDDEN | SCORE])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_hidden_states_are_those_of_every_token(model_config, llama: nn.Module, is_recorded, wants):
    runner = build_runner(model_config, is_recorded=is_recorded)

    found = hidden(runner, wants, [25, 15, 1, 1])

    tokens = [*PROMPT, *runner._table.tokens[1, 40:42].tolist()]
    with torch.inference_mode():
        expected = llama.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_what_reads_the_hidden_states_of_all_tokens_has_them(model_config):
    """Such as hooks between layers, and layers that draft."""
    runner = build_runner(model_config)
    reading = ModelRunner(
        runner.model, runner._build, replace(runner._config, reads_all=True), runner.platform
    )

    assert fed_by(reading, Request(PROMPT, greedy(1)), chunk=16) == [16, 16, 8]
