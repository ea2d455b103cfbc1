"""All that comes before latent attention as one operator, on the emulated NPU."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import banyan
from banyan.ascend.ops.contracts import ContractError
from banyan.ascend.ops.latent_contracts import WHOLLY
from banyan.ascend.ops.operators import LatentOperators, Operators
from banyan.ascend.ops.prologue import Prologue, open_prologue
from banyan.ascend.selfcheck.cases import empty_pages, inputs
from banyan.ops.activation_quant import Rounding
from banyan.ops.api import KEYS, LATENT, QUERY, SQUEEZE, PrologueShape
from banyan.ops.stored import StoredWeight
from tests.models.families import tiny
from tests.models.quantised import FORMS
from tests.models.quantised_checkpoints import rewrite_weights
from tests.support.emulated import IS_WHOLE, compare, start

MLAPO = "SGLANG_NPU_USE_MLAPO"
DEEPSEEK = {
    **{"hidden_size": 6144, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    **{"qk_nope_head_dim": 128, "v_head_dim": 32, "head_dim": 64},
}
"""The widths that the operator has."""
WIDE = DEEPSEEK | {
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1},
    **{"first_k_dense_replace": 1, "max_position_embeddings": 256, "intermediate_size": 64},
}
ALL = ("_proj.weight", "_proj_with_mqa.weight")
HALF, NEAR = torch.bfloat16, 0.05
FLAGS = {"dtype": "bfloat16", "cuda_graph_bs": [1, 2]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    tiny("deepseek v3", folder, weights=0.02, **WIDE)
    return folder


def rounded(plain: Path, folder: Path, form: str, endings: tuple[str, ...]) -> Path:
    shutil.copytree(plain, folder)
    rewrite_weights(folder, FORMS[form], endings)
    return folder


@pytest.fixture(scope="module")
def model(plain: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rounded") / "model"
    return rounded(plain, folder, "modelslim, dynamic", ALL)


def answers(model: Path, **flags: object) -> list[dict]:
    ids = [[(7 * i * i + 3 * i + n) % 97 for i in range(n)] for n in (140, 9)]
    params = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in (4, 8)]
    asked = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    with start(model, "npu", **FLAGS | flags) as engine:
        return engine.generate(input_ids=ids, sampling_params=params, **asked)


def scores(found: list[dict]) -> np.ndarray:
    """Of the prompts' tokens."""
    return np.array([p[0] for f in found for p in f["meta_info"]["input_token_logprobs"][1:]])


@pytest.fixture
def called(monkeypatch) -> list[int]:
    """Tokens of each call of the operator while steps are launched or captured."""
    found, prolog = list[int](), LatentOperators.mla_prolog

    def watched(operators: LatentOperators, x: torch.Tensor, *given, **named):
        found.append(len(x))
        return prolog(operators, x, *given, **named)

    monkeypatch.setattr(LatentOperators, "mla_prolog", watched)
    return found


def test_one_operator_says_what_several_say(npu, model: Path, monkeypatch, called) -> None:
    several = answers(model)
    assert not called
    monkeypatch.setenv(MLAPO, "1")
    monkeypatch.delattr("banyan.ascend.ops.operators.Operators.rotary_mul")
    one = answers(model)
    assert max(called) >= 140 and {1, 2} <= set(called), "steps of both kinds, and captured ones"
    assert compare(one, several, NEAR) > 8
    assert np.abs(scores(one) - scores(several)).mean() < 0.02 * scores(several).std()


@pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all")
@pytest.mark.parametrize("endings", [(), ("q_b_proj.weight",)], ids=["floats", "heads of 8 bits"])
def test_it_does_so_with_other_weights(
    npu, plain: Path, tmp_path, monkeypatch, called, endings
) -> None:
    folder = rounded(plain, tmp_path / "model", "modelslim, dynamic", endings) if endings else plain
    several = answers(folder)
    monkeypatch.setenv(MLAPO, "1")
    one = answers(folder, disable_cuda_graph=True)
    assert called and compare(one, several, NEAR) > 8


@pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all")
@pytest.mark.parametrize("is_rounded", [True, False])
def test_an_indexer_reads_squeezed_queries_that_it_gives(
    npu, tmp_path, monkeypatch, called, is_rounded: bool
) -> None:
    tiny("deepseek v3.2", tmp_path, weights=0.02, **WIDE, index_head_dim=128)
    if is_rounded:
        rewrite_weights(tmp_path, FORMS["modelslim, dynamic"], ALL)
    several = answers(tmp_path)
    monkeypatch.setenv(MLAPO, "1")
    one = answers(tmp_path)
    assert called
    off = np.abs(scores(one) - scores(several))  # some tokens read other positions
    assert off.mean() < 0.06 * scores(several).std()
    assert np.median(off) < 0.03 * scores(several).std()


@pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all")
def test_it_takes_other_weights_while_it_serves(npu, plain, model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(MLAPO, "1")
    other = tmp_path / "other"
    shutil.copytree(plain, other)
    tiny("deepseek v3", other, weights=0.03, **WIDE)
    rewrite_weights(other, FORMS["modelslim, dynamic"], ALL)
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}

    def ask(engine: banyan.Engine) -> list[float]:
        found = engine.generate(input_ids=[3, 5, 7], sampling_params=params, return_logprob=True)
        return [each[0] for each in found["meta_info"]["output_token_logprobs"]]

    with start(other, "npu", **FLAGS) as engine:
        wanted = ask(engine)
    with start(model, "npu", **FLAGS) as engine:
        before = ask(engine)
        took, said = engine.update_weights_from_disk(str(other))
        assert took, said
        assert ask(engine) == wanted != before


def shape(**changed: object) -> PrologueShape:
    given = {"dim": 6144, "query_rank": 1536, "heads": 2, "rank": 512, "plain_dim": 128}
    given |= {"rope_dim": 64, "query_eps": 1e-6, "latent_eps": 1e-6}
    return PrologueShape(**given | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "dtype", "why"),
    [
        ({}, torch.float16, "activations are torch.float16"),
        ({"dim": 2048}, HALF, "the stream is 2048 wide"),
        ({"heads": 3}, HALF, "a rank has 3 heads"),
        ({"query_rank": 0}, HALF, r"have \(0, 128, 512, 64\) numbers"),
        ({"obstacle": "projections may have adapters"}, HALF, "projections may have adapters"),
    ],
)
def test_what_it_has_no_shape_for_is_said(changed, dtype, why) -> None:
    said = list[str]()
    given = (Operators(True), shape(**changed), dtype, torch.device("cpu"), said.append)
    assert open_prologue(*given) is None
    assert len(said) == 1 and re.search(why, said[0])


def test_weights_of_a_rounding_that_was_measured_are_said() -> None:
    """They go through several operators."""
    said = list[str]()
    prologue = Prologue(
        Operators(True, keeps_plain=True), shape(), torch.device("cpu"), said.append
    )
    numbers = torch.ones(1536, 64, dtype=torch.int8)
    measured = Rounding(numbers, *(torch.ones(1536) for _ in range(3))).raw
    prologue.take(SQUEEZE, StoredWeight("W8A8", (1536, 64), measured))
    for part, rows in ((QUERY, 384), (LATENT, 576), (KEYS, 2)):
        prologue.take(part, StoredWeight.from_tensor(torch.ones(rows, 64)))
    assert not prologue.is_ready()
    assert said == [
        "its weights are squeeze W8A8, query F32, latent F32, not all floats, all W8A8_DYNAMIC or "
        "query alone W8A8_DYNAMIC"
    ]


@pytest.fixture(scope="module")
def given(npu) -> dict[str, Any]:
    """What the operator takes, all of it on the device."""
    operators = Operators(is_checked=False)

    def on(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.device("npu"))

    x, weights, gammas, turns, places = inputs(WHOLLY)
    rows, units = operators.dynamic_quant(on(x))
    parts = (weights.squeeze, weights.query, weights.latent)
    squeeze, query, latent = (operators.cast_fractal(on(part)) for part in parts)
    scales = tuple(on(scale) for scale in weights.scales if scale is not None)
    found = {"token_x": rows, "weight_dq": squeeze, "weight_uq_qr": query}
    found |= {"weight_uk": on(weights.keys), "weight_dkv_kr": latent}
    found |= {"rmsnorm_gamma_cq": on(gammas[0]), "rmsnorm_gamma_ckv": on(gammas[1])}
    found |= {"rope_sin": on(turns[0]), "rope_cos": on(turns[1]), "cache_index": on(places)}
    latents, keys = empty_pages()
    found |= {"kv_cache": on(latents), "kr_cache": on(keys), "weight_quant_mode": WHOLLY}
    found |= {"dequant_scale_x": units.unsqueeze(1), "dequant_scale_w_dq": scales[0]}
    return found | {"dequant_scale_w_uq_qr": scales[1], "dequant_scale_w_dkv_kr": scales[2]}


CHANGES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "plain": ("weight_dq", lambda x: torch.cat([x, x])[len(x) :], "weight_dq must be in the frac"),
    "far places": ("cache_index", lambda x: x + 300, "places must be 0 to 383"),
    "no places": ("cache_index", lambda x: None, "cache_index must be given"),
    "scaled": ("kc_scale", lambda x: 2.0, "kc_scale are not served"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_refused_beyond_the_contract(npu, given: dict[str, Any], change: str) -> None:
    key, changed, why = CHANGES[change]
    with pytest.raises(ContractError, match=why):
        torch.ops.npu.npu_mla_prolog_v3(**given | {key: changed(given.get(key))})
