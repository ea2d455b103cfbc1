"""Which kernels a CUDA device is given; needs none, and no Triton."""

from dataclasses import replace

import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.engine.model_loader import check_the_rounding
from banyan.model_config.model_config import ExpertFacts
from banyan.ops import bind
from banyan.ops.cuda import needs
from banyan.platform.cpu import CpuPlatform
from tests.support.configs import MODEL_CONFIG

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K"]


def kernels_of(wishes: dict[str, str]) -> bind.BoundOps:
    toolkit = bind.open_toolkit("cuda", 1, wishes)
    device = torch.device("cuda")
    ops = bind.bind("cuda", device, torch.bfloat16, frozenset(), 64, toolkit=toolkit)
    assert isinstance(ops, bind.BoundOps)
    return ops


def served(ops: bind.BoundOps) -> dict[str, str]:
    return {choice.label: choice.kernel for choice in ops.choices}


def test_quantised_weights_are_kept_and_floats_are_the_vendors(monkeypatch):
    monkeypatch.setattr(needs, "has_triton", lambda: True)
    ops = kernels_of({})
    assert sorted(ops.kept_types) == sorted(QUANTISED)
    assert served(ops)["linear[BF16]"] == served(ops)["linear[IQ2_S]"] == bind.REFERENCE
    monkeypatch.setattr(needs, "has_triton", lambda: False)
    assert kernels_of({}).kept_types == []


def test_a_rounding_that_is_asked_for_takes_the_float_weights(monkeypatch):
    monkeypatch.setattr(needs, "has_triton", lambda: True)
    for wish in ("int8", "q8_0", "q4_0", "q4_1"):
        found = served(kernels_of({"quantization": wish}))
        assert {found[f"linear[{type}]"] for type in ("F32", "F16", "BF16")} == {"products:linear"}


def test_adapters_are_computed_by_triton_where_it_is(monkeypatch):
    for has_it, kernel in ((True, "triton_lora:adapt"), (False, bind.REFERENCE)):
        monkeypatch.setattr(needs, "has_triton", lambda has_it=has_it: has_it)
        found = served(kernels_of({}))
        assert found["adapt"] == kernel and found["adapt_rows"] == bind.REFERENCE


@pytest.mark.parametrize(
    "wishes", [{"quantization": "q5_0"}, {"cpu-isa": "avx2"}], ids=lambda w: next(iter(w))
)
def test_wishes_that_do_not_exist_are_refused(wishes):
    with pytest.raises(ConfigError, match="does not exist on cuda"):
        bind.open_toolkit("cuda", 1, wishes)


def test_a_rounding_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(needs, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="needs the package triton"):
        bind.open_toolkit("cuda", 1, {"quantization": "q4_0"})


def test_experts_that_would_not_be_rounded_are_refused():
    here = CpuPlatform().traits
    elsewhere = replace(here, name="cuda", is_host=False)
    experts = replace(MODEL_CONFIG, experts=ExpertFacts(count=4, per_token=2, inner=32))
    with pytest.raises(ConfigError, match="--quantization q4_0: experts are rounded on CPUs only"):
        check_the_rounding("q4_0", experts, elsewhere)
    check_the_rounding("q4_0", experts, here)
    check_the_rounding("q4_0", replace(MODEL_CONFIG, experts=None), elsewhere)
    check_the_rounding("", experts, elsewhere)


@pytest.mark.parametrize(("head_dim", "kernel"), [(80, "triton_attention"), (6, "torch_attention")])
def test_bytes_are_attended_where_their_scales_are_aligned(monkeypatch, head_dim, kernel):
    monkeypatch.setattr(needs, "has_triton", lambda: True)
    sizes = {"head_dim": head_dim, "cache_dtype": torch.int8, "page_size": 64}
    device = torch.device("cuda")
    found = bind.bind("cuda", device, torch.bfloat16, frozenset(), **sizes)
    assert isinstance(found, bind.BoundOps)
    assert served(found)["paged_attention"] == f"{kernel}:paged_attention"
