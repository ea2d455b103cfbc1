"""What the operators of sparse latent attention refuse."""

import pytest
import torch

from banyan.ops.npu.contracts import ContractError
from banyan.ops.npu.operators import Operators
from tests.emulation.test_contracts import PAGES, random

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
    return operators.choose_positions(
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
    return operators.attend_chosen(
        **{k: on(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    )


def test_what_is_right_is_taken(operators, on):
    assert choose(on, operators).shape == (6, 1, TOP)
    assert attend(on, operators).shape == (6, 16, 512)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"query": random(6, 8, 64)}, r"query must be \[tokens, heads up to 64, 128\]"),
        ({"query": random(6, 65, 128), "weights": random(6, 65)}, "heads up to 64"),
        ({"weights": random(6, 7)}, r"weights must be \[6, 8\]"),
        ({"weights": random(6, 8).half()}, "must have one dtype"),
        ({"key": random(PAGES, 64, 1, 128)}, r"pages must be \[pages, 16 or 128, 1, 128\]"),
        ({"table": torch.ones(3, 4, dtype=torch.int64)}, "int32"),
        ({"lengths": numbers(130, 257)}, r"must be \[3\] as block_table has rows"),
        ({"ends": numbers(1, 3, 5)}, "sums, rising to 6"),
        ({"table": torch.full((3, 4), PAGES, dtype=torch.int32)}, "the pages of row 0"),
        ({"top": 2049}, "sparse_count must be 1 to 2048 or 3072, 4096 … 8192, it is 2049"),
    ],
)
def test_the_indexer(operators, on, changed, why):
    with pytest.raises(ContractError, match=why):
        choose(on, operators, **changed)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"query": random(6, 12, 512)}, "a power of two up to 128"),
        ({"query": random(6, 16, 256)}, "a power of two up to 128, 512"),
        ({"query_rope": random(6, 16, 32)}, r"query_rope must be \[6, 16, 64\]"),
        ({"key_rope": random(PAGES, 128, 1, 32)}, r"pages must be \[pages, 16 or 128, 1, 64\]"),
        ({"latents": random(PAGES, 128, 1, 512).half()}, "must have one dtype"),
        ({"chosen": torch.zeros(6, TOP, dtype=torch.int32)}, r"must be \[6, 1, positions\]"),
        ({"chosen": torch.zeros(6, 1, TOP, dtype=torch.int64)}, "int32"),
        ({"chosen": torch.full((6, 1, TOP), 200, dtype=torch.int32)}, "must be 0 to 129"),
        ({"chosen": numbers(-1, 3).repeat(6, 1, 8)}, "valid sparse_indices come first"),
    ],
)
def test_attention_over_chosen_positions(operators, on, changed, why):
    with pytest.raises(ContractError, match=why):
        attend(on, operators, **changed)
