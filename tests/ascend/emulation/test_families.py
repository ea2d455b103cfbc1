"""Families on the emulated NPU: windows, sinks, experts and latent attention, against the CPU.

The device computes in float16, which its operators take, and the CPU in float32: log-probabilities
are near each other, and tokens equal wherever the CPU's best is clear of the second. Requests end
one after another, so that steps of many rows run eagerly and those of few in graphs.
"""

from pathlib import Path

import pytest

import banyan
from banyan.ascend.ops.contracts import ContractError
from banyan.base.errors import BanyanError
from tests.ascend.emulation.device import EmulatedNpu
from tests.ascend.emulation.graph import Graph
from tests.models.families import tiny
from tests.support.emulated import CAPTURED, IN_ALL, ROOM, compare, start

EAGER = {"gemma2": {"head_dim": 16}, "deepseek v3": {}}
"""Those whose steps are not captured: torch's operators attend."""
LAYERS = 3
LENGTHS = (150, 40, 21, 9, 5)
TOKENS = (4, 8, 12, 16, 20)


def answers(engine: banyan.Engine) -> list[dict]:
    ids = [[(7 * i * i + 3 * i + n) % 97 for i in range(n)] for n in LENGTHS]
    params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in TOKENS]
    asked = {"return_logprob": True, "top_logprobs_num": 2}
    return engine.generate(input_ids=ids, sampling_params=params, **asked)


def read_back(engine: banyan.Engine, npu: EmulatedNpu) -> dict[str, float]:
    """By decode step of two rows: copies to the host, those that are late, and waits."""
    params, counted = {"temperature": 0, "ignore_eos": True}, []
    for tokens in (5, 25):
        before = npu.counters()
        given = {"input_ids": [[3, 5, 7], [11, 13]]}
        engine.generate(**given, sampling_params=params | {"max_new_tokens": tokens})
        after = npu.counters()
        counted.append({name: after[name] - before[name] for name in after})
    short, long = counted
    return {name: (long[name] - short[name]) / 20 for name in ("to_host", "to_host_late", "waits")}


@pytest.fixture
def replayed(monkeypatch) -> list[str]:
    """Of each replay of a graph: why it was refused, "" if it was not."""
    found, replay = list[str](), Graph.replay

    def watched(graph: Graph) -> None:
        try:
            replay(graph)
        except ContractError as error:
            found.append(str(error))
            raise
        found.append("")

    monkeypatch.setattr(Graph, "replay", watched)
    return found


@pytest.mark.parametrize("variant", CAPTURED)
def test_a_family_says_what_it_says_on_the_cpu(npu, tmp_path, replayed, variant: str) -> None:
    """Of a decode step tokens and their logits go out, late, and the host waits for these alone."""
    tiny(variant, tmp_path, num_hidden_layers=LAYERS, **ROOM, **CAPTURED[variant])
    with start(tmp_path, "cpu", dtype="float32", cpu_activations="fp32") as engine:
        wanted = answers(engine)
    with start(tmp_path, "npu", dtype="float16", cuda_graph_bs=[1, 2]) as engine:
        assert compare(answers(engine), wanted) > sum(TOKENS) / 3
        assert read_back(engine, npu) == {"to_host": 2, "to_host_late": 2, "waits": 1}
    assert len(replayed) > 25 and not any(replayed)


@pytest.mark.parametrize(
    "variant",
    ["qwen3", "gemma2", *(pytest.param(each, marks=IN_ALL) for each in ("gemma3", "gpt-oss"))],
)
def test_heads_that_no_operator_takes_are_attended_by_the_reference(
    npu: EmulatedNpu, tmp_path: Path, variant: str
) -> None:
    """Rows whose lengths are on the host; with windows, sinks and capped logits."""
    tiny(variant, tmp_path, num_hidden_layers=LAYERS, **ROOM, head_dim=40)
    with start(tmp_path, "cpu", dtype="float32", cpu_activations="fp32") as engine:
        wanted = answers(engine)
    with start(tmp_path, "npu", dtype="float16", cuda_graph_bs=[1, 2]) as engine:
        assert compare(answers(engine), wanted) > sum(TOKENS) / 3


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv-cache-dtype"),
        ({"kv_cache_dtype": "int8"}, "kv-cache-dtype"),
        ({"dtype": "float32"}, "dtype"),
        ({"page_size": 64}, "page-size"),
    ],
)
def test_forms_that_no_operator_takes_end_the_start(
    npu: EmulatedNpu, tmp_path: Path, flags: dict[str, object], why: str
) -> None:
    tiny("qwen3", tmp_path, num_hidden_layers=LAYERS, **ROOM, head_dim=128)
    with (
        pytest.raises(BanyanError, match=why),
        start(tmp_path, "npu", **{"dtype": "float16", **flags}),
    ):
        pass


@IN_ALL
@pytest.mark.parametrize("variant", CAPTURED | EAGER)
@pytest.mark.parametrize(
    "flags",
    [
        {"disable_cuda_graph": True},
        {"chunked_prefill_size": 32},
        {"disable_hybrid_swa_memory": True},
    ],
    ids=["eager", "chunks", "one layout"],
)
def test_it_says_so_in_any_way(npu, tmp_path, variant: str, flags: dict) -> None:
    tiny(variant, tmp_path, num_hidden_layers=LAYERS, **ROOM, **(CAPTURED | EAGER)[variant])
    with start(tmp_path, "cpu", dtype="float32", cpu_activations="fp32") as engine:
        wanted = answers(engine)
    with start(tmp_path, "npu", dtype="float16", **flags) as engine:
        assert compare(answers(engine), wanted) > sum(TOKENS) / 3
