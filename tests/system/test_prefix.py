"""The prefix cache computes what requests have in common once, and says what it saved."""

from pathlib import Path

import pytest

from banyan.llm import Engine
from tests.models.families import tiny
from tests.system.serving import settled

PREFIX, SUFFIX, NEW, PAGE = 1000, 8, 4, 16
CROWD = 32


@pytest.fixture(scope="module")
def engine(tiny_model: Path):
    flags = {"max_total_tokens": 16384, "page_size": PAGE, "log_level": "error", "threads": 1}
    flags |= {"engine_mode": "inprocess"}
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
    first, *others = sorted(a["meta_info"]["cached_tokens"] for a in answers)
    assert first == 0 and all(count in (shared, PREFIX) for count in others)

    later = ask(engine, [prefix + [9] * SUFFIX])[0]
    assert later["meta_info"]["cached_tokens"] == PREFIX


@pytest.mark.parametrize("length", [2, 17, 31, 32, 33, 100])
def test_of_a_repeated_prompt_the_last_token_alone_is_computed(engine, length):
    """And the answer has the same bits as one that is computed from nothing."""
    engine.flush_cache()
    prompt = [4 + (7 * i + length) % 380 for i in range(length)]
    answers = [scored(engine, prompt) for _ in range(3)]
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert cached == [0, length - 1, length - 1]
    assert output_of(answers[0]) == output_of(answers[1]) == output_of(answers[2])


def test_scores_of_a_prompt_are_reported_from_the_first_that_is_wanted(engine):
    engine.flush_cache()
    prompt = [4 + 11 * i % 370 for i in range(60)]
    found = [
        engine.generate(
            input_ids=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=42,
        )["meta_info"]
        for _ in range(2)
    ]
    assert found[0]["input_token_logprobs"] == found[1]["input_token_logprobs"]
    assert 37 <= found[1]["cached_tokens"] <= 42


@pytest.mark.parametrize("variant", ["qwen2, tied, some windows", "phi3, window", "deepseek v3.2"])
def test_windows_latents_and_index_keys_are_reused_to_the_token(variant, tmp_path):
    tiny(variant, tmp_path)
    flags = {"threads": 1, "max_total_tokens": 2048, "skip_tokenizer_init": True}
    first = [2 + 7 * i % 60 for i in range(61)]
    other = first[:53] + [2 + 3 * i % 50 for i in range(20)]
    with Engine(str(tmp_path), engine_mode="inprocess", **flags) as engine:
        right = [scored(engine, prompt) for prompt in (first, other)]
        hits = [scored(engine, prompt) for prompt in (first, other)]
        engine.flush_cache()
        cold = scored(engine, other)
    assert [a["meta_info"]["cached_tokens"] for a in (*right, *hits)] == [0, 53, 60, 72]
    assert [output_of(a) for a in hits] == [output_of(a) for a in right] and output_of(
        cold
    ) == output_of(right[1])


def test_an_answer_is_a_prefix_for_the_next_turn(engine):
    first = [3 + i % 380 for i in range(100)]
    answer = engine.generate(
        input_ids=first,
        sampling_params={"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
    )
    turn = first + answer["output_ids"] + [7, 8, 9]
    (second,) = ask(engine, [turn])
    # The last answer token was never fed to the model.
    assert second["meta_info"]["cached_tokens"] == len(first) + 59


def test_different_salts_share_nothing(shared_server):
    prompt = [5 + i % 300 for i in range(200)]

    def cached(salt: str) -> int:
        sampling = {"temperature": 0, "max_new_tokens": 1}
        body = {"input_ids": prompt, "sampling_params": sampling, "cache_salt": salt}
        return shared_server.generate(**body)["meta_info"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("one") == 199


def ask(engine: Engine, prompts: list[list[int]]) -> list[dict]:
    params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    return engine.generate(input_ids=prompts, sampling_params=params)


def scored(engine: Engine, prompt: list[int]) -> dict:
    params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    return engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)


def output_of(answer: dict) -> tuple:
    return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]


def stats(engine: Engine) -> dict:
    return engine.get_server_info()["internal_states"][0]["stats"]
