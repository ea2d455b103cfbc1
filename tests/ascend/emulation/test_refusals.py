"""Every check of the operators' contracts fires: calls that the operators take, changed in one way
each, and the sentence that says why not. No device is needed, since contracts read no numbers; the
emulated one refuses the same by itself."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import banyan.ascend.ops
from banyan.ascend.ops.contracts import ContractError
from banyan.ascend.ops.operators import _NEWER_NAMES as NEWER_NAMES
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.toolkit import NpuToolkit, declines_pages
from banyan.ops.bind import NO_TOOLKIT, OpSpec
from tests.ascend.emulation.refused.attention import ATTENTION
from tests.ascend.emulation.refused.calls import CALLS, HALF, Echo, Given, attention
from tests.ascend.emulation.refused.products import PRODUCTS
from tests.support.cases import check_each

REFUSALS = [*ATTENTION, *PRODUCTS]
FOLDER = Path(banyan.ascend.ops.__file__).parent
SOURCES = sorted(FOLDER.glob("*contracts.py"))
TENSORS = {
    name: [key for key, value in call.given.items() if isinstance(value, Tensor)]
    for name, call in CALLS.items()
}
Place = tuple[str, int]
"""A file's name and a line of it."""


def said(name: str, **changed: object) -> ContractError | None:
    call = CALLS[name]
    try:
        call.run(Operators(is_checked=True, namespace=Echo()), call.given | changed)
    except ContractError as error:
        return error
    return None


def places(error: ContractError) -> set[Place]:
    """The lines of contracts by which it was raised."""
    found, at = set[Place](), error.__traceback__
    while at is not None:
        path = Path(at.tb_frame.f_code.co_filename)
        if path in SOURCES:
            found.add((path.name, at.tb_lineno))
        at = at.tb_next
    return found


def test_what_is_right_is_taken() -> None:
    def check(name: str) -> None:
        assert said(name) is None

    check_each(CALLS, check, str)


def test_a_call_that_is_wrong_is_refused() -> None:
    def check(case: tuple) -> None:
        name, changed, why = case
        error = said(name, **changed)
        assert error is not None
        assert re.search(why, str(error)), error

    check_each(REFUSALS, check)


def strided(x: Tensor) -> Tensor:
    """The same of memory that is not in one piece."""
    return torch.empty((*x.shape, 2), dtype=x.dtype, device=x.device)[..., 0]


WRONG = {
    "must lie on the NPU, it lies on cpu": lambda x: torch.empty_like(x, device="cpu"),
    "must be contiguous, not": strided,
    "must be torch.*, it is torch.complex64|have one dtype|have the dtype": lambda x: x.to(
        torch.complex64
    ),
}
"""What no tensor of any operator may be."""


def test_every_tensor_of_a_call_is_looked_at() -> None:
    def check(name: str) -> None:
        for key in TENSORS[name]:
            for why, change in WRONG.items():
                error = said(name, **{key: change(CALLS[name].given[key])})
                assert error is not None, (key, why)
                assert re.search(why, str(error)) and key in str(error), error

    check_each(CALLS, check, str)


def said_of_two_devices() -> ContractError | None:
    with FakeTensorMode():
        x, gamma = (torch.empty(4, device=f"cuda:{n}") for n in range(2))
    return said("rms_norm", x=x, gamma=gamma)


def test_tensors_of_several_devices_are_refused() -> None:
    assert "tensors lie on several devices" in str(said_of_two_devices())


SERVED = OpSpec(
    *("paged_attention", torch.device("meta"), HALF, frozenset[str](), 64),
    **{"cache_dtype": HALF, "page_size": 128, "toolkit": NpuToolkit(Operators(False, Echo()))},
)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"toolkit": NO_TOOLKIT}, "no driver of the NPU is open"),
        ({"dtype": torch.float32}, "activations are torch.float32"),
        ({"cache_dtype": torch.half}, "pages are torch.float16, activations torch.bfloat16"),
        ({"head_dim": 24}, "heads of 24 dimensions, not a multiple of 16 up to 512"),
        ({"head_dim": 528}, "heads of 528 dimensions, not a multiple of 16 up to 512"),
        ({"page_size": 64}, "pages of 64 tokens, not a multiple of 128 to 512"),
        ({"page_size": 640}, "pages of 640 tokens, not a multiple of 128 to 512"),
    ],
)
def test_kernels_say_beforehand_what_their_operators_do_not_take(changed: Given, why) -> None:
    assert declines_pages(replace(SERVED, **changed)) == why


ELSEWHERE = ("dispatch", "combine", "fused_deep_moe", "fused_deep_moe, the second", "collective")
"""Calls of several ranks: test_exchange.py, test_fused.py, test_ranks.py."""
LARGEST = 1 << 26


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ELSEWHERE])
def test_the_device_refuses_the_same_unasked(npu, name: str) -> None:
    """But for what its memory has no place for."""
    torch.get_device_module("npu").config.allow_internal_format = True

    def there(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        assert value.nbytes <= LARGEST
        return torch.zeros(value.shape, dtype=value.dtype).to("npu")

    operators, call, count = Operators(is_checked=False), CALLS[name], 0
    run = attend if call.run is attention else call.run
    for changed, why in ((changed, why) for of, changed, why in REFUSALS if of == name):
        given = call.given | changed
        if any(isinstance(x, Tensor) and x.nbytes > LARGEST for x in given.values()):
            continue
        with pytest.raises(ContractError, match=f"{why}|not served here"):
            run(operators, {key: there(value) for key, value in given.items()})
        count += 1
    assert count or name not in {of for of, _, _ in REFUSALS}


def attend(_: Operators, given: Given) -> None:
    if "learnable_sink" not in given:
        torch.ops.npu.npu_fused_infer_attention_score(**given)
        return
    newer = {NEWER_NAMES.get(key, key): value for key, value in given.items()}
    torch.ops.npu.npu_fused_infer_attention_score_v2(**newer)


@cache
def checks() -> dict[Place, int]:
    """Where contracts call what can refuse, to the last line of the call."""
    trees = {path.name: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    refusing = {"require"}
    while True:
        found = {
            node.name
            for tree in trees.values()
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and set(_called(node)) & refusing
        }
        if found <= refusing:
            break
        refusing |= found
    return {
        (name, call.lineno): call.end_lineno or call.lineno
        for name, tree in trees.items()
        for called, call in _calls(tree)
        if called in refusing
    }


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node


def _called(tree: ast.AST) -> list[str]:
    return [name for name, _ in _calls(tree)]


def test_no_check_is_without_a_call_that_it_refuses() -> None:
    errors = [said_of_two_devices()]
    tries: list[tuple[str, dict[str, Any]]] = [(name, changed) for name, changed, _ in REFUSALS]
    for name, keys in TENSORS.items():
        given = CALLS[name].given
        tries += [(name, {key: make(given[key])}) for key in keys for make in WRONG.values()]
    errors += [said(name, **changed) for name, changed in tries]
    fired = {place for error in errors if error is not None for place in places(error)}
    quiet = [
        f"{name}:{line}"
        for (name, line), last in checks().items()
        if not any(file == name and line <= at <= last for file, at in fired)
    ]
    assert not quiet, f"nothing is refused by {', '.join(sorted(quiet))}"
    assert len(checks()) > 150
