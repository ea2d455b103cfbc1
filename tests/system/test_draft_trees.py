"""Drafts of a model that branch change how many steps an answer takes, and no answer."""

from pathlib import Path

import pytest
import torch
import transformers

from banyan.llm import Engine
from tests.models.families import tiny
from tests.support.draft_models import like
from tests.support.drafts import LONG, REPEATS, REQUESTS, answers, output_of, start
from tests.support.hidden_drafts import FEW, SLOW, TREE, ahead, given_up, with_words

FACTS = {"glm4 moe": {"head_dim": 16}}


def branching(variant: str, model: Path, **flags: object) -> Engine:
    if variant == "standalone":
        flags |= {"speculative_algorithm": "STANDALONE"}
        flags |= {"speculative_draft_model_path": str(model.parent / "draft")}
    return ahead(model, **TREE, **flags)


def model_of(variant: str, folder: Path, words: Path) -> Path:
    if variant == "standalone":
        like(words, folder / "draft", 0.1)
        return like(words, folder / "model", 0.0)
    return with_words(variant, folder / "model", words, **FACTS.get(variant, {}))


@pytest.mark.parametrize(
    ("variant", "flags", "names"),
    [
        ("qwen3", {"chunked_prefill_size": 16}, ("greedy", "drawn", "penalised", "scored")),
        ("standalone", FEW, ("schema", "biased")),
        *(
            pytest.param(variant, flags, tuple(REQUESTS), marks=SLOW)
            for variant in ("qwen3", "mistral", "deepseek v3", "glm4 moe", "standalone")
            for flags in (
                *({}, FEW, {"tp_size": 2, "chunked_prefill_size": 16}),
                *({"disable_cuda_graph": True}, {"quantization": "int8"}),
                {"disable_overlap_schedule": True, "disable_radix_cache": True},
            )
        ),
    ],
)
def test_a_tree_of_drafts_changes_no_answer(tiny_model, tmp_path, variant, flags, names):
    """Alone and beside each other, new and behind a prefix that is cached."""
    model = model_of(variant, tmp_path, tiny_model)
    prompts = [f"{REPEATS} {i}" for i in range(8 if names == tuple(REQUESTS) else 4)]
    with start(model, is_drafting=False, **flags) as engine:
        right = {
            name: [output_of(each) for each in answers(engine, **REQUESTS[name])] for name in names
        }
        alone = [output_of(answers(engine, prompt=prompt)[0]) for prompt in prompts]
    with branching(variant, model, **flags) as engine:
        correct = 0
        for name in names:
            for _ in range(2):  # the second finds its prompt in the cache
                found = answers(engine, **REQUESTS[name])
                assert [output_of(each) for each in found] == right[name], name
                correct += sum(each["meta_info"]["spec_num_correct_drafts"] for each in found)
        assert [output_of(each) for each in answers(engine, prompt=prompts)] == alone
        assert correct > 10
        given_up(engine)


@pytest.mark.parametrize("variant", [pytest.param("gemma2", marks=SLOW)])
def test_layers_with_a_window_draft_trees_too(tmp_path, variant):
    """Of both models: what lies behind the window is given back while trees are drafted."""
    tiny(variant, tmp_path)
    asked = LONG | {"max_new_tokens": 60, "temperature": 0.3, "sampling_seed": 3}
    body = {"input_ids": [2 + 7 * i % 20 for i in range(60)], "sampling_params": asked}
    flags = {"skip_tokenizer_init": True, "max_total_tokens": 2048}
    with start(tmp_path, is_drafting=False, **flags) as engine:
        right = engine.generate(**body)
    flags |= {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(tmp_path)}
    with ahead(tmp_path, **TREE, **flags) as engine:
        for _ in range(2):
            found = engine.generate(**body)
            assert found["output_ids"] == right["output_ids"]
        assert found["meta_info"]["spec_num_correct_drafts"] > 10
        assert engine.stats().leaked == 0


@pytest.mark.parametrize("variant", [pytest.param("mistral", marks=SLOW)])
def test_trees_that_are_as_large_as_they_are_worth_change_no_answer(tiny_model, tmp_path, variant):
    """How many drafts are made is what steps have taken, and may be anything."""
    model = model_of(variant, tmp_path, tiny_model)
    with start(model, is_drafting=False) as engine:
        right = [output_of(each) for each in answers(engine, prompt=[REPEATS, "The banyan"])]
    with branching(variant, model, disable_adaptive_drafts=False) as engine:
        for _ in range(3):
            found = answers(engine, prompt=[REPEATS, "The banyan"])
            assert [output_of(each) for each in found] == right
        assert engine.stats().leaked == 0


@pytest.mark.parametrize("variant", [pytest.param("qwen3", marks=SLOW)])
def test_behind_a_cached_prefix_trees_are_those_behind_a_new_one(tiny_model, tmp_path, variant):
    body = {"input_ids": [3 + 7 * i % 400 for i in range(75)], "sampling_params": LONG}
    # One step after another: how many drafts the last row may bring is known to the planner then.
    flags = {"chunked_prefill_size": 16, "disable_overlap_schedule": True}
    with branching(variant, model_of(variant, tmp_path, tiny_model), **flags) as engine:
        (first,), (second,) = (
            answers(engine, **body, prompt=None),
            answers(engine, **body, prompt=None),
        )
    assert second["meta_info"]["cached_tokens"] >= 64
    assert second["output_ids"] == first["output_ids"]
    counts = [
        {key: value for key, value in each["meta_info"].items() if key.startswith("spec_")}
        for each in (first, second)
    ]
    assert counts[0] == counts[1] and counts[0]["spec_num_correct_drafts"] > 0


@pytest.mark.parametrize("variant", [pytest.param("qwen3", marks=SLOW)])
def test_adapters_of_the_model_answer_alike_with_trees(tiny_model, tmp_path, variant):
    peft = pytest.importorskip("peft")
    model = model_of(variant, tmp_path, tiny_model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(init_lora_weights=False, target_modules=["o_proj"], r=4)
    peft.get_peft_model(reference, config).save_pretrained(tmp_path / "adapter")
    flags = {"lora_paths": [f"a={tmp_path / 'adapter'}"]}
    asked = [{}, {"lora_path": "a"}, REQUESTS["drawn"] | {"lora_path": "a"}]
    with start(model, is_drafting=False, **flags) as engine:
        right = [output_of(answers(engine, **body)[0]) for body in asked]
    with branching(variant, model, **flags) as engine:
        found = [answers(engine, **body)[0] for body in asked]
        assert [output_of(answer) for answer in found] == right
        assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in found) > 0
