"""Choosing kernels: once, with reasons, and under force."""

import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.ops import reference
from banyan.ops.api import OP_NAMES, PACKED_OPS
from banyan.ops.bind import Kernel, OpSpec, bind, kernel_table, open_toolkit
from banyan.ops.cpu import torch_attention


def bound(platform="cpu", device="cpu", forced=None):
    return bind(platform, torch.device(device), torch.float32, frozenset(), 16, forced)


def test_every_op_is_bound_and_listed():
    ops = bound()

    table = kernel_table(ops.choices)
    assert all(callable(getattr(ops, name)) for name in OP_NAMES if name not in PACKED_OPS)
    assert all(name in table for name in (*OP_NAMES, "linear[Q4_1]"))


def test_the_first_kernel_that_supports_the_device_is_taken():
    assert bound().paged_attention is torch_attention.paged_attention.run


def test_a_forced_reference_is_bound():
    ops = bound(forced={"paged_attention": "reference"})

    assert ops.paged_attention is reference.paged_attention


@pytest.mark.parametrize("forced", [{"no_op": "reference"}, {"rms_norm": "nobody:home"}])
def test_a_forced_choice_that_does_not_exist_is_refused_with_the_choices(forced):
    with pytest.raises(ConfigError, match="reference|rms_norm"):
        bound(forced=forced)


def test_the_reason_of_a_kernel_that_declines_is_in_the_table():
    ops = bound(device="meta")

    assert ops.paged_attention is reference.paged_attention
    assert "tensors are on meta" in kernel_table(ops.choices)


def test_a_forced_kernel_that_declines_is_an_error_with_the_reason():
    with pytest.raises(ConfigError, match="tensors are on meta"):
        bound(device="meta", forced={"paged_attention": "torch_attention:paged_attention"})


def test_bound_ops_are_frozen():
    with pytest.raises(AttributeError, match="chosen once"):
        bound().rms_norm = reference.rms_norm


def test_a_spec_names_the_weight_type_of_linear():
    spec = OpSpec("linear", torch.device("cpu"), torch.float32, frozenset(), 16, "Q8_0")

    assert spec.label == "linear[Q8_0]"


@pytest.mark.parametrize("exact", [False, True])
def test_a_kernel_that_rounds_activations_serves_only_where_that_is_welcome(monkeypatch, exact):
    rounding = Kernel(lambda *_: None, lambda spec: None, rounds_activations=True)
    monkeypatch.setattr(torch_attention, "paged_attention", rounding)
    ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 16, exact=exact)

    assert (ops.paged_attention is rounding.run) == (not exact)
    assert ("exact ones were asked for" in kernel_table(ops.choices)) == exact


@pytest.mark.parametrize(("size", "is_compiled"), [(16, True), (1, False), (24, False)])
def test_pages_of_a_size_that_compiled_attention_cannot_read_go_to_another(size, is_compiled):
    toolkit = open_toolkit("cpu", 1, {})
    if toolkit.absence:
        pytest.skip("the compiled kernels cannot be built here")
    device = torch.device("cpu")
    ops = bind("cpu", device, torch.float32, frozenset(), 16, toolkit=toolkit, page_size=size)
    chosen = {choice.label: choice.kernel for choice in ops.choices}
    assert chosen["paged_attention"].startswith("paged_attention:") == is_compiled
    assert (f"pages of {size} tokens" in kernel_table(ops.choices)) != is_compiled
