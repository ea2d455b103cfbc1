"""Which kernels a CUDA device is given; needs none, and no Triton."""

from dataclasses import replace

import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.engine.model_loader import check_the_rounding
from banyan.model_config.model_config import ExpertFacts
from banyan.ops import bind
from banyan.ops.cuda import fp8, needs
from banyan.ops.stored import E4M3, E4M3_DYNAMIC
from banyan.platform.cpu import CpuPlatform
from tests.support.configs import MODEL_CONFIG
from tests.support.flags import config_of

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K"]
QUANTISED += [E4M3, E4M3_DYNAMIC]


def kernels_of(wishes: dict[str, str], exact: bool = False) -> bind.BoundOps:
    toolkit = bind.open_toolkit("cuda", 1, wishes)
    device = torch.device("cuda")
    ops = bind.bind("cuda", device, torch.bfloat16, frozenset(), 64, toolkit=toolkit, exact=exact)
    assert isinstance(ops, bind.BoundOps)
    return ops


def served(ops: bind.BoundOps) -> dict[str, str]:
    return {choice.label: choice.kernel for choice in ops.choices}


def test_quantised_weights_are_kept_and_floats_are_the_vendors(monkeypatch):
    monkeypatch.setattr(needs, "has_triton", lambda: True)
    ops = kernels_of({})
    assert sorted(ops.kept_types) == sorted(QUANTISED)
    assert sorted(ops.kept_floats) == ["E4M3", "E4M3_DYNAMIC", "NVFP4"]
    assert served(ops)["linear[BF16]"] == served(ops)["linear[IQ2_S]"] == bind.REFERENCE
    monkeypatch.setattr(needs, "has_triton", lambda: False)
    assert kernels_of({}).kept_types == kernels_of({}).kept_floats == []


def test_a_rounding_that_is_asked_for_takes_the_float_weights(monkeypatch):
    monkeypatch.setattr(needs, "has_triton", lambda: True)
    for wish in ("int8", "q8_0", "q4_0", "q4_1"):
        found = served(kernels_of({"quantization": wish}))
        assert {found[f"linear[{type}]"] for type in ("F32", "F16", "BF16")} == {"products:linear"}


@pytest.mark.parametrize(
    ("capability", "exact", "kernel"),
    [
        ((9, 0), False, "fp8:rounding_linear"),
        ((8, 9), False, "fp8:rounding_linear"),
        ((8, 6), False, "fp8:linear"),
        ((9, 0), True, "fp8:linear"),
    ],
)
def test_activations_are_rounded_to_8_bit_floats_where_asked_for_and_possible(
    capability, exact, kernel, monkeypatch
):
    monkeypatch.setattr(needs, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    ops = kernels_of({}, exact)
    assert served(ops)[f"linear[{E4M3}]"] == "fp8:linear"
    assert served(ops)[f"linear[{E4M3_DYNAMIC}]"] == kernel
    assert ops.rounded_types == ([E4M3_DYNAMIC] if kernel == "fp8:rounding_linear" else [])
    found = served(kernels_of({"quantization": "fp8"}, exact))
    assert {found[f"linear[{type}]"] for type in ("F32", "F16", "BF16")} == {kernel}


@pytest.mark.parametrize("name", needs.FP8_BACKENDS)
def test_the_named_backend_multiplies_8_bit_floats(name, monkeypatch):
    monkeypatch.setattr(needs, "has_triton", lambda: True)
    asked = config_of("--fp8-gemm-backend", name).device.fp8_backend.removeprefix("auto")
    toolkit = bind.open_toolkit("cuda", 1, {"fp8-gemm-backend": asked} if asked else {})
    numbers = torch.zeros(128, 64, dtype=torch.float8_e4m3fn, device="meta")
    scales = torch.ones(1, 128, device="meta")
    weight = fp8.PackedFloats(128, 64, 64, 1, numbers, scales)
    assert isinstance(toolkit, needs.CudaToolkit)
    used = list[str]()
    monkeypatch.setattr(fp8, "_is_on_cuda", lambda weight: True)
    monkeypatch.setattr(fp8, "round_rows", lambda x, *more: (x, x))
    monkeypatch.setattr(fp8, "product", lambda *args: used.append(needs.TRITON))
    monkeypatch.setattr(fp8, "vendor_product", lambda x, *args: used.append(needs.VENDOR) or x)
    linear = fp8.FloatLinear(weight, torch.bfloat16, True, toolkit.fp8_backend)
    for rows in (1, 33, 500):
        linear(torch.empty(rows, 64, device="meta", dtype=torch.bfloat16))
    assert used == [name] * 3


def test_adapters_are_computed_by_triton_where_it_is(monkeypatch):
    for has_it, kernel in ((True, "triton_lora:adapt"), (False, bind.REFERENCE)):
        monkeypatch.setattr(needs, "has_triton", lambda has_it=has_it: has_it)
        found = served(kernels_of({}))
        assert found["adapt"] == kernel and found["adapt_rows"] == bind.REFERENCE


@pytest.mark.parametrize(
    "wishes",
    [{"quantization": "q5_0"}, {"cpu-isa": "avx2"}, {"fp8-gemm-backend": "aiter"}],
    ids=lambda w: next(iter(w)),
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
    elsewhere = replace(here, name="npu", is_host=False)
    experts = replace(MODEL_CONFIG, experts=ExpertFacts(count=4, per_token=2, inner=32))
    with pytest.raises(ConfigError, match="--quantization q4_0: experts are not rounded on npu"):
        check_the_rounding("q4_0", experts, elsewhere)
    check_the_rounding("q4_0", experts, here)
    check_the_rounding("fp8", experts, replace(elsewhere, rounds_experts=True))
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
