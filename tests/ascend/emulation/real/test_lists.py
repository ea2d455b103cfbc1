"""Each call of an operator, held against the schemas of torch_npu's releases, without a device."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from banyan.ascend.ops import operators
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.product_contracts import A2, A3
from banyan.ascend.selfcheck import cases
from tests.ascend.emulation import operators as emulated
from tests.ascend.emulation.exchange_cases import exchange_cases
from tests.ascend.emulation.real import table
from tests.ascend.emulation.real.lists import ROOT, schemas, versions

DOCS = ROOT / "docs" / "ascend.md"


@pytest.fixture(scope="module", params=versions())
def declared(request) -> Any:
    """A namespace with the operators that are called, as one release declares them; they give
    back their first tensor as each result."""
    known = schemas(request.param)
    space = "npu_" + request.param.replace(".", "_")
    library = torch.library.Library(space, "DEF")
    for operator in {case.operator for case in (*cases(), *exchange_cases())}:
        for line in known[f"npu::{operator}"]:
            library.define(line.removeprefix("npu::"))
            name = line.partition("(")[0].removeprefix("npu::")
            count = len(torch._C.parse_schema(line).returns)
            library.impl(name, _echo(count), "CompositeExplicitAutograd")
    yield getattr(torch.ops, space)
    library._destroy()


def _echo(count: int) -> Any:
    def first(*args: torch.Tensor, **named: object) -> object:
        if not count:
            return None
        return args[0] if count == 1 else tuple(args[0].clone() for _ in range(count))

    return first


def test_there_are_the_lists_of_two_releases() -> None:
    assert len(versions()) >= 2
    assert all(len(schemas(version)) > 300 for version in versions())


def test_every_call_is_one_that_the_release_takes(declared: Any) -> None:
    operators = Operators(is_checked=False, namespace=declared)
    for limits in (A2, A3):
        for case in (*cases(), *exchange_cases(limits=limits)):
            assert case.run(operators, lambda tensor: tensor)


@pytest.mark.parametrize(
    ("named", "why"),
    [({"epsilons": 1e-6}, "epsilons"), ({"epsilon": "small"}, "epsilon")],
)
def test_a_call_that_the_release_does_not_take_is_found(declared: Any, named, why) -> None:
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=why):
        declared.npu_rms_norm(x, x[0], **named)


def test_every_operator_that_is_called_has_a_case() -> None:
    called = {
        node.attr
        for node in ast.walk(ast.parse(Path(operators.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "_npu"
    }
    assert called == {case.operator for case in (*cases(), *exchange_cases())}


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("operator", emulated.SCHEMAS)
def test_the_emulated_device_has_the_schemas_of_the_real_one(operator: str, version: str) -> None:
    mine = str(torch._C.parse_schema(f"npu::{operator}{emulated.SCHEMAS[operator]}"))
    assert mine in schemas(version)[f"npu::{operator}"]


def test_the_table_of_the_docs_is_what_is_known() -> None:
    assert table.table() in DOCS.read_text(encoding="utf-8")
