"""`banyan npu-selfcheck`: what it says of a device that is right, and of one that is not."""

import dataclasses

import pytest
import torch

from banyan.ascend.ops.operators import Operators
from banyan.ascend.selfcheck import cases
from banyan.ascend.selfcheck.cases import Case, try_out
from banyan.cli.main import main

TAKEN = next(cases())


def outcome(**changed: object):
    case: Case = dataclasses.replace(TAKEN, **changed)
    return try_out(case, Operators(is_checked=False, namespace=object()), lambda tensor: tensor)


def test_results_that_are_near_are_right() -> None:
    near = [result + 0.001 for result in TAKEN.wanted()]
    assert outcome(run=lambda ops, place: near).why == ""


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (lambda x: x + 1.0, "off by"),
        (lambda x: x[:, :3], r"[5, 3] instead of [5, 64]"),
        (lambda x: torch.full_like(x, float("nan")), "off by inf"),
    ],
)
def test_results_that_are_off_are_reported_with_the_difference(result, why) -> None:
    off = [result(wanted) for wanted in TAKEN.wanted()]
    assert why in outcome(run=lambda ops, place: off).why


def test_a_call_that_fails_is_reported_and_ends_nothing() -> None:
    found = outcome()
    assert "AttributeError" in found.why and "npu_rms_norm" in found.why


def test_no_device_is_reported(capsys, monkeypatch) -> None:
    monkeypatch.delenv("BANYAN_NPU", raising=False)
    assert main(["npu-selfcheck"]) == 2
    assert "torch_npu is not installed" in capsys.readouterr().err
    assert main(["npu-selfcheck", "now"]) == 2
