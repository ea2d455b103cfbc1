"""The prefix cache computes what requests have in common once, and says what it saved."""

from pathlib import Path

import pytest

from banyan.llm import Engine
from tests.system.serving import settled

PREFIX, SUFFIX, NEW, PAGE = 1000, 8, 4, 16
CROWD = 32


@pytest.fixture(scope="module")
def engine(tiny_model: Path):
    flags = {"max_total_tokens": 16384, "page_size": PAGE, "log_level": "error", "threads": 1}
    with Engine(model_path=str(tiny_model), **flags) as running:
        yield running


def test_32_simultaneous_requests_compute_their_common_prefix_once(engine):
    prefix = [2 + (i * i + 3 * i) % 390 for i in range(PREFIX)]
    prompts = [prefix + [10 + i] * SUFFIX for i in range(CROWD)]
    before = stats(engine)
    answers = ask(engine, prompts)
    after = settled(lambda: stats(engine), before["finished"] + CROWD)
    shared = PREFIX // PAGE * PAGE
    own = len(prompts[0]) - shared + NEW
    assert after["computed_tokens"] - before["computed_tokens"] <= shared + CROWD * own
    cached = sorted(a["meta_info"]["cached_tokens"] for a in answers)
    assert cached == [0] + [shared] * (CROWD - 1)

    later = ask(engine, [prefix + [9] * SUFFIX])[0]
    assert later["meta_info"]["cached_tokens"] == shared


def test_an_answer_is_a_prefix_for_the_next_turn(engine):
    first = [3 + i % 380 for i in range(100)]
    answer = engine.generate(
        input_ids=first,
        sampling_params={"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
    )
    turn = first + answer["output_ids"] + [7, 8, 9]
    (second,) = ask(engine, [turn])
    # The last answer token was never fed to the model.
    assert second["meta_info"]["cached_tokens"] == (len(first) + 59) // PAGE * PAGE


def test_different_salts_share_nothing(shared_server):
    prompt = [5 + i % 300 for i in range(200)]

    def cached(salt: str) -> int:
        sampling = {"temperature": 0, "max_new_tokens": 1}
        body = {"input_ids": prompt, "sampling_params": sampling, "cache_salt": salt}
        return shared_server.generate(**body)["meta_info"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("one") == 192


def ask(engine: Engine, prompts: list[list[int]]) -> list[dict]:
    params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    return engine.generate(input_ids=prompts, sampling_params=params)


def stats(engine: Engine) -> dict:
    return engine.get_server_info()["internal_states"][0]["stats"]
