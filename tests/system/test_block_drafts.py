"""A model that drafts blocks changes how many steps an answer takes, and no answer."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.llm import Engine
from tests.models.drafting import tiny_blocks
from tests.support.drafts import LONG, REPEATS, REQUESTS, answers, output_of, start
from tests.support.hidden_drafts import given_up

WHOLE = pytest.mark.skipif(os.environ.get("DRAFTS") != "all", reason="make test-drafts runs it")
BLOCKS = "blocks"


def with_words(variant: str, folder: Path, words: Path) -> Path:
    """A model, one beside it that drafts for it, and the tokenizer of another one."""
    sizes: dict[str, object] = {"vocab_size": 512, "max_position_embeddings": 2048}
    if variant.startswith("qwen3"):
        sizes["head_dim"] = 16
    tiny_blocks(variant, folder, folder / BLOCKS, **sizes)
    for file in words.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def drafting(model: Path, **flags: object) -> Engine:
    named: dict[str, object] = {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(model / BLOCKS),
        "disable_adaptive_drafts": True,
    }
    return start(model, is_drafting=False, **(named | flags))


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory) -> Path:
    return with_words("qwen3", tmp_path_factory.mktemp("model"), tiny_model)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Engine]:
    with start(model, is_drafting=False) as engine:
        yield engine


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"chunked_prefill_size": 16}, ("greedy", "drawn", "schema")),
        pytest.param({"disable_cuda_graph": True}, ("greedy", "drawn", "schema"), marks=WHOLE),
        pytest.param(
            {"tp_size": 2, "chunked_prefill_size": 16}, ("greedy", "drawn", "schema"), marks=WHOLE
        ),
        pytest.param({"speculative_dflash_block_size": 3}, tuple(REQUESTS), marks=WHOLE),
        pytest.param({"disable_adaptive_drafts": False}, tuple(REQUESTS), marks=WHOLE),
        pytest.param(
            {"page_size": 16, "max_total_tokens": 512, "max_running_requests": 6},
            tuple(REQUESTS),
            marks=WHOLE,
        ),
        pytest.param(
            {"disable_overlap_schedule": True, "disable_radix_cache": True},
            tuple(REQUESTS),
            marks=WHOLE,
        ),
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_request_is_answered_as_without_drafts(plain, model, flags, names):
    with drafting(model, **flags) as engine:
        correct = 0
        for name in names:
            right = [output_of(answer) for answer in answers(plain, **REQUESTS[name])]
            for _ in range(2):  # the second finds its prompt in the cache
                found = answers(engine, **REQUESTS[name])
                assert [output_of(answer) for answer in found] == right, name
                correct += sum(each["meta_info"]["spec_num_correct_drafts"] for each in found)
        assert correct > 10 or "disable_adaptive_drafts" in flags  # they may not pay
        given_up(engine)


@WHOLE
@pytest.mark.parametrize("variant", ["qwen3 moe", "gpt-oss", "qwen2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_several_kinds_of_models_are_drafted_for(tiny_model, tmp_path, variant, ranks):
    """Requests that are retracted among them."""
    model = with_words(variant, tmp_path, tiny_model)
    prompts = [f"{REPEATS} {i}" for i in range(8)]
    with start(model, is_drafting=False) as engine:
        right = [output_of(answers(engine, prompt=prompt)[0]) for prompt in prompts]
    flags = {"page_size": 16, "max_total_tokens": 512, "max_running_requests": 6}
    with drafting(model, tp_size=ranks, **flags) as engine:
        found = answers(engine, prompt=prompts)
        assert [output_of(answer) for answer in found] == right
        assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in found) > 0
        given_up(engine)


@WHOLE
def test_behind_a_cached_prefix_the_drafts_are_those_behind_a_new_one(model):
    body = {"input_ids": [3 + 7 * i % 400 for i in range(75)], "sampling_params": LONG}
    # One step after another: how many drafts the last row may bring is known to the planner then.
    flags = {"chunked_prefill_size": 16, "disable_overlap_schedule": True}
    with drafting(model, **flags) as engine:
        first, second = engine.generate(**body), engine.generate(**body)
        assert second["meta_info"]["cached_tokens"] >= 64
        assert second["output_ids"] == first["output_ids"]
        counts = [
            {key: value for key, value in each["meta_info"].items() if key.startswith("spec_")}
            for each in (first, second)
        ]
        assert counts[0] == counts[1] and counts[0]["spec_num_correct_drafts"] > 0
