"""Answers with drafts are the answers without, token by token, whatever else a request asks for."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError
from banyan.config.schema import SpeculativeConfig
from banyan.engine.model_loader import check_drafts
from banyan.llm import Engine
from banyan.platform.cpu import CpuPlatform
from tests.models.families import tiny
from tests.support.drafts import LONG, REPEATS, REQUESTS, answers, output_of, start
from tests.support.hidden_drafts import given_up


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Engine]:
    with start(tiny_model, is_drafting=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting(tiny_model: Path) -> Iterator[Engine]:
    with start(tiny_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def branching(tiny_model: Path) -> Iterator[Engine]:
    with start(tiny_model, speculative_ngram_min_bfs_breadth=3) as engine:
        yield engine


def test_drafts_that_branch_change_no_answer(plain, branching):
    """Together and one after another, so that one beginning has gone on in several ways."""
    correct = 0
    for name in (*REQUESTS, "drawn", "scored", "schema"):
        right = [output_of(answer) for answer in answers(plain, **REQUESTS[name])]
        found = answers(branching, **REQUESTS[name])
        assert [output_of(answer) for answer in found] == right, name
        correct += sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in found)
    assert correct > 0
    assert branching.stats().leaked == 0


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_answered_as_without_drafts(plain, drafting, name: str):
    right = [output_of(answer) for answer in answers(plain, **REQUESTS[name])]
    for _ in range(2):  # what was answered once is drafted the next time
        assert [output_of(answer) for answer in answers(drafting, **REQUESTS[name])] == right


def test_a_text_that_repeats_itself_takes_fewer_steps_and_reads_the_same(plain, drafting):
    (right,) = answers(plain)
    assert "spec_verify_ct" not in right["meta_info"]
    for _ in range(3):
        (found,) = answers(drafting)
    meta = found["meta_info"]
    assert output_of(found) == output_of(right)
    assert meta["spec_verify_ct"] < meta["completion_tokens"] - 1
    assert meta["spec_num_correct_drafts"] + meta["spec_verify_ct"] == meta["completion_tokens"] - 1
    assert meta["spec_num_proposed_drafts"] >= meta["spec_num_correct_drafts"] > 0
    assert meta["spec_accept_length"] > 1
    assert meta["spec_accept_rate"] > 0
    assert sum(meta["spec_correct_drafts_histogram"]) == meta["spec_verify_ct"]


def test_a_crowd_is_answered_as_alone(plain, drafting):
    prompts = [f"{REPEATS} {i}" for i in range(12)]
    right = [output_of(answers(plain, prompt=prompt)[0]) for prompt in prompts]
    assert [output_of(answer) for answer in answers(drafting, prompt=prompts)] == right


@pytest.mark.parametrize(
    "flags",
    [
        {"disable_overlap_schedule": True},
        {"chunked_prefill_size": 16},
        {"disable_radix_cache": True},
        {"page_size": 16, "max_total_tokens": 512, "max_running_requests": 6},
        {"disable_cuda_graph": True},
        {"tp_size": 2},
        {"speculative_ngram_match_type": "PROB", "speculative_num_draft_tokens": 4},
        {"speculative_ngram_min_bfs_breadth": 4, "tp_size": 2},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_however_the_engine_runs_the_answers_are_the_same(tiny_model, plain, flags):
    prompts = [f"{REPEATS} {i}" for i in range(8)]
    right = [output_of(answers(plain, prompt=prompt)[0]) for prompt in prompts]
    with start(tiny_model, **flags) as engine:
        found = answers(engine, prompt=prompts)
        assert [output_of(answer) for answer in found] == right
        assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in found) > 0


def test_an_answer_that_is_given_up_leaves_nothing(drafting):
    given_up(drafting)


def test_other_devices_refuse_drafts_by_name():
    elsewhere = replace(CpuPlatform().traits, name="cuda", is_host=False)
    with pytest.raises(BanyanError, match="NGRAM on cuda: drafts are made on the host"):
        check_drafts(SpeculativeConfig(algorithm="NGRAM"), elsewhere)
    elsewhere = replace(elsewhere, name="npu", verified=16)
    check_drafts(SpeculativeConfig("EAGLE3", num_tokens=8, num_steps=5, eagle_topk=1), elsewhere)
    check_drafts(SpeculativeConfig("EAGLE3", num_tokens=8, num_steps=5, eagle_topk=4), elsewhere)


def test_layers_with_a_window_go_together_with_drafts(tmp_path):
    tiny("gemma2", tmp_path)
    prompt = [2 + 7 * i % 20 for i in range(60)]
    asked = {"max_new_tokens": 60, "temperature": 0.3, "sampling_seed": 3, "ignore_eos": True}

    def answer(is_drafting: bool) -> dict:
        flags = {"skip_tokenizer_init": True, "max_total_tokens": 2048}
        with start(tmp_path, is_drafting, **flags) as engine:
            for _ in range(2):
                found = engine.generate(input_ids=prompt, sampling_params=asked)
        return found

    right, found = answer(False), answer(True)
    assert found["output_ids"] == right["output_ids"]
    assert found["meta_info"]["spec_num_correct_drafts"] > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_after_a_flush_nothing_is_drafted_from_what_was_seen_before(tiny_model, tp: int):
    """A text that does not repeat itself is foreseen once it was seen, and as long as that is
    remembered; with several ranks only if each of them forgets."""
    body = {"prompt": "A server keeps", "sampling_params": LONG | {"max_new_tokens": 24}}
    with start(tiny_model, tp_size=tp) as engine:
        first, second = (answers(engine, **body)[0] for _ in range(2))
        assert engine.flush_cache()
        third = answers(engine, **body)[0]
        rows = [found["meta_info"]["spec_verify_ct"] for found in (first, second, third)]
        assert rows[1] < rows[2] and third["output_ids"] == first["output_ids"]
        assert engine.flush_cache()
