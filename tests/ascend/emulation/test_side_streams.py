"""Shared experts on a side stream, on an emulated NPU: the same bits, no race,
and one that is planted is found."""

import pytest

from banyan.moe.layer import ExpertBlock
from banyan.platform.accelerator import DeviceSideStream
from tests.models.families import tiny
from tests.support.emulated_ranks import IN_ALL, JOINED, answers, start

NAME = "SGLANG_NPU_USE_MULTI_STREAM"
ALONE = {"engine_mode": "inprocess"}
STEPS = {"captured": {"cuda_graph_bs": [1, 2, 4]}, "eager": {"disable_cuda_graph": True}}
SIZES = {"max_position_embeddings": 256, "num_hidden_layers": 2}
AT_ONCE = {"hidden_size": 1024, "weights": 0.05}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With a gate on what its shared expert makes."""
    folder = tmp_path_factory.mktemp("streams")
    tiny("qwen2 moe", folder, head_dim=16, **SIZES)
    return folder


@pytest.fixture
def streams(monkeypatch) -> list[int]:
    """Of each pass of a block: how many streams it has used."""
    found, forward = list[int](), ExpertBlock._with_shared_experts

    def watched(block: ExpertBlock, *given):
        found.append(1 if block.side_stream is None else 2)
        return forward(block, *given)

    monkeypatch.setattr(ExpertBlock, "_with_shared_experts", watched)
    return found


def said(model, **flags: object) -> list[tuple]:
    with start(model, **flags) as engine:
        found = answers(engine)
    return [(each["output_ids"], each["meta_info"]["output_token_logprobs"]) for each in found]


@pytest.mark.parametrize("steps", [pytest.param("eager", marks=IN_ALL), "captured"])
def test_a_variable_gives_shared_experts_a_stream(npu, model, monkeypatch, streams, steps) -> None:
    wanted = said(model, **ALONE, **STEPS[steps])
    assert set(streams) == {1}
    streams.clear()
    monkeypatch.setenv(NAME, "1")
    npu.watch_races(True)
    assert said(model, **ALONE, **STEPS[steps]) == wanted
    assert set(streams) == {2} and npu.races() == []


def test_a_flag_gives_shared_experts_a_stream(npu, model, streams) -> None:
    wanted = said(model, **ALONE)
    streams.clear()
    assert said(model, **ALONE, enable_single_batch_overlap=True) == wanted
    assert set(streams) == {2}


def _no_wait(side: DeviceSideStream, mark: object) -> None:
    """In place of what waits behind the experts."""


def _at_once(side: DeviceSideStream, work, after: object) -> object:
    with side._library.stream(side._stream):
        work()
        return side.record_event()


@pytest.mark.parametrize("steps", [pytest.param("captured", marks=IN_ALL), "eager"])
@pytest.mark.parametrize(("name", "planted"), [("wait", _no_wait), ("run", _at_once)])
def test_a_wait_that_is_missing_is_found(
    npu, model, monkeypatch, races, steps: str, name: str, planted
) -> None:
    monkeypatch.setenv(NAME, "1")
    with monkeypatch.context() as patch:
        patch.setattr(DeviceSideStream, name, planted)
        said(model, **ALONE, **STEPS[steps])
    assert any("does not wait for" in race for race in races())


LAYOUTS = {
    "tp": ("qwen2 moe", {"tp_size": 2}, {"head_dim": 16, "num_experts": 6}),
    "rows at once": (
        "deepseek v3",
        JOINED | {"tp_size": 4, "moe_a2a_backend": "deepep"},
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, **AT_ONCE},
    ),
}


@IN_ALL
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_say_the_same_with_it(npu, tmp_path, monkeypatch, layout: str) -> None:
    variant, flags, sizes = LAYOUTS[layout]
    tiny(variant, tmp_path, **SIZES, **sizes)
    wanted = said(tmp_path, **flags)
    monkeypatch.setenv(NAME, "1")
    assert said(tmp_path, **flags) == wanted
