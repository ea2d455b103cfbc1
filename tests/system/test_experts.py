"""Models of experts and latent attention behind the whole engine: cache, chunks, company."""

import pytest
import torch

import banyan
from banyan.base.errors import ConfigError
from tests.models.families import tiny
from tests.support.expert_requests import FIRST, GREEDY, PROMPTS


@pytest.fixture(params=["deepseek v2, groups, yarn", "deepseek v3", "qwen3 moe"])
def served(request, tmp_path):
    reference = tiny(request.param, tmp_path)
    engine = banyan.Engine(
        model_path=str(tmp_path),
        skip_tokenizer_init=True,
        engine_mode="inprocess",
        chunked_prefill_size=16,
        max_total_tokens=320,
        max_running_requests=4,
        cpu_activations="fp32",
        check_ledger=True,
    )
    with engine:
        yield reference, engine


def open_engine(path, **more) -> banyan.Engine:
    return banyan.Engine(
        model_path=str(path), skip_tokenizer_init=True, cpu_activations="fp32", **more
    )


def continued(reference, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(GREEDY["max_new_tokens"]):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_tokens_equal_those_of_transformers(served):
    reference, engine = served

    answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)

    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer["output_ids"] == continued(reference, prompt)


def test_a_shared_beginning_is_computed_once_and_changes_nothing(served):
    reference, engine = served
    engine.generate(input_ids=[FIRST[0]], sampling_params=GREEDY)

    answers = engine.generate(input_ids=FIRST, sampling_params=GREEDY)

    for prompt, answer in zip(FIRST, answers, strict=True):
        assert answer["output_ids"] == continued(reference, prompt)
        assert answer["meta_info"]["cached_tokens"] >= 32


def test_experts_that_cannot_be_cut_are_shared_out_whole(tmp_path):
    """Each rank of two holds three of six experts, whose 21 columns no two ranks can share."""
    reference = tiny("qwen3 moe, six of 21", tmp_path)

    with open_engine(tmp_path, tp_size=2, ep_size=2) as engine:
        answers = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)

    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer["output_ids"] == continued(reference, prompt)


@pytest.mark.parametrize(
    ("variant", "flags", "match"),
    [
        ("qwen3 moe, six of 21", {"tp_size": 2}, "does not divide .*21 of an expert"),
        ("qwen3 moe, six of 21", {"tp_size": 2, "ep_size": 3}, "experts are divided"),
        ("qwen3 moe", {"tp_size": 2, "ep_size": 2}, "does not divide the model's 5 experts"),
        ("mistral", {"tp_size": 2, "ep_size": 2}, "this model has no experts"),
    ],
)
def test_ranks_that_cannot_share_the_experts_are_refused(variant, flags, match, tmp_path):
    tiny(variant, tmp_path)

    with pytest.raises(ConfigError, match=match):
        open_engine(tmp_path, **flags)
