"""Low-rank adapters in Triton against plain products in float64; `triton_device.py` tells where
they run."""

import pytest
import torch

from banyan.ops import reference
from banyan.ops.cuda import triton_lora as triton_adapters
from banyan.ops.lora import AdapterPart, AdapterStack, AdapterTable, AdapterTokens
from tests.ops.triton_device import ABSENCE, DEVICE, TYPES, close, random

if ABSENCE:
    pytest.skip(ABSENCE, allow_module_level=True)

WHERE = torch.device(DEVICE)
CAPACITY = 5


def table_of(inputs, outputs, rank, dtype, capacity=CAPACITY) -> AdapterTable:
    stack = AdapterStack(inputs, outputs, rank, capacity, dtype, WHERE)
    return AdapterTable(inputs, rank * len(outputs), capacity, stack=stack)


def parts_of(inputs, outputs, rank, number) -> list[AdapterPart]:
    """Of an adapter that leaves out one part, and has a rank of its own."""
    own, found = max(1, rank - number), []
    for at, size in enumerate(outputs):
        if len(outputs) > 1 and at == number % len(outputs):
            continue
        down = random(own, inputs, seed=10 * number + at).cpu() * inputs**-0.5
        up = random(size, own, seed=500 + 10 * number + at).cpu() * own**-0.5
        found.append(AdapterPart(sum(outputs[:at]), down, up, 0.25 * number))
    return found


def filled(table: AdapterTable, inputs, outputs, rank) -> dict[int, list[AdapterPart]]:
    found = {n: parts_of(inputs, outputs, rank, n) for n in range(1, CAPACITY)}  # one place is free
    for number, parts in found.items():
        table.enter(number, parts)
    return found


def marked(numbers: list[int], room: int = 0, capacity: int = CAPACITY) -> AdapterTokens:
    shape = room or len(numbers), capacity
    tokens = AdapterTokens(shape[0], torch.ones(shape, dtype=torch.bool, device=WHERE))
    tokens.mark(torch.tensor(numbers, device=WHERE))
    return tokens


def in_double(out, x, numbers, parts) -> torch.Tensor:
    out, x = out.double().cpu(), x.double().cpu()
    for at, number in enumerate(numbers):
        for part in parts.get(number, ()):
            inner = part.down.double() @ x[at] * part.scale
            out[at, part.first : part.first + len(part.up)] += part.up.double() @ inner
    return out


NUMBERS = [
    [3],
    [0],
    [0, 4, 1, 2, 2, 0, 1],
    [*[0] * 9, *[2] * 20, *[1, 3] * 4, 4, *[0] * 18],
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"),
    [(64, (48, 16, 16), 8), (1100, (40,), 16), (520, (130, 200), 5), (96, (300,), 72)],
)
@pytest.mark.parametrize("numbers", NUMBERS, ids=len)
def test_each_token_gets_what_its_own_adapter_adds(inputs, outputs, rank, numbers, dtype):
    table = table_of(inputs, outputs, rank, dtype)
    parts = filled(table, inputs, outputs, rank)
    x = random(len(numbers), 2 * inputs, dtype=dtype, seed=3)[:, inputs:]
    wide = random(len(numbers), sum(outputs) + 7, dtype=dtype, seed=4)
    before, out = wide.clone(), wide[:, : sum(outputs)]
    want = in_double(out, x, numbers, parts)

    triton_adapters.adapt.run(out, x, table, marked(numbers, room=len(numbers) + 3))

    close(out, want, dtype)
    none = torch.tensor(numbers) == 0
    assert torch.equal(wide.cpu()[none], before.cpu()[none])
    assert torch.equal(wide[:, sum(outputs) :], before[:, sum(outputs) :])


def test_a_token_has_the_same_bits_alone_and_in_a_batch():
    inputs, outputs = 1300, (72, 40)
    table, numbers = table_of(inputs, outputs, 8, TYPES[1]), NUMBERS[-1]
    filled(table, inputs, outputs, 8)
    x = random(len(numbers), inputs, dtype=TYPES[1], seed=3)
    start = random(len(numbers), sum(outputs), dtype=TYPES[1], seed=4)
    triton_adapters.adapt.run(together := start.clone(), x, table, marked(numbers))
    for at in (9, 30, 31, 37):
        alone = start[at : at + 1].clone()
        triton_adapters.adapt.run(alone, x[at : at + 1], table, marked(numbers[at : at + 1]))
        assert torch.equal(alone[0], together[at]) and not torch.equal(alone[0], start[at])


def test_what_has_left_adds_nothing_and_what_comes_is_found():
    table = table_of(64, (32, 16), 4, torch.float32)
    parts = filled(table, 64, (32, 16), 4)
    x, numbers = random(3, 64, seed=3), [1, 2, 3]
    for number, given in ((2, ()), (3, parts[1])):
        table.enter(number, given)
        parts[number] = given
    triton_adapters.adapt.run(out := torch.zeros(3, 48, device=WHERE), x, table, marked(numbers))
    close(out, in_double(torch.zeros(3, 48), x, numbers, parts), torch.float32)
    assert not out[1].any() and out[2].any()


def test_infinities_of_one_token_do_not_reach_another():
    table = table_of(64, (32,), 4, torch.float32)
    parts = filled(table, 64, (32,), 4)
    x, numbers = random(4, 64, seed=3), [1, 2, 1, 0]
    x[0] = float("inf")
    out = torch.zeros(4, 32, device=WHERE)
    triton_adapters.adapt.run(out, x, table, marked(numbers))
    assert not out[0].isfinite().any()
    close(out[1:], in_double(torch.zeros(3, 32), x[1:], numbers[1:], parts), torch.float32)


def test_a_step_without_tokens_and_one_of_every_place():
    table = table_of(32, (16,), 2, torch.float32, capacity=70)
    for number in (1, 33, 70):
        table.enter(number, parts_of(32, (16,), 2, number % CAPACITY))
    empty = torch.zeros(0, 16, device=WHERE)
    triton_adapters.adapt.run(empty, random(0, 32), table, marked([], 1, 70))
    x, numbers = random(3, 32), [70, 1, 33]
    mine, plain = torch.zeros(3, 16, device=WHERE), torch.zeros(3, 16, device=WHERE)
    triton_adapters.adapt.run(mine, x, table, marked(numbers, 0, 70))
    reference.adapt(plain, x, table, marked(numbers, 0, 70))
    close(mine, plain, torch.float32)
