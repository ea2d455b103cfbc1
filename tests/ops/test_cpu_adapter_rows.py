"""The compiled op of adapters that change whole rows, against the plain one."""

import numpy as np
import pytest
import torch

from banyan.ops import reference
from banyan.ops.cpu.lora import adapt_rows as kernel
from banyan.ops.lora import (
    GAIN,
    LOOKED_UP,
    PRODUCT,
    SOME_LOOKED_UP,
    SOME_OUTPUTS,
    AdapterTokens,
    RowPart,
    RowTable,
)

INPUTS, OUTPUTS, IDS, RANK = 45, 5000, 30, 7


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SOME = torch.tensor([15, 20, 25, 4097])
PARTS = {
    "looked up": RowPart(LOOKED_UP, random(IDS, RANK, seed=1), random(RANK, OUTPUTS, seed=2)),
    "looked up whole": RowPart(LOOKED_UP, random(IDS, OUTPUTS, seed=3), first=4, replaces=True),
    "product": RowPart(PRODUCT, random(RANK, INPUTS, seed=4), random(RANK, OUTPUTS, seed=5)),
    "whole product": RowPart(PRODUCT, random(OUTPUTS, INPUTS, seed=6), replaces=True),
    "some looked up": RowPart(SOME_LOOKED_UP, random(4, OUTPUTS, seed=3), ids=SOME),
    "some outputs": RowPart(SOME_OUTPUTS, random(4, INPUTS, seed=6), ids=SOME),
    "gain": RowPart(GAIN, random(OUTPUTS, seed=7), shifts=random(OUTPUTS, seed=8)),
}


def run(op, part, adapters):
    table, tokens = RowTable(3), AdapterTokens(len(adapters))
    table.enter(2, part)
    tokens.fill(np.array(adapters))
    out = random(len(adapters), OUTPUTS, seed=9)
    is_looked_up = part.kind in (LOOKED_UP, SOME_LOOKED_UP)
    ids = torch.tensor([(5 * at) % 40 for at in range(len(adapters))])
    op(out, ids if is_looked_up else random(len(adapters), INPUTS), table, tokens)
    return out


@pytest.mark.parametrize("name", PARTS)
def test_the_compiled_op_equals_the_plain_one_and_company_changes_no_bit(name, library):
    adapters = [2, 0, 1, 2, 2, 0, 2, 2, 2]
    op = kernel.make(library)
    found = run(op, PARTS[name], adapters)
    expected = run(reference.adapt_rows, PARTS[name], adapters)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-4)
    before = random(len(adapters), OUTPUTS, seed=9)
    assert torch.equal(found[[1, 2, 5]], before[[1, 2, 5]])
    assert not torch.equal(found[3], before[3])
    alone = run(op, PARTS[name], [0, 0, 0, 2, 0, 0, 0, 0, 0])
    assert torch.equal(alone[3], found[3])


def test_recorded_work_takes_the_rows_of_the_size_that_it_was_recorded_for(library):
    op, table, tokens = kernel.make(library), RowTable(1), AdapterTokens(3)
    table.enter(1, PARTS["product"])
    x, out = random(3, INPUTS), torch.zeros(3, OUTPUTS)

    def work():
        op(out, x, table, tokens)
        return out

    recording = library.record(work, 8, 3)
    tokens.fill(np.array([0, 1]))
    recording.run(0, 0, 2)  # logits alone
    assert not out[0].any() and out[1].any()
    before = out.clone()
    recording.run(5, 1, 0)
    assert torch.equal(out, before)
