"""Models whose layers keep a state, served: whatever a request meets, its tokens are those of plain
transformers."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from banyan.llm import Engine
from tests.models.families import tiny

CONTEXT = 2048
PROMPTS = [
    [2 + (7 * i * i + 3 * k * i + k) % 90 for i in range(n)] for k, n in enumerate((300, 17))
]
OUTPUT = 24
COMMON = {
    "threads": 1,
    "skip_tokenizer_init": True,
    "engine_mode": "inprocess",
    "cpu_activations": "fp32",
    "max_running_requests": 4,
}


ALL = os.environ.get("STATES") == "all"
FEW = ("lfm2", "mamba2", "minimax", "qwen3 next")
"""One of each kind of state, for what slots do whatever they hold."""


class Served:
    """A tiny model in a folder, and what transformers answers with it."""

    def __init__(self, variant: str, folder: Path) -> None:
        self.folder = str(folder)
        self.is_one_of_few = variant in FEW
        self.keeps_tokens = variant != "mamba2"
        self.has_matrices = variant != "lfm2"
        sizes = {"max_position_embeddings": CONTEXT, "eos_token_id": None}
        self._reference = tiny(variant, folder, **sizes)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: list[int], answer: list[int]) -> list[int]:
        """What transformers would say in the place of each token of an answer; all of it equals the
        answer where that is what it says when it goes on by itself."""
        whole = (*prompt, *answer)
        if whole not in self._known:
            with torch.no_grad():
                logits = self._reference(torch.tensor([whole])).logits[0]
            self._known[whole] = logits[:-1].argmax(-1).tolist()
        return self._known[whole][len(prompt) - 1 :]

    def open(self, **flags: object) -> Engine:
        return Engine(self.folder, **{"max_total_tokens": 4096, **COMMON, **flags})


def asked(count: int = OUTPUT) -> dict[str, object]:
    return {"max_new_tokens": count, "temperature": 0}


def answers(engine: Engine, prompts: list[list[int]], count: int = OUTPUT) -> list[list[int]]:
    found = engine.generate(input_ids=prompts, sampling_params=asked(count))
    return [answer["output_ids"] for answer in found]


def check(
    served: Served, prompts: list[list[int]], found: list[list[int]], count: int = OUTPUT
) -> None:
    for prompt, answer in zip(prompts, found, strict=True):
        assert len(answer) == count and answer == served.greedy(prompt, answer)


@pytest.fixture(
    scope="module",
    params=["lfm2", "mamba2", "bamba", "falcon h1", "jamba", "minimax", "nemotron h", "qwen3 next"]
    + ["zamba2"],
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp("states"))


@pytest.fixture
def one_of_few(served: Served) -> Served:
    """The model, unless the others stand for it."""
    if not (ALL or served.is_one_of_few):
        pytest.skip("make trust LINES=T10 runs it")
    return served


@pytest.fixture(scope="module")
def engine(served: Served) -> Iterator[Engine]:
    with served.open() as engine:
        yield engine


def test_tokens_are_those_of_transformers_alone_and_in_a_batch(
    served: Served, engine: Engine
) -> None:
    alone = [answers(engine, [prompt])[0] for prompt in PROMPTS]
    check(served, PROMPTS, alone)
    assert answers(engine, [PROMPTS[0][::-1], *PROMPTS])[1:] == alone
    assert engine.get_server_info()["facts"]["steps"] == "recorded"


def test_a_prefix_is_taken_up_at_a_checkpoint(served: Served, engine: Engine) -> None:
    first = [5, *PROMPTS[0]]
    for prompt, cached in ((first, 0), (first, 256), ([*first[:280], *range(3, 40)], 256)):
        answer = engine.generate(input_ids=prompt, sampling_params=asked())
        assert answer["meta_info"]["cached_tokens"] == cached
        check(served, [prompt], [answer["output_ids"]])


def test_a_prompt_in_pieces_and_steps_that_are_not_recorded_give_the_same_tokens(
    served: Served,
) -> None:
    for flags in ({"chunked_prefill_size": 48}, {"disable_cuda_graph": True}):
        with served.open(**flags) as engine:
            check(served, PROMPTS, answers(engine, PROMPTS))


def test_a_retracted_request_goes_on_as_if_nothing_had_been(served: Served) -> None:
    prompts = [[k, *PROMPTS[0][:100]] for k in (3, 4, 5)]
    flags = {"max_total_tokens": 480, "schedule_conservativeness": 0.01}
    with served.open(**flags) as engine:
        found = list(engine.generate(input_ids=prompts, sampling_params=asked(90)))
    retractions = sum(answer["meta_info"]["num_retractions"] for answer in found)
    assert bool(retractions) == served.keeps_tokens, "states alone take no more room as they go on"
    for prompt, answer in zip(prompts, found, strict=True):
        check(served, [prompt], [answer["output_ids"]], 90)


def test_a_slot_of_an_aborted_request_begins_anew(one_of_few: Served) -> None:
    with one_of_few.open(max_running_requests=1) as engine:
        stream = engine.generate(input_ids=PROMPTS[1], sampling_params=asked(1500), stream=True)
        next(stream)
        stream.close()
        check(one_of_few, PROMPTS, answers(engine, PROMPTS))


def test_a_checkpoint_every_so_many_tokens_serves_shorter_prefixes(one_of_few: Served) -> None:
    with one_of_few.open(mamba_track_interval=32) as engine:
        for cached in (0, 288):
            answer = engine.generate(input_ids=PROMPTS[0], sampling_params=asked())
            assert answer["meta_info"]["cached_tokens"] == cached
            check(one_of_few, PROMPTS[:1], [answer["output_ids"]])


def test_states_of_half_the_size_answer_nearly_alike(one_of_few: Served) -> None:
    """The memory of matrices is half as large; tokens follow the model's choices closely."""
    found, sizes = {}, {}
    for dtype in ("float32", "bfloat16"):
        with one_of_few.open(mamba_ssm_dtype=dtype, max_mamba_cache_size=8) as engine:
            params = asked() | {"ignore_eos": True}
            answer = engine.generate(
                input_ids=PROMPTS[0], sampling_params=params, return_logprob=True
            )
            found[dtype] = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
            sizes[dtype] = engine.get_server_info()["facts"]["memory"]["cache_bytes"]
    first = [found[dtype][0] for dtype in found]
    assert first[0] == pytest.approx(first[1], abs=0.05)
    is_matrix = one_of_few.has_matrices
    assert (sizes["bfloat16"] < sizes["float32"]) == is_matrix
    assert (found["bfloat16"] != found["float32"]) == is_matrix
