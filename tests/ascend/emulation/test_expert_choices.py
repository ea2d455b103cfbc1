"""Choices of experts on an emulated NPU: recorded, returned, and the experts that are placed by
them. Answers are near those of one CPU rank."""

import base64
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from tests.ascend.emulation.device import EmulatedNpu
from tests.models.families import tiny
from tests.support.emulated import NEAR, compare
from tests.support.emulated_ranks import IN_ALL, LENGTHS, TOKENS, start

CPU = {"device": "cpu", "dtype": "float32", "cpu_activations": "fp32"}
IDS = [[(7 * i * i + 3 * i + n) % 97 for i in range(n)] for n in LENGTHS]
PARAMS = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in TOKENS]
MODEL = {"head_dim": 16, "num_experts": 8, "max_position_embeddings": 256}
RECORDED = {
    "expert_distribution_recorder_mode": "stat",
    "expert_distribution_recorder_buffer_size": -1,
    "enable_expert_distribution_metrics": True,
    "decode_log_interval": 4,
    "enable_return_routed_experts": True,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny("qwen3 moe", tmp_path, **MODEL)
    return tmp_path


def ask(model: Path, **flags: object) -> list[dict]:
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    if flags.get("enable_return_routed_experts"):
        asked |= {"return_routed_experts": True}
    with start(model, **flags) as engine:
        return engine.generate(input_ids=IDS, sampling_params=PARAMS, **asked)


def routed(answer: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), np.int32)


LAYOUTS = {
    "one": {"engine_mode": "inprocess"},
    "ep 2": {"tp_size": 2, "ep_size": 2},
    "pp 2": {"pp_size": 2},
    "dp 2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "one" else IN_ALL) for name in LAYOUTS]
)
def test_choices_are_returned_as_the_cpu_chooses(
    npu: EmulatedNpu, model: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    """But for experts whose scores are as good as equal."""
    wanted = ask(model, enable_return_routed_experts=True, **CPU, **LAYOUTS["one"])
    with caplog.at_level(logging.INFO):
        found = ask(model, **RECORDED, **LAYOUTS[layout])
    assert compare(found, wanted, NEAR) >= len(TOKENS)
    for got, expected in zip(found, wanted, strict=True):
        ours, theirs = routed(got), routed(expected)
        assert len(ours) == len(theirs)
        same = np.mean(ours == theirs)
        assert same > 0.9 or got["output_ids"] != expected["output_ids"], same
    if layout == "one":
        assert "expert balancedness=" in caplog.text


ORDER = [[7, 6, 5, 4, 3, 2, 1, 0, 0, 7]] * 4
EP = {"tp_size": 2, "ep_size": 2, "cuda_graph_bs": [1, 2, 4]}
BALANCED = {
    "enable_eplb": True,
    "eplb_rebalance_num_iterations": 3,
    "eplb_rebalance_layers_per_chunk": 1,
    "eplb_min_rebalancing_utilization_threshold": 1.0,
}
JOINED = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2}
PLACED = {
    "copies": EP | {"ep_num_redundant_experts": 2},
    "copies in turn": EP | {"ep_num_redundant_experts": 2, "ep_dispatch_algorithm": "dynamic"},
    "a location": EP
    | {
        "ep_num_redundant_experts": 2,
        "init_expert_location": json.dumps({"physical_to_logical_map": ORDER}),
    },
    "balanced": EP | BALANCED | {"ep_num_redundant_experts": 2},
    "balanced, rows sent": EP | BALANCED | {"moe_a2a_backend": "deepep", "deepep_mode": "normal"},
    "balanced replicas": JOINED | BALANCED,
}
IN_TEST = "copies"


@pytest.mark.parametrize(
    "flags", [pytest.param(name, marks=() if name == IN_TEST else IN_ALL) for name in PLACED]
)
def test_experts_that_moved_or_have_copies_answer_the_same(
    npu: EmulatedNpu, model: Path, flags: str, capfd: pytest.CaptureFixture
) -> None:
    wanted = ask(model, **CPU, **LAYOUTS["one"])
    found = ask(model, **PLACED[flags], log_level="info")
    assert compare(found, wanted, NEAR) >= len(TOKENS)
    log = capfd.readouterr().err
    assert ("experts moved: layers=" in log) == ("balanced" in flags)
    assert ("captured decode steps" in log) == ("balanced" not in flags)
