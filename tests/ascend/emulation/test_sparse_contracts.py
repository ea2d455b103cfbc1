"""What the operators of sparse latent attention refuse for the numbers that they are given."""

import pytest
import torch

from banyan.ascend.ops.contracts import ContractError
from banyan.ascend.ops.operators import Operators
from tests.support.emulated_pages import PAGES, random

TOP = 16


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def operators(npu, request) -> Operators:
    return Operators(is_checked=request.param)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows(**changed) -> dict[str, object]:
    """Three rows of 1, 2 and 3 tokens."""
    given = {
        "table": torch.ones(3, 4, dtype=torch.int32),
        "ends": numbers(1, 3, 6),
        "lengths": numbers(130, 257, 25),
    }
    return given | changed


def choose(on, operators: Operators, **changed) -> torch.Tensor:
    given = {
        "query": random(6, 8, 128),
        "key": random(PAGES, 128, 1, 128),
        "weights": random(6, 8),
        "top": TOP,
    }
    given = given | rows() | changed
    return operators.attention.choose_positions(
        **{k: on(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    )


def attend(on, operators: Operators, **changed) -> torch.Tensor:
    chosen = torch.full((6, 1, TOP), -1, dtype=torch.int32)
    chosen[:, :, 0] = 3
    given = {
        "query": random(6, 16, 512),
        "query_rope": random(6, 16, 64),
        "latents": random(PAGES, 128, 1, 512),
        "key_rope": random(PAGES, 128, 1, 64),
        "chosen": chosen,
        "scale": 0.1,
    }
    given = given | rows() | changed
    return operators.attention.attend_chosen(
        **{k: on(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    )


def test_what_is_right_is_taken(operators, on):
    assert choose(on, operators).shape == (6, 1, TOP)
    assert attend(on, operators).shape == (6, 16, 512)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"ends": numbers(1, 3, 5)}, "sums, rising to 6"),
        ({"table": torch.full((3, 4), PAGES, dtype=torch.int32)}, "the pages of row 0"),
    ],
)
def test_the_indexer(operators, on, changed, why):
    with pytest.raises(ContractError, match=why):
        choose(on, operators, **changed)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"chosen": torch.full((6, 1, TOP), 200, dtype=torch.int32)}, "must be 0 to 129"),
        ({"chosen": numbers(-1, 3).repeat(6, 1, 8)}, "valid sparse_indices come first"),
    ],
)
def test_attention_over_chosen_positions(operators, on, changed, why):
    with pytest.raises(ContractError, match=why):
        attend(on, operators, **changed)
