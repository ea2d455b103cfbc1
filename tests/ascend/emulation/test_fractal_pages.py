"""Pages of latents in the fractal form, on the emulated NPU: they hold the same, and are read and
written by who knows them alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from banyan.ascend.ops import latent_attention
from banyan.ascend.ops.contracts import ContractError
from banyan.ascend.ops.operators import AttentionOperators, Operators
from banyan.ascend.ops.toolkit import NpuToolkit
from banyan.ascend.selfcheck.cases import as_fractal
from banyan.ops.bind import bind
from tests.ascend.emulation.test_prologue import MLAPO, WIDE, answers
from tests.models.families import tiny
from tests.support.emulated import IS_WHOLE, LATENT, start

FRACTAL = "SGLANG_USE_FIA_NZ"
HALF = torch.bfloat16


def outputs_of(found: list[dict]) -> list[tuple]:
    return [(f["output_ids"], f["meta_info"]["output_token_logprobs"]) for f in found]


@pytest.fixture
def read(monkeypatch) -> set[tuple[int, ...]]:
    """Shapes of a page of latents as attention reads it."""
    found, attend = set[tuple[int, ...]](), AttentionOperators.attend_latents

    def watched(operators: AttentionOperators, q, turned, latents, *given) -> Tensor:
        found.add(tuple(latents.shape[1:]))
        return attend(operators, q, turned, latents, *given)

    monkeypatch.setattr(AttentionOperators, "attend_latents", watched)
    return found


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("deepseek v2", LATENT | {"max_position_embeddings": 256}),
        pytest.param(
            *("deepseek v3", WIDE | {"weights": 0.02}),
            marks=pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all"),
        ),
    ],
    ids=["several operators", "one operator"],
)
def test_fractal_pages_hold_the_same(npu, tmp_path, monkeypatch, read, variant, sizes) -> None:
    """Those that several operators write, and the one before attention: eagerly and in graphs."""
    tiny(variant, tmp_path, **sizes)
    monkeypatch.setenv(MLAPO, "1")
    plain = answers(tmp_path)
    assert read == {(128, 512)}
    read.clear()
    monkeypatch.setenv(FRACTAL, "1")
    monkeypatch.delattr("banyan.ascend.ops.operators.Operators.scatter")
    assert outputs_of(answers(tmp_path)) == outputs_of(plain)
    assert read == {(1, 32, 128, 16)}


@pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all")
def test_they_come_back_from_memory_of_the_host(npu, tmp_path, monkeypatch) -> None:
    tiny("deepseek v2", tmp_path, **LATENT, max_position_embeddings=1024)
    monkeypatch.setenv(MLAPO, "1")
    monkeypatch.setenv(FRACTAL, "1")
    prompt = [i * 7 % 90 + 5 for i in range(513)]
    others = [[i * (11 + n) % 90 + 5 for i in range(600)] for n in range(3)]
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    flags = {"enable_hierarchical_cache": True, "max_total_tokens": 1024, "dtype": "bfloat16"}
    with start(tmp_path, "npu", **flags) as engine:

        def ask(ids: list[int]) -> dict:
            return engine.generate(input_ids=ids, sampling_params=params, return_logprob=True)

        first = ask(prompt)
        for other in others:
            ask(other)
        again = ask(prompt)
    assert again["meta_info"]["cached_tokens_details"]["host"] > 0
    assert outputs_of([again]) == outputs_of([first])


@pytest.fixture(scope="module")
def scene(npu) -> dict[str, Any]:
    """Three rows of one token each, and what their pages hold."""
    generator = torch.Generator().manual_seed(5)
    on = torch.device("npu")
    drawn = {"q": (3, 4, 512), "turned": (3, 4, 64), "latents": (6, 128, 512), "keys": (6, 128, 64)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in drawn.items()}
    rows = {"starts": torch.tensor([0, 1, 2, 3]), "contexts": torch.tensor([129, 256, 4])}
    tables = torch.tensor([[5, 1, 0], [4, 2, 3], [1, 0, 0]], dtype=torch.int32)
    return {k: v.to(HALF).to(on) for k, v in found.items()} | rows | {"tables": tables.to(on)}


def fractal(pages: Tensor) -> Tensor:
    return as_fractal(pages.cpu()).view(pages.shape).to(pages.device)


def test_a_draft_layer_reads_them_too(scene: dict[str, Any]) -> None:
    """By torch's operators, from the position on that holds something."""
    rows = (scene["tables"], scene["starts"], scene["contexts"], 0.1)
    made = [
        kernel.function(NpuToolkit(Operators(True), fractal_pages=True))
        for kernel in (latent_attention.latent_attention, latent_attention.attend_fractal)
    ]
    pages = (scene["latents"], scene["keys"])
    queries = (scene["q"], scene["turned"])
    plain = made[0](*queries, *pages, *rows, first=1)
    mine = made[1](*queries, *map(fractal, pages), *rows, first=1)
    assert torch.equal(plain.cpu(), mine.cpu())
    assert not torch.equal(made[1](*queries, *map(fractal, pages), *rows).cpu(), plain.cpu())


def test_nobody_takes_them_for_plain_ones(npu) -> None:
    """Servers and stores compare the names of kernels."""
    names = list[dict[str, str]]()
    for is_fractal, size in ((True, 128), (True, 16), (False, 128)):
        toolkit = NpuToolkit(Operators(True), fractal_pages=is_fractal)
        given = ("npu", torch.device("npu"), HALF, frozenset[str](), 64)
        ops = bind(*given, toolkit=toolkit, page_size=size)
        found = {c.label: c.kernel for c in ops.choices}  # type: ignore[attr-defined]
        names.append({op: found[op] for op in ("write_latent", "latent_attention")})
    assert names[0] == {
        "write_latent": "latent_attention:write_fractal",
        "latent_attention": "latent_attention:attend_fractal",
    }
    assert names[1] == names[2] and not set(names[1].values()) & set(names[0].values())


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("slot_mapping", lambda x: x + 254, "places must be 0 to 255, they are 254 to 256"),
        ("cache_mode", lambda x: "Norm", "cache_mode Norm is not served"),
        ("seq_lens", lambda x: torch.ones(3), "seq_lens are not served"),
    ],
)
def test_writing_that_is_refused_beyond_the_contract(
    npu, on, name: str, change: Callable, why: str
) -> None:
    given: dict[str, Any] = {
        "key": on(torch.ones(3, 1, 512, dtype=HALF)),
        "value": on(torch.ones(3, 1, 64, dtype=HALF)),
        "key_cache": on(torch.zeros(2, 32, 128, 16, dtype=HALF)),
        "value_cache": on(torch.zeros(2, 4, 128, 16, dtype=HALF)),
        "slot_mapping": on(torch.arange(3)),
    }
    with pytest.raises(ContractError, match=why):
        torch.ops.npu.npu_scatter_pa_kv_cache(**given | {name: change(given.get(name))})
