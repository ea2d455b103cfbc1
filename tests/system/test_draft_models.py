"""A model that drafts changes how many steps an answer takes, and nothing of the answer."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from banyan.base.clock import WallClock
from banyan.base.errors import BanyanError
from banyan.config.env import Environment
from banyan.config.prepare import prepare
from banyan.engine.model_loader import Phases, open_model
from banyan.llm import Engine
from tests.models.families import tiny
from tests.support.draft_models import like
from tests.support.drafts import LONG, REPEATS, REQUESTS, answers, output_of, start
from tests.support.flags import config_of
from tests.support.hidden_drafts import given_up


def beside(model: Path, draft: Path, **flags: object) -> Engine:
    named = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    named["disable_adaptive_drafts"] = True
    return start(model, is_drafting=False, **(named | flags))


@pytest.fixture(scope="module")
def similar(tiny_model: Path, tmp_path_factory) -> Path:
    """A draft model that is sometimes right."""
    return like(tiny_model, tmp_path_factory.mktemp("draft") / "model", 0.1)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Engine]:
    with start(tiny_model, is_drafting=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting(tiny_model: Path, similar: Path) -> Iterator[Engine]:
    with beside(tiny_model, similar) as engine:
        yield engine


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_answered_as_without_a_draft_model(plain, drafting, name: str):
    right = [output_of(answer) for answer in answers(plain, **REQUESTS[name])]
    for _ in range(2):  # the second finds its prompt in the cache
        assert [output_of(answer) for answer in answers(drafting, **REQUESTS[name])] == right


def test_a_model_that_agrees_takes_fewer_steps_and_changes_no_answer(tiny_model, plain):
    with beside(tiny_model, tiny_model) as engine:
        for body in ({}, REQUESTS["drawn"], REQUESTS["penalised"]):
            (right,) = answers(plain, **body)
            found = [answers(engine, **body)[0] for _ in range(3)]
            assert [output_of(each) for each in found] == [output_of(right)] * 3
            total = Counter()
            for each in found:
                total.update({k: v for k, v in each["meta_info"].items() if isinstance(v, int)})
            correct = total["spec_num_correct_drafts"]
            assert correct == total["spec_num_proposed_drafts"]
            assert correct + total["spec_verify_ct"] == total["completion_tokens"] - 3
            assert correct > total["spec_verify_ct"]


def test_pages_of_a_prompt_that_is_cached_hold_what_the_draft_model_keeps_too(tiny_model):
    """A draft model that lacks the prompt's keys would no longer agree with itself."""
    prompt = [3 + 7 * i % 400 for i in range(70)]
    body = {"input_ids": prompt, "sampling_params": LONG}
    with beside(tiny_model, tiny_model, chunked_prefill_size=16) as engine:
        first, second = engine.generate(**body), engine.generate(**body)
        assert second["meta_info"]["cached_tokens"] >= 64
        assert second["output_ids"] == first["output_ids"]
        for found in (first, second):
            assert found["meta_info"]["spec_accept_rate"] == 1
            assert found["meta_info"]["spec_num_correct_drafts"] > 0


