"""Memory of an emulated NPU that is released while the engine runs, and taken again: the device has
it in between, and answers are bit for bit the same afterwards."""

import shutil
from pathlib import Path

import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.llm import Engine
from tests.ascend.emulation.device import EmulatedNpu
from tests.ascend.emulation.test_drafts import made
from tests.models.families import tiny
from tests.support.emulated import LATENT
from tests.support.emulated_ranks import CAPTURED, EAGER, start

PROMPT = [i * 7 % 90 + 5 for i in range(300)]
SHAPE = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 128}
TOKENS = 2048
FLAGS = {"engine_mode": "inprocess", "enable_memory_saver": True, "max_total_tokens": TOKENS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    tiny("qwen3", path, max_position_embeddings=512, num_hidden_layers=4, **SHAPE)
    return path


def ask(engine: Engine, prompt: list[int] = PROMPT) -> tuple:
    assert engine.flush_cache()
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    found = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
    return found["output_ids"], found["meta_info"]["output_token_logprobs"]


def used() -> int:
    return torch.get_device_module("npu").memory_reserved(0)


@pytest.mark.parametrize("steps", [EAGER, CAPTURED], ids=["eager", "captured"])
@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"], ["cuda_graph"], None])
def test_released_memory_is_free_and_comes_back(
    npu: EmulatedNpu, model: Path, steps: dict, tags: list[str] | None
) -> None:
    with start(model, **FLAGS, **steps) as engine:
        first, full = ask(engine), used()
        engine.release_memory_occupation(tags)
        saved = full - used()
        engine.resume_memory_occupation(tags)
        assert ask(engine) == first
        assert used() < full + (64 << 10)
    least = {"weights": 1 << 20, "kv_cache": 1 << 20, "cuda_graph": int(steps is CAPTURED)}
    assert saved >= sum(least[tag] for tag in tags or ("weights", "kv_cache"))


def test_tags_come_back_one_by_one_and_weights_may_be_others(npu: EmulatedNpu, model: Path) -> None:
    """Weights that arrive while the pages are released: graphs wait for the pages."""
    with start(model, **FLAGS, **CAPTURED) as engine:
        first = ask(engine)
        for order in (("weights", "kv_cache"), ("kv_cache", "weights")):
            for tag in order:
                engine.release_memory_occupation([tag])
            engine.resume_memory_occupation([order[0]])
            engine.resume_memory_occupation([order[1]])
            assert ask(engine) == first
        engine.release_memory_occupation()
        engine.update_weights_from_disk(str(model))
        engine.resume_memory_occupation(["kv_cache"])
        assert ask(engine) == first


@pytest.mark.full
@pytest.mark.parametrize("ranks", [{"tp_size": 2}])
def test_every_rank_releases_its_memory(npu: EmulatedNpu, model: Path, ranks: dict) -> None:
    with start(model, **{**FLAGS, "engine_mode": "normal"}, **ranks, **CAPTURED) as engine:
        first = ask(engine)
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert ask(engine) == first


@pytest.mark.parametrize(
    ("variant", "steps"),
    [
        pytest.param("qwen3", CAPTURED, marks=pytest.mark.full),
        ("qwen3 moe", EAGER),
        pytest.param("deepseek v3", CAPTURED, marks=pytest.mark.full),
    ],
)
def test_weights_with_a_backup_come_back_without_their_files(
    npu: EmulatedNpu, tmp_path: Path, variant: str, steps: dict
) -> None:
    shape = LATENT if variant == "deepseek v3" else {"head_dim": 16}
    tiny(variant, tmp_path / "model", max_position_embeddings=512, **shape)
    flags = FLAGS | {"enable_weights_cpu_backup": True}
    with start(tmp_path / "model", **flags, **steps) as engine:
        first, full = ask(engine), used()
        shutil.rmtree(tmp_path / "model")
        for tags in (["weights"], None):
            engine.release_memory_occupation(tags)
            assert used() < full
            engine.resume_memory_occupation(tags)
            assert ask(engine) == first


@pytest.mark.parametrize(
    ("drafter", "backup"),
    [
        ("EAGLE", True),
        *(pytest.param(x, False, marks=pytest.mark.full) for x in ("EAGLE", "NEXTN")),
    ],
)
@pytest.mark.parametrize("device", ["npu", "cpu"])
def test_weights_of_a_draft_model_are_released_and_come_back(
    npu: EmulatedNpu, tmp_path: Path, drafter: str, backup: bool, device: str
) -> None:
    """All weights leave the device, and drafts come true as before. Without the flag such a start
    is refused: nothing reads draft weights again."""
    flags = {**FLAGS, **CAPTURED, **made(drafter, tmp_path), "enable_weights_cpu_backup": backup}
    if device == "cpu":
        flags |= {"device": "cpu", "dtype": "float32"}
    with pytest.raises(ConfigError, match="enable-memory-saver: draft weights"):
        start(tmp_path, **flags).__enter__()
    flags["enable_draft_weights_cpu_backup"] = True
    with start(tmp_path, **flags) as engine:
        first, full = ask(engine, PROMPT[:200]), used()
        for tags in (["weights"], None):
            engine.release_memory_occupation(tags)
            assert device == "cpu" or used() < full - (64 << 10)
            engine.resume_memory_occupation(tags)
            assert ask(engine, PROMPT[:200]) == first
