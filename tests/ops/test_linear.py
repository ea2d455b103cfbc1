"""Dense projections: a row's result does not depend on the rows around it."""

import pytest
import torch

from banyan.ops.bind import bind
from banyan.ops.stored import StoredWeight

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 17, 33])
def test_a_few_rows_give_what_they_give_among_many(rows):
    ops = bind("cpu", CPU, torch.float32, frozenset(), 16)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(80, 320, generator=generator)
    x, bias = torch.randn(64, 320, generator=generator), torch.randn(80, generator=generator)
    packed = ops.pack_linear(StoredWeight.from_tensor(weight))

    few, many = packed(x[:rows], bias), packed(x, bias)

    assert few.shape == (rows, 80)
    assert torch.equal(few, many[:rows])
    exact = (x.double() @ weight.double().T + bias).float()
    torch.testing.assert_close(many, exact, atol=1e-4, rtol=0)
