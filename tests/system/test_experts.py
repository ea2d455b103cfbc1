"""Models of experts and latent attention behind the whole engine: cache, chunks, company."""

import pytest
import torch

import banyan
from tests.models.families import tiny

PROMPTS = [[(5 * i * i + 3 * i + shift) % 97 for i in range(20 + 9 * shift)] for shift in range(5)]
FIRST = [[i * i % 97 for i in range(40)] + [n] for n in range(4)]
"""Prompts that share 40 tokens."""
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


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
