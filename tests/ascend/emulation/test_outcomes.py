"""The outcomes of flags on an Ascend NPU hold for what a start does on the emulated one."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError
from banyan.config.flags.outcome import MISSING, NOTHING, WORKING, outcome_of, outcome_rows
from banyan.config.flags.table import find
from banyan.platform.accelerator import Accelerator
from banyan.platform.base import Graph
from tests.ascend.emulation.test_offload import SHAPE
from tests.ascend.emulation.test_ranks import answers, start
from tests.models.families import tiny

MORE = {"num_hidden_layers": 6, "num_key_value_heads": 8, "max_position_embeddings": 256}
ALONE = {"engine_mode": "inprocess", "cuda_graph_bs": [1, 2, 4]}
NGRAM = {"speculative_algorithm": "NGRAM"}
REFUSED = {
    "speculative-num-draft-tokens": (
        NGRAM | {"speculative_num_draft_tokens": 17},
        "at most 16 tokens",
    ),
    "dtype": ({"dtype": "float32"}, "no kernel of npu"),
}
"""Flag -> a start with it, and how the device itself refuses it."""
STARTED = {
    "enable-memory-saver": {"enable_memory_saver": True},
    "speculative-ngram-min-bfs-breadth": NGRAM | {"speculative_ngram_min_bfs_breadth": 2},
    "attention-backend": {"attention_backend": "ascend"},
    "attention-backend torch_native": {"attention_backend": "torch_native"},
    "prefill-attention-backend": {"prefill_attention_backend": "torch_native"},
    "decode-attention-backend": {"decode_attention_backend": "torch_native"},
    "enable-layerwise-nvtx-marker": {"enable_layerwise_nvtx_marker": True},
    "cpu-offload-gb": {"cpu_offload_gb": 0.002},
    "offload-group-size": {"offload_group_size": 2, "offload_prefetch_step": 1},
    "cuda-graph-max-bs": {"cuda_graph_max_bs": 2},
    "disable-cuda-graph-padding": {"disable_cuda_graph_padding": True},
    "hicache-ratio": {"enable_hierarchical_cache": True, "hicache_ratio": 1.5},
    "hicache-mem-layout": {
        "enable_hierarchical_cache": True,
        "hicache_mem_layout": "page_first_direct",
    },
    "base-gpu-id": {"base_gpu_id": 0},
    "cpu-activations": {"cpu_activations": "fp32"},
}
"""Flag -> a start with it: on a CPU its outcome is another one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outcomes")
    tiny("qwen3", folder, **SHAPE, **MORE)
    return folder


@pytest.mark.parametrize("flag", REFUSED)
def test_the_device_refuses_what_the_table_refuses(
    npu, model: Path, flag: str, monkeypatch
) -> None:
    """Without the table too: a row of a flag that works by now has to go."""
    given, why = REFUSED[flag]
    in_table = pytest.raises(BanyanError, match="is not available in this build")
    with in_table, start(model, **ALONE | given):
        pass
    monkeypatch.setattr("banyan.config.cli.outcome_of", lambda *_: WORKING)
    with pytest.raises(BanyanError, match=why), start(model, **ALONE | given):
        pass


@pytest.mark.parametrize("flag", STARTED)
def test_a_flag_whose_outcome_differs_from_a_cpus_starts(npu, model: Path, flag: str) -> None:
    with start(model, **ALONE | STARTED[flag]) as engine:
        assert all(found["output_ids"] for found in answers(engine))


def test_lines_about_ignored_flags_agree_with_what_the_start_does(
    npu, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No line says that there are no graphs while steps are captured."""
    chip = "A2" if npu.soc.devices == 8 else "A3"
    flags = {
        name: find(name, abbreviate=False)
        for name, rows in outcome_rows().items()
        if any(chip in r.devices and not r.values for r in rows)
    }
    switches = [
        name
        for name, known in flags.items()
        if known.kind == "switch" and outcome_of(known, None, chip).verdict in (NOTHING, MISSING)
    ]
    assert "enable-piecewise-cuda-graph" in switches
    given = {name.replace("-", "_"): True for name in switches}
    with caplog.at_level(logging.INFO), start(model, **ALONE | given) as engine:
        assert answers(engine)
    lines = [record.getMessage() for record in caplog.records]
    assert any("captured decode steps" in line for line in lines)
    assert not any("there are no device graphs" in line for line in lines)
    for name in switches:
        assert any(line.startswith(f"--{name} is accepted") for line in lines), name


@pytest.mark.parametrize("collects", [False, True])
def test_garbage_is_collected_in_captures_only_on_demand(
    npu, model: Path, collects: bool, monkeypatch
) -> None:
    seen, capture = list[bool](), Accelerator.capture

    def watched(platform: Accelerator, work: Callable[[], None]) -> Graph:
        seen.append(gc.isenabled())
        return capture(platform, work)

    monkeypatch.setattr(Accelerator, "capture", watched)
    with start(model, **ALONE, enable_cudagraph_gc=collects) as engine:
        assert answers(engine)
    assert set(seen) == {collects} and gc.isenabled()


def test_the_capture_of_graphs_is_profiled(
    npu, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), start(model, **ALONE, enable_profile_cuda_graph=True):
        pass
    (line,) = [m for m in caplog.messages if m.startswith("profile of the capture of graphs")]
    assert "aten::" in line and "CPU total" in line
