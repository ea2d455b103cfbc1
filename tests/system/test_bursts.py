"""Several decode steps in one plan change how often is planned, and nothing of any answer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.support.drafts import LONG, REPEATS, REQUESTS, answers, output_of, start

STEPS = 8


def bursting_engine(model: Path, **flags: object) -> Engine:
    return start(model, is_drafting=False, num_continuous_decode_steps=STEPS, **flags)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Engine]:
    with start(tiny_model, is_drafting=False, num_continuous_decode_steps=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def bursting(tiny_model: Path) -> Iterator[Engine]:
    with bursting_engine(tiny_model) as engine:
        yield engine


def test_they_are_what_a_cpu_does_where_nothing_is_said(tiny_model, plain):
    right = [output_of(answer) for answer in answers(plain)]
    with start(tiny_model, is_drafting=False) as engine:
        found, plans = plans_of(engine)
    assert found == right
    assert plans < LONG["max_new_tokens"] / 2


def plans_of(engine: Engine, **body: object) -> tuple[list[object], int]:
    """Answers, and the plans that they took; of a request that ends by length, whose last plan is
    complete when that is reported."""
    before = engine.stats().steps
    found = [output_of(answer) for answer in answers(engine, **body)]
    return found, engine.stats().steps - before


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_answered_as_step_by_step(plain, bursting, name: str):
    right = [output_of(answer) for answer in answers(plain, **REQUESTS[name])]
    assert [output_of(answer) for answer in answers(bursting, **REQUESTS[name])] == right


def test_answers_with_and_without_bursts_are_the_same_and_take_fewer_plans(plain, bursting):
    prompts = [f"{REPEATS} {i}" for i in range(12)]
    right = [output_of(answers(plain, prompt=prompt)[0]) for prompt in prompts]
    found, plans = plans_of(bursting, prompt=prompts)
    assert found == right
    assert plans < LONG["max_new_tokens"] / 2
    assert plans_of(plain, prompt=prompts[0])[1] > LONG["max_new_tokens"] / 2


@pytest.mark.parametrize(
    "flags",
    [
        {"disable_overlap_schedule": True},
        {"disable_radix_cache": True},
        {"page_size": 16, "max_total_tokens": 512, "max_running_requests": 6},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_however_the_engine_runs_the_answers_are_the_same(tiny_model, plain, flags):
    prompts = [f"{REPEATS} {i}" for i in range(8)]
    right = [output_of(answers(plain, prompt=prompt)[0]) for prompt in prompts]
    with bursting_engine(tiny_model, **flags) as engine:
        assert [output_of(answer) for answer in answers(engine, prompt=prompts)] == right


@pytest.mark.parametrize("interval", [1, 3])
def test_a_stream_gets_the_tokens_of_bursts_piece_by_piece(plain, bursting, interval: int):
    sampling = LONG | {"stream_interval": interval}
    before = bursting.stats().steps
    pieces = list(bursting.generate(prompt=REPEATS, sampling_params=sampling, stream=True))
    plans = bursting.stats().steps - before
    assert plans < LONG["max_new_tokens"] / 2
    lengths = [len(piece["output_ids"]) for piece in pieces]
    assert lengths == sorted(set(lengths))
    right = list(plain.generate(prompt=REPEATS, sampling_params=sampling, stream=True))
    assert pieces[-1]["output_ids"] == right[-1]["output_ids"]


@pytest.mark.parametrize("interval", [0, 1])
def test_a_stop_text_ends_a_burst_where_it_does_step_by_step(plain, bursting, interval: int):
    text = answers(plain, prompt=REPEATS, sampling_params=LONG)[0]["text"]
    sampling = LONG | {"stop": [text[9:14]]} | ({"stream_interval": 1} if interval else {})
    ask = {"prompt": REPEATS, "sampling_params": sampling, "stream": bool(interval)}
    right, found = (engine.generate(**ask) for engine in (plain, bursting))
    if interval:
        right, found = list(right)[-1], list(found)[-1]
    assert output_of(found) == output_of(right)


def test_steps_that_are_not_recorded_refuse_bursts(tiny_model):
    with pytest.raises(BanyanError, match="steps are eager here"):
        bursting_engine(tiny_model, disable_cuda_graph=True).shutdown()


def test_where_steps_are_not_recorded_and_nothing_is_said_there_are_none(tiny_model, plain):
    right = [output_of(answer) for answer in answers(plain, prompt=REPEATS)]
    with start(tiny_model, is_drafting=False, disable_cuda_graph=True) as engine:
        assert [output_of(answer) for answer in answers(engine, prompt=REPEATS)] == right
