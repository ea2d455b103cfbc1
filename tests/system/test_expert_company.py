"""Experts with copies that move while requests run, beside what else a start may ask for: drafts,
adapters, other weights at run time, joined replicas, pairs of servers."""

import logging
import os
import re
from pathlib import Path

import pytest
import torch

import banyan
from banyan.base.errors import ConfigError
from banyan.llm import Engine
from tests.models.drafting import tiny_mtp
from tests.models.families import tiny
from tests.system.handing import engines
from tests.system.test_expert_places import ASKED, PROMPTS, VARIANT
from tests.system.test_joined import JOINED
from tests.system.test_joined import answers as joined_answers
from tests.system.test_lora_beside import random_adapter

ALL = os.environ.get("PARALLEL") == "all"
OUTER = pytest.mark.skipif(not ALL, reason="make test-parallel")
SOME = PROMPTS[:16]
MOVING = {
    "ep_num_redundant_experts": 2,
    "ep_dispatch_algorithm": "dynamic",
    "enable_eplb": True,
    "eplb_rebalance_num_iterations": 3,
    "eplb_rebalance_layers_per_chunk": 1,
}
SHARED = {"tp_size": 2, "ep_size": 2, "threads": 1, "cpu_activations": "fp32"}


def opened(path: Path, **more) -> Engine:
    usual = {"skip_tokenizer_init": True, "engine_mode": "inprocess", "check_ledger": True}
    usual |= {"max_total_tokens": 4096, "chunked_prefill_size": 64, "disable_radix_cache": True}
    return banyan.Engine(model_path=str(path), **usual | SHARED | more)


def outputs_of(engine: Engine, prompts=SOME, **more) -> list[tuple[list[int], list[float]]]:
    asked = {"sampling_params": ASKED, "return_logprob": True, **more}
    return [
        (one["output_ids"], [p[0] for p in one["meta_info"]["output_token_logprobs"]])
        for one in engine.generate(input_ids=prompts, **asked)
    ]


def moved(caplog) -> int:
    """Experts that have moved since the last call."""
    found = sum(map(int, re.findall(r"experts moved: layers=\d+ experts=(\d+)", caplog.text)))
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def _heard(caplog):
    with caplog.at_level(logging.INFO):
        yield


def test_weights_that_are_taken_after_a_move_lie_where_experts_are(tmp_path, caplog):
    """Other weights, then the same ones after their memory was released."""
    model = tiny(VARIANT, tmp_path / "a")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    model.save_pretrained(tmp_path / "b")
    with opened(tmp_path / "b") as engine:
        expected = outputs_of(engine)
    with opened(tmp_path / "a", enable_memory_saver=True, **MOVING) as engine:
        assert outputs_of(engine) != expected and moved(caplog)
        engine.update_weights_from_disk(str(tmp_path / "b"))
        assert outputs_of(engine) == expected and moved(caplog)
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert outputs_of(engine) == expected


@OUTER
def test_drafts_come_from_a_layer_whose_experts_stay(tmp_path, caplog):
    tiny_mtp("deepseek v3", tmp_path, n_routed_experts=8, n_group=2)
    with opened(tmp_path) as engine:
        expected = outputs_of(engine)
    drafts = {"speculative_algorithm": "NEXTN", "disable_adaptive_drafts": True}
    with opened(tmp_path, expert_distribution_recorder_mode="stat", **drafts, **MOVING) as engine:
        assert outputs_of(engine) == expected
        answers = engine.generate(input_ids=SOME, sampling_params=ASKED)
    assert moved(caplog)
    assert [a["output_ids"] for a in answers] == [tokens for tokens, _ in expected]
    assert sum(a["meta_info"]["spec_num_proposed_drafts"] for a in answers)


@OUTER
def test_adapters_stay_next_to_experts_that_move(tmp_path, caplog):
    model = tiny("qwen2 moe", tmp_path / "base", num_experts=6)
    path = random_adapter(model, tmp_path / "a", "q_proj", "o_proj")
    adapters = {"lora_paths": [f"a={path}"]}
    with opened(tmp_path / "base", **adapters) as engine:
        expected = {name: outputs_of(engine, lora_path=name) for name in ("a", None)}
    assert expected["a"] != expected[None]
    with opened(tmp_path / "base", **adapters, **MOVING) as engine:
        assert {name: outputs_of(engine, lora_path=name) for name in expected} == expected
    assert moved(caplog)


