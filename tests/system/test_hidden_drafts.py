"""A layer of the checkpoint that drafts changes how many steps an answer takes, and no answer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.support.drafts import LONG, REPEATS, REQUESTS, answers, output_of, start
from tests.support.hidden_drafts import FEW, SLOW, TREE, ahead, given_up, with_words


@pytest.fixture(scope="module")
def latent(tiny_model: Path, tmp_path_factory) -> Path:
    return with_words("deepseek v3", tmp_path_factory.mktemp("latent"), tiny_model)


@pytest.fixture(scope="module")
def plain(latent: Path) -> Iterator[Engine]:
    with start(latent, is_drafting=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting(latent: Path) -> Iterator[Engine]:
    with ahead(latent) as engine:
        yield engine


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_answered_as_without_drafts(plain, drafting, name: str):
    right = [output_of(answer) for answer in answers(plain, **REQUESTS[name])]
    for _ in range(2):  # the second finds its prompt in the cache
        assert [output_of(answer) for answer in answers(drafting, **REQUESTS[name])] == right


def test_drafts_that_come_true_save_steps(plain, drafting):
    (right,), (found,) = answers(plain), answers(drafting)
    meta = found["meta_info"]
    assert output_of(found) == output_of(right)
    assert meta["spec_num_correct_drafts"] + meta["spec_verify_ct"] == meta["completion_tokens"] - 1
    assert meta["spec_num_correct_drafts"] > 10


@pytest.mark.parametrize("breadth", [1, 3])
def test_latents_go_together_with_drafts_of_ngram(latent, plain, breadth: int):
    with start(latent, speculative_ngram_min_bfs_breadth=breadth) as engine:
        correct = 0
        for name in ("greedy", "drawn", "schema"):
            right = [output_of(answer) for answer in answers(plain, **REQUESTS[name])]
            for _ in range(2):  # what was answered once is drafted the next time
                found = answers(engine, **REQUESTS[name])
                assert [output_of(answer) for answer in found] == right, name
                correct += sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in found)
        assert correct > 10
        assert engine.stats().leaked == 0


@pytest.mark.parametrize("variant", ["deepseek v3.2", pytest.param("glm moe dsa", marks=SLOW)])
@pytest.mark.parametrize("tree", [{}, pytest.param(TREE, marks=SLOW)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "flags",
    [{}, pytest.param({"tp_size": 2, "chunked_prefill_size": 16}, marks=SLOW)],
    ids=["one", "ranks"],
)
def test_an_indexer_goes_together_with_its_layer_that_drafts(
    tiny_model, tmp_path, variant, tree, flags
):
    """Of a choice of 11 positions, which all contexts here are longer than."""
    model = with_words(variant, tmp_path, tiny_model)
    names = ("greedy", "drawn", "scored", "schema")
    with start(model, is_drafting=False, **flags) as engine:
        right = {
            name: [output_of(each) for each in answers(engine, **REQUESTS[name])] for name in names
        }
    with ahead(model, **tree, **flags) as engine:
        correct = 0
        for name in names:
            for _ in range(2):  # the second finds its prompt in the cache
                found = answers(engine, **REQUESTS[name])
                assert [output_of(each) for each in found] == right[name], name
                correct += sum(each["meta_info"]["spec_num_correct_drafts"] for each in found)
        assert correct > 10
        given_up(engine)


@pytest.mark.parametrize("variant", ["deepseek v3", pytest.param("qwen3", marks=SLOW)])
def test_behind_a_cached_prefix_the_drafts_are_those_behind_a_new_one(
    tiny_model, latent, tmp_path, variant
):
    """They would be others if anything of the prefix, or of its last token, were not there."""
    body = {"input_ids": [3 + 7 * i % 400 for i in range(75)], "sampling_params": LONG}
    # One step after another: how many drafts the last row may bring is known to the planner then.
    flags = {"chunked_prefill_size": 16, "disable_overlap_schedule": True}
    model = latent if variant == "deepseek v3" else with_words(variant, tmp_path, tiny_model)
    with ahead(model, **flags) as engine:
        first, second = engine.generate(**body), engine.generate(**body)
        assert second["meta_info"]["cached_tokens"] >= 64
        assert second["output_ids"] == first["output_ids"]
        counts = [
            {key: value for key, value in each["meta_info"].items() if key.startswith("spec_")}
            for each in (first, second)
        ]
        assert counts[0] == counts[1] and counts[0]["spec_num_correct_drafts"] > 0


@pytest.mark.parametrize("variant", ["glm4 moe", pytest.param("qwen3", marks=SLOW)])
@pytest.mark.parametrize(
    "flags",
    [
        {"page_size": 16, "max_total_tokens": 512, "max_running_requests": 6},
        pytest.param({"disable_overlap_schedule": True, "disable_radix_cache": True}, marks=SLOW),
        pytest.param({"disable_cuda_graph": True, "chunked_prefill_size": 16}, marks=SLOW),
        pytest.param({"tp_size": 2, "speculative_num_steps": 2}, marks=SLOW),
        pytest.param({"quantization": "int8"}, marks=SLOW),
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_however_the_engine_runs_the_answers_are_the_same(tiny_model, tmp_path, variant, flags):
    """Full attention, requests that are retracted, chunks, ranks, rounded weights."""
    model = with_words(variant, tmp_path, tiny_model, head_dim=16)
    prompts = [f"{REPEATS} {i}" for i in range(8)]
    same = {key: value for key, value in flags.items() if key == "quantization"}
    with start(model, is_drafting=False, **same) as engine:
        right = [output_of(answers(engine, prompt=prompt)[0]) for prompt in prompts]
    with ahead(model, **flags) as engine:
        found = answers(engine, prompt=prompts)
        assert [output_of(answer) for answer in found] == right
        assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in found) > 0
        assert engine.stats().leaked == 0


@pytest.mark.parametrize("variant", ["mistral", "deepseek v3", pytest.param("qwen3", marks=SLOW)])
def test_adapters_of_the_model_answer_alike_with_drafts(tiny_model, tmp_path, variant):
    """What drafts knows none of them: it is less often right, and no answer changes."""
    peft = pytest.importorskip("peft")
    model = with_words(variant, tmp_path / "model", tiny_model)
    torch.manual_seed(2)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(init_lora_weights=False, target_modules=["o_proj"], r=4)
    peft.get_peft_model(reference, config).save_pretrained(tmp_path / "adapter")
    flags = {"lora_paths": [f"a={tmp_path / 'adapter'}"]}
    asked = [{}, {"lora_path": "a"}, {"lora_path": "a"}, REQUESTS["drawn"] | {"lora_path": "a"}]
    with start(model, is_drafting=False, **flags) as engine:
        right = [output_of(answers(engine, **body)[0]) for body in asked]
    assert right[0] != right[1]
    with ahead(model, **flags) as engine:
        found = [answers(engine, **body)[0] for body in asked]
        assert [output_of(answer) for answer in found] == right
        assert found[0]["meta_info"]["spec_num_correct_drafts"] > 0
        assert engine.stats().leaked == 0


def test_an_answer_that_is_given_up_leaves_nothing(drafting):
    given_up(drafting)


MAPPED = {"speculative_token_map": "hot.json", "chunked_prefill_size": 16}


@pytest.mark.parametrize(
    ("variant", "flags", "names"),
    [
        ("mistral", MAPPED | {"tp_size": 2}, ("greedy", "drawn", "scored")),
        ("qwen3", {"tp_size": 2, "chunked_prefill_size": 16}, ("greedy", "drawn", "schema")),
        pytest.param("mistral", {}, tuple(REQUESTS), marks=SLOW),
        pytest.param("qwen3", {}, tuple(REQUESTS), marks=SLOW),
        pytest.param("qwen3", FEW, tuple(REQUESTS), marks=SLOW),
        pytest.param("qwen3", {"disable_cuda_graph": True}, tuple(REQUESTS), marks=SLOW),
        pytest.param("qwen3", {"quantization": "int8"}, tuple(REQUESTS), marks=SLOW),
    ],
)
def test_a_model_that_was_made_to_draft_changes_no_answer(
    tiny_model, tmp_path, variant, flags, names
):
    model = with_words(variant, tmp_path, tiny_model)
    if "speculative_token_map" in flags:
        flags = flags | {"speculative_token_map": str(model / "hot.json")}
        (model / "hot.json").write_text(json.dumps([token for token in range(512) if token % 9]))
    with start(model, is_drafting=False, **flags) as engine:
        right = {
            name: [output_of(each) for each in answers(engine, **REQUESTS[name])] for name in names
        }
    with ahead(model, **flags) as engine:
        correct = 0
        for name in names:
            for _ in range(2):  # the second finds its prompt in the cache
                found = answers(engine, **REQUESTS[name])
                assert [output_of(each) for each in found] == right[name], name
                correct += sum(each["meta_info"]["spec_num_correct_drafts"] for each in found)
        assert correct > 10
        given_up(engine)


def test_a_plain_model_is_refused_where_one_that_was_made_to_draft_is_asked_for(tiny_model):
    with pytest.raises(
        BanyanError, match="is none of EAGLE's: 2 tensors of the checkpoint have no place"
    ):
        start(
            tiny_model,
            is_drafting=False,
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(tiny_model),
        ).shutdown()
