"""A token's value depends on its own sequence only: alone, in a batch, after a cache hit, after
retraction, in any chunk size and at any depth the answer is the same, to the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from banyan.llm import Engine
from banyan.ops.cpu.build import compilers
from tests.system.serving import settled

NEW_TOKENS = 24
LONG = 64
"""New tokens where a small cache shall run out of pages."""
GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "sampling_seed": 1234}
PROBE_LENGTHS = (1, 17, 100, 300)
CROWD = 32
ROOM = {"max_total_tokens": 16384}
VARIANTS = {
    "depth 2": ROOM,
    "depth 1": ROOM | {"disable_overlap_schedule": True},
    "chunks of 16": ROOM | {"chunked_prefill_size": 16},
    "chunks of 64 at depth 1": ROOM
    | {"chunked_prefill_size": 64, "disable_overlap_schedule": True},
    "whole prompts": ROOM | {"chunked_prefill_size": -1},
}

PATHS: dict[str, dict[str, str]] = {
    "float weights": {},
    "rounded weights and activations": {"quantization": "q4_0"},
    "keys and values in bytes": {"kv_cache_dtype": "int8"},
}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]


def prompt(length: int, first: int = 2, vocabulary: int = 400) -> list[int]:
    """Token ids of a prompt; prompts with different `first` share nothing."""
    return [2 + (first * 31 + i * i * 7 + i * 13) % (vocabulary - 2) for i in range(length)]


PROBES = [prompt(n, first=n) for n in PROBE_LENGTHS]


def ask(engine: Engine, prompts: list[list[int]], sampling: dict, new_tokens: int) -> list[dict]:
    params = sampling | {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    return engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)


def answer_of(raw: dict) -> Answer:
    logprobs = [logprob for logprob, _, _ in raw["meta_info"]["output_token_logprobs"]]
    return Answer(raw["output_ids"], logprobs)


def alone(engine: Engine, sampling: dict, new_tokens: int = NEW_TOKENS) -> list[Answer]:
    return [answer_of(ask(engine, [probe], sampling, new_tokens)[0]) for probe in PROBES]


def crowded(
    engine: Engine, sampling: dict, new_tokens: int = NEW_TOKENS, spread: int = 7
) -> list[Answer]:
    """The probes among many others, which are 3, 3 + spread, 3 + 2 · spread … tokens long."""
    others = [prompt(3 + spread * i, first=1000 + i) for i in range(CROWD)]
    step = CROWD // len(PROBES)
    batch: list[list[int]] = []
    for i, probe in enumerate(PROBES):
        batch += [*others[i * step : (i + 1) * step], probe]
    raw = ask(engine, batch, sampling, new_tokens)
    return [answer_of(raw[i * (step + 1) + step]) for i in range(len(PROBES))]


@pytest.fixture(scope="module", params=PATHS)
def start(tiny_model: Path, request: pytest.FixtureRequest) -> Callable[..., Engine]:
    path = PATHS[request.param]
    if path and not any(compilers()):
        pytest.skip("numbers are rounded by the compiled kernels; no C++ compiler is here")

    here = {"threads": 1, "engine_mode": "inprocess", "log_level": "error"}

    def start(**flags: object) -> Engine:
        return Engine(model_path=str(tiny_model), **here, **path, **flags)

    return start


@pytest.fixture(scope="module")
def expected(start: Callable[..., Engine]) -> dict[str, list[Answer]]:
    """Answers of requests that run alone, without a cache, one step at a time."""
    flags = {"disable_overlap_schedule": True, "disable_radix_cache": True}
    with start(**ROOM, **flags) as engine:
        return {"greedy": alone(engine, GREEDY), "seeded": alone(engine, SEEDED)}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_the_answer_does_not_depend_on_company_cache_chunks_or_depth(start, expected, name):
    with start(**VARIANTS[name]) as engine:
        for kind, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
            engine.flush_cache()
            check(crowded(engine, sampling), expected[kind], f"{kind}, in a batch, cold")
            engine.flush_cache()
            check(alone(engine, sampling), expected[kind], f"{kind}, alone")
            hit = ask(engine, [PROBES[-1]], sampling, NEW_TOKENS)[0]
            assert hit["meta_info"]["cached_tokens"] >= 16 * (PROBE_LENGTHS[-1] // 16 - 1)
            check(alone(engine, sampling), expected[kind], f"{kind}, after a cache hit")
            check(crowded(engine, sampling), expected[kind], f"{kind}, in a batch, warm")


@pytest.mark.parametrize("depth_flags", [{}, {"disable_overlap_schedule": True}])
def test_forced_retraction_changes_no_answer(start, depth_flags):
    with start(
        max_total_tokens=640, schedule_conservativeness=0.0, chunked_prefill_size=64, **depth_flags
    ) as engine:
        for kind, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
            engine.flush_cache()
            expected = alone(engine, sampling, LONG)
            before = settled(lambda: stats(engine), len(PROBES))
            got = crowded(engine, sampling, LONG, spread=1)
            after = settled(lambda: stats(engine), before["finished"] + CROWD + len(PROBES))
            assert after["retractions"] > before["retractions"], "the cache was large enough"
            check(got, expected, f"{kind}, with retraction")


def test_prompt_scores_are_the_same_in_every_chunk_size(start):
    scores = []
    for chunk in (16, -1):
        with start(chunked_prefill_size=chunk, **ROOM) as engine:
            raw = engine.generate(
                input_ids=PROBES,
                sampling_params={"temperature": 0, "max_new_tokens": 1},
                return_logprob=True,
                logprob_start_len=0,
            )
            scores.append([r["meta_info"]["input_token_logprobs"] for r in raw])
    assert scores[0] == scores[1]


@pytest.mark.slow
def test_the_demo_model_answers_the_same_alone_in_a_batch_and_from_the_cache(demo_model):
    questions = [f"<|im_start|>user\nWhat is {i} plus {i}?<|im_end|>\n" for i in range(8)]
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    with Engine(model_path="demo", max_total_tokens=4096, log_level="error") as engine:

        def ask(prompts: list[str]) -> list[Answer]:
            raw = engine.generate(prompt=prompts, sampling_params=params, return_logprob=True)
            return [answer_of(r) for r in raw]

        batch = ask(questions)
        engine.flush_cache()
        check([ask([q])[0] for q in questions[:3]], batch[:3], "alone")
        check(ask(questions[:3]), batch[:3], "from the cache")


def check(got: list[Answer], expected: list[Answer], where: str) -> None:
    for length, ours, theirs in zip(PROBE_LENGTHS, got, expected, strict=False):
        assert ours.tokens == theirs.tokens, f"{where}, prompt of {length}"
        assert ours.logprobs == theirs.logprobs, f"{where}, prompt of {length}"


def stats(engine: Engine) -> dict:
    return engine.get_server_info()["internal_states"][0]["stats"]
