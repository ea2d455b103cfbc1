"""Adapters side by side in one pair of matrices: each token gets what its own adds, and nothing of
the others'."""

import pytest
import torch

from banyan.base.errors import ConfigError
from banyan.ops import reference
from banyan.ops.lora import AdapterPart, AdapterStack, AdapterTable, AdapterTokens

INPUTS, OUTPUTS, RANK, CAPACITY = 24, (16, 8, 8), 5, 3
CPU = torch.device("cpu")


def tables(dtype: torch.dtype = torch.float32) -> list[AdapterTable]:
    """One that is stacked, and a plain one."""
    stack = AdapterStack(INPUTS, OUTPUTS, RANK, CAPACITY, dtype, CPU)
    width = RANK * len(OUTPUTS)
    return [AdapterTable(INPUTS, width, CAPACITY, stack=given) for given in (stack, None)]


def part(first: int, outputs: int, rank: int, scale: float) -> AdapterPart:
    draw = torch.Generator().manual_seed(first + rank)
    down = torch.randn(rank, INPUTS, generator=draw)
    return AdapterPart(first, down, torch.randn(outputs, rank, generator=draw), scale)


PARTS = {
    1: (part(0, 16, 5, 2.0),),
    2: (part(16, 8, 3, 0.5), part(0, 16, 2, 1.0)),
    3: (part(0, 16, 1, 3.0), part(16, 8, 4, 1.5), part(24, 8, 5, 0.25)),
}


def both(stacked: AdapterTable, plain: AdapterTable, numbers: list[int]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    x, start = torch.randn(len(numbers), INPUTS, generator=draw), torch.randn(len(numbers), 32)
    found = []
    for table in (stacked, plain):
        given = torch.tensor(numbers)
        tokens = AdapterTokens(9, torch.ones(9, CAPACITY, dtype=torch.bool))
        tokens.mark(given)
        tokens.fill(given.numpy())
        reference.adapt(out := start.clone(), x, table, tokens)
        found.append(out)
    assert torch.equal(found[0][given == 0], start[given == 0])
    return found


def test_each_token_gets_what_its_own_adapter_adds() -> None:
    stacked, plain = tables()
    numbers = [0, 3, 1, 2, 2, 0, 1, 3]
    for number, parts in PARTS.items():
        for table in (stacked, plain):
            table.enter(number, parts)
        mine, wanted = both(stacked, plain, numbers)
        assert torch.allclose(mine, wanted, atol=1e-4)
    assert both(stacked, plain, [])[0].shape == (0, 32), "a step of other replicas alone"
    for number, parts in ((2, ()), (1, PARTS[3]), (3, PARTS[2])):
        for table in (stacked, plain):
            table.enter(number, parts)  # whose parts are fewer than those that were there
        mine, wanted = both(stacked, plain, numbers)
        assert torch.allclose(mine, wanted, atol=1e-4)


def test_what_overflows_with_one_adapter_is_no_number_for_its_own_tokens_alone() -> None:
    stacked, _ = tables(torch.float16)
    stacked.enter(1, PARTS[1])
    stacked.enter(2, [AdapterPart(0, torch.full((1, INPUTS), 6e4), torch.ones(16, 1), 1.0)])
    x, out = torch.full((3, INPUTS), 4.0).half(), torch.zeros(3, 32).half()
    tokens = AdapterTokens(3, torch.ones(3, CAPACITY, dtype=torch.bool))
    tokens.mark(torch.tensor([2, 1, 0]))
    reference.adapt(out, x, stacked, tokens)
    assert not out[0].isfinite().all()
    assert out[1].isfinite().all() and out[1].any() and not out[2].any()


@pytest.mark.parametrize("scale", [1e5, -1e5])
def test_a_number_beyond_the_type_is_refused(scale: float) -> None:
    stacked, _ = tables(torch.float16)
    with pytest.raises(ConfigError, match="too large for float16"):
        stacked.enter(1, [part(0, 16, 2, scale)])
    tables(torch.bfloat16)[0].enter(1, [part(0, 16, 2, scale)])
