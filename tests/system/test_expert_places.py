"""Copies of experts, and experts that move while requests run, behind the whole engine."""

import logging
import re

import pytest

import banyan
from tests.models.families import tiny

VARIANT = "qwen2 moe, some dense"
PROMPTS = [[(5 * i * i + 3 * i + shift) % 97 for i in range(6 + shift % 11)] for shift in range(64)]
ASKED = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}


def answers(path, **more) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities, of all requests at once."""
    engine = banyan.Engine(
        model_path=str(path),
        skip_tokenizer_init=True,
        engine_mode="inprocess",
        tp_size=2,
        ep_size=2,
        threads=1,
        max_running_requests=64,
        max_total_tokens=4096,
        chunked_prefill_size=64,
        disable_radix_cache=True,
        check_ledger=True,
        **more,
    )
    with engine:
        found = engine.generate(input_ids=PROMPTS, sampling_params=ASKED, return_logprob=True)
    return [
        (one["output_ids"], [p[0] for p in one["meta_info"]["output_token_logprobs"]])
        for one in found
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("experts")
    tiny(VARIANT, path)
    return path


@pytest.fixture(scope="module")
def plain(model):
    return answers(model)


def test_experts_that_move_amid_64_running_requests_change_no_bit(model, plain, caplog):
    with caplog.at_level(logging.INFO):
        found = answers(
            model,
            ep_num_redundant_experts=2,
            ep_dispatch_algorithm="dynamic",
            enable_eplb=True,
            eplb_rebalance_num_iterations=3,
            eplb_rebalance_layers_per_chunk=1,
        )

    moves = re.findall(r"experts moved: layers=1 experts=(\d+)", caplog.text)
    assert moves and all(int(count) for count in moves)
    assert found == plain


def test_experts_that_move_within_each_stage_change_no_bit(model, plain, caplog):
    with caplog.at_level(logging.INFO):
        found = answers(
            model,
            pp_size=2,
            ep_num_redundant_experts=2,
            enable_eplb=True,
            eplb_rebalance_num_iterations=3,
        )

    assert re.findall(r"experts moved: layers=\d experts=[1-9]", caplog.text)
    assert found == plain


def test_fake_choices_are_even_and_change_the_tokens(model, plain):
    assert answers(model, ep_dispatch_algorithm="fake") != plain