@pytest.mark.parametrize(
    "flags",
    [
        {"disable_overlap_schedule": True},
        {"chunked_prefill_size": 16},
        {"disable_radix_cache": True},
        {"page_size": 16, "max_total_tokens": 512, "max_running_requests": 6},
        {"disable_cuda_graph": True},
        {"tp_size": 2},
        {"speculative_num_steps": 7, "chunked_prefill_size": -1},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_however_the_engine_runs_the_answers_are_the_same(tiny_model, similar, plain, flags):
    prompts = [f"{REPEATS} {i}" for i in range(8)]
    right = [output_of(answers(plain, prompt=prompt)[0]) for prompt in prompts]
    with beside(tiny_model, similar, **flags) as engine:
        found = answers(engine, prompt=prompts)
        assert [output_of(answer) for answer in found] == right
        assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in found) > 0
        assert engine.flush_cache()


def test_an_answer_that_is_given_up_leaves_nothing(drafting):
    given_up(drafting)


def test_the_weights_of_the_draft_are_rounded_by_themselves(tiny_model):
    words = ("--model-path", str(tiny_model), "--speculative-draft-model-path", str(tiny_model))
    more = ("--speculative-algorithm", "STANDALONE", "--threads", "1")
    rounded = ("--speculative-draft-model-quantization", "q4_0")
    config, model_config = prepare(config_of(*words, *more, *rounded), Environment())
    opened = open_model(config, model_config, 0, "", Phases(WallClock()))
    assert opened.draft is not None
    target, draft = (
        build.ops.recorder.quantization for build in (opened.build, opened.draft.build)
    )
    assert (target, draft) == ("", "q4_0")


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("gemma2", "gemma2"),
        ("gemma2", "mistral"),
        ("mistral", "gemma2"),
        ("deepseek v3", "mistral"),
    ],
)
def test_models_that_keep_other_things_share_pages(tmp_path, target: str, draft: str):
    """Windows beside full attention, latents beside keys and values, heads of other widths."""
    tiny(target, tmp_path / "target")
    tiny(draft, tmp_path / "draft", num_hidden_layers=2)
    prompt = [3 + 7 * i % 90 for i in range(60)]
    asked = {"max_new_tokens": 50, "temperature": 0.3, "sampling_seed": 3, "ignore_eos": True}
    flags = {"skip_tokenizer_init": True, "max_total_tokens": 2048}

    def answer(engine: Engine) -> list[list[int]]:
        return [engine.generate(input_ids=prompt[i:], sampling_params=asked) for i in (0, 0, 3)]

    with start(tmp_path / "target", is_drafting=False, **flags) as engine:
        right = [found["output_ids"] for found in answer(engine)]
    with beside(tmp_path / "target", tmp_path / "draft", **flags) as engine:
        found = answer(engine)
        assert engine.stats().leaked == 0
    assert [each["output_ids"] for each in found] == right
    assert sum(each["meta_info"]["spec_num_proposed_drafts"] for each in found) > 0


def test_a_tokenizer_of_other_words_is_refused(tiny_model, tmp_path):
    draft = like(tiny_model, tmp_path / "draft", 0.0)
    text = (draft / "tokenizer.json").read_text()
    (draft / "tokenizer.json").write_text(text.replace('"!": ', '"\\u0100!": ', 1))
    with pytest.raises(BanyanError, match="other words"):
        beside(tiny_model, draft).shutdown()


@pytest.mark.slow
def test_the_demo_answers_as_without_a_copy_of_it_that_drafts(demo_model):
    """Real weights, by themselves and rounded once more by the drafting copy's kernels."""
    asked = [f"Question {i}: what is the capital of country number {i}?" for i in range(6)]
    greedy, drawn = {"temperature": 0, "max_new_tokens": 48}, {"temperature": 0.8}
    bodies = [greedy, greedy | drawn | {"sampling_seed": 4}]
    flags = {"threads": 2, "log_level": "error", "max_total_tokens": 4096}

    def reported_by(engine: Engine) -> list[list[dict]]:
        return [engine.generate(asked, body) for body in bodies]

    with Engine(model_path=str(demo_model), **flags) as engine:
        right = [[output_of(each) for each in found] for found in reported_by(engine)]
    named = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(demo_model)}
    with Engine(model_path=str(demo_model), **named, **flags) as engine:
        found = reported_by(engine)
    assert [[output_of(each) for each in some] for some in found] == right
    metas = [each["meta_info"] for some in found for each in some]
    correct, made = (
        sum(meta[f"spec_num_{what}_drafts"] for meta in metas) for what in ("correct", "proposed")
    )
    assert correct > 0.9 * made > 0