@OUTER
@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
def test_joined_replicas_share_copies(dispatch, tmp_path):
    tiny("qwen2 moe", tmp_path, num_experts=6)
    plain, _ = joined_answers(tmp_path, **JOINED, ep_size=2)
    copies = {"ep_num_redundant_experts": 4, "ep_dispatch_algorithm": dispatch}
    found, _ = joined_answers(tmp_path, **JOINED, ep_size=2, **copies)
    assert found == plain


@pytest.mark.parametrize(
    "flags",
    [
        {"tp_size": 2, "ep_size": 2},
        pytest.param({"tp_size": 4, "ep_size": 4}, marks=OUTER),
        pytest.param({"tp_size": 4, "ep_size": 4, "moe_a2a_backend": "deepep"}, marks=OUTER),
    ],
    ids=lambda flags: " ".join(map(str, flags.values())),
)
def test_experts_that_move_amid_64_requests_of_joined_replicas_change_no_bit(
    flags, tmp_path, capfd
):
    """Half of the requests on each replica; every rank moves experts between two of its steps."""
    tiny(VARIANT, tmp_path, num_experts=8)
    joined = {"dp_size": 2, "enable_dp_attention": True, "engine_mode": "normal", **flags}
    longer = ASKED | {"max_new_tokens": 20}
    found = []
    for moving in ({}, MOVING | {"ep_num_redundant_experts": 4}):
        with opened(tmp_path, log_level="info", **joined | moving) as engine:
            found.append(outputs_of(engine, PROMPTS, sampling_params=longer))
    assert found[0] == found[1]
    moves = re.findall(r"experts moved: layers=1 experts=(\d+)", capfd.readouterr().err)
    assert moves and all(int(count) for count in moves)


@OUTER
def test_stages_have_copies_of_their_own_layers_experts(tmp_path):
    tiny("qwen2 moe", tmp_path, num_experts=6)
    with opened(tmp_path, pp_size=2) as engine:
        expected = outputs_of(engine)
    with opened(tmp_path, pp_size=2, ep_num_redundant_experts=4) as engine:
        assert outputs_of(engine) == expected


@OUTER
def test_a_pair_of_servers_hands_over_while_experts_move_on_both(tmp_path, caplog):
    tiny(VARIANT, tmp_path)
    with opened(tmp_path) as engine:
        expected = outputs_of(engine)
    flags = SHARED | MOVING | {"skip_tokenizer_init": True, "chunked_prefill_size": 64}
    with engines(tmp_path, flags, flags) as pair:
        found = [
            pair.ask(input_ids=prompt, sampling_params=ASKED, return_logprob=True)
            for prompt in SOME
        ]
    assert moved(caplog)
    assert [one["output_ids"] for one in found] == [tokens for tokens, _ in expected]


@OUTER
def test_four_ranks_move_their_experts_and_change_no_bit(tmp_path, caplog):
    tiny(VARIANT, tmp_path, num_attention_heads=4, num_key_value_heads=4, num_experts=8)
    four = {"tp_size": 4, "ep_size": 4}
    with opened(tmp_path, **four) as engine:
        expected = outputs_of(engine)
    with opened(tmp_path, **MOVING | four | {"ep_num_redundant_experts": 4}) as engine:
        assert outputs_of(engine) == expected
    assert moved(caplog)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (
            {"model_impl": "transformers"},
            "--enable-eplb cannot be combined with --model-impl transformers",
        ),
        (
            {"model_impl": "transformers", "tp_size": 1, "ep_size": 1},
            "--enable-eplb cannot be combined with --model-impl transformers",
        ),
    ],
)
def test_what_experts_do_not_move_next_to_is_named(flags, match, tmp_path):
    tiny("qwen3 moe", tmp_path, num_experts=6)
    with pytest.raises(ConfigError, match=match):
        opened(tmp_path, **MOVING | flags)
