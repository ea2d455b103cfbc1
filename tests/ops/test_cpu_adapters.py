"""The compiled op of low-rank adapters against the plain one, in every instruction set."""

import numpy as np
import pytest
import torch

from banyan.ops import reference
from banyan.ops.bind import OpSpec
from banyan.ops.cpu.linear import RoundedLinear, pack_linear
from banyan.ops.cpu.lora import adapt as kernel
from banyan.ops.host_memory import HUGE_PAGE, Arena
from banyan.ops.lora import AdapterPart, AdapterTable, AdapterTokens
from banyan.ops.stored import StoredWeight

INPUTS, OUTPUTS = 77, 300


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def part(first, outputs, rank, seed, dtype=torch.float32, scale=0.5):
    down = random(rank, INPUTS, seed=seed).to(dtype)
    return AdapterPart(first, down, random(outputs, rank, seed=seed + 1).to(dtype), scale)


@pytest.fixture
def table():
    """Adapter 1 has two parts of different ranks, 2 one of bf16, 3 one of fp16, 4 nothing; 5 mixes
    two types."""
    made = AdapterTable(INPUTS, 300, 5)
    made.enter(1, [part(0, 130, 4, 10, scale=2.0), part(200, 33, 19, 12)])
    made.enter(2, [part(130, 70, 1, 14, torch.bfloat16)])
    made.enter(3, [part(0, 300, 256, 16, torch.float16)])
    made.enter(5, [part(0, 20, 3, 18, torch.float16), part(20, 7, 5, 20)])
    return made


@pytest.fixture
def adapt(library):
    return kernel.make(library)


def run(op, x, adapters, table):
    tokens, out = AdapterTokens(len(x)), random(len(x), OUTPUTS, seed=5)
    tokens.fill(np.array(adapters))
    op(out, x, table, tokens)
    return out


def test_the_compiled_op_equals_the_plain_one_for_tokens_of_many_adapters(adapt, table):
    adapters = [3, 0, 1, 1, 2, 4, 5, 0, 3, *[1] * 70]
    x = random(len(adapters), INPUTS + 5)[:, :INPUTS]
    found, expected = (run(op, x, adapters, table) for op in (adapt, reference.adapt))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-4)
    untouched = random(len(adapters), OUTPUTS, seed=5)
    for at in (1, 5, 7):
        assert torch.equal(found[at], untouched[at])
    assert not torch.equal(found[0], untouched[0])


def test_a_token_is_the_same_bits_whatever_is_next_to_it(adapt, table):
    adapters = [3, 1, 1, 2, 5, 3, *[1] * 40]
    x = random(len(adapters), INPUTS)
    together = run(adapt, x, adapters, table)
    for at in (0, 1, 2, 3, 4, 5, 45):
        tokens, out = AdapterTokens(1), random(len(x), OUTPUTS, seed=5)[at : at + 1].clone()
        tokens.fill(np.array(adapters[at : at + 1]))
        adapt(out, x[at : at + 1], table, tokens)
        assert torch.equal(out[0], together[at])


def test_recorded_work_takes_other_adapters_and_tokens_later(library, table):
    adapt, tokens = kernel.make(library), AdapterTokens(8)
    x, out = random(8, INPUTS), torch.zeros(8, OUTPUTS)

    def work():
        adapt(out, x, table, tokens)
        return out

    recording = library.record(work, 8, 3)
    for adapters, change in (([1, 2, 0, 3], ()), ([2, 2, 4], (4, [part(5, 9, 2, 30)]))):
        if change:
            table.enter(*change)
        out.zero_()
        tokens.fill(np.array(adapters))
        recording.run(len(adapters), 1, 0)
        expected = torch.zeros(8, OUTPUTS)
        reference.adapt(expected, x, table, tokens)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-4)
    before = out.clone()
    recording.run(0, 0, 1)  # logits of the step before: its tokens are not taken again
    assert torch.equal(out, before)


def test_matrices_lie_in_memory_once_where_the_compiled_op_alone_reads_them():
    given = [part(0, 130, 4, 10), part(200, 33, 19, 12)]
    whole = sum(matrix.nbytes for one in given for matrix in (one.down, one.up))
    for keeps_parts in (False, True):
        table = AdapterTable(given[0].down.shape[1], 32, 1, keeps_parts=keeps_parts)
        placed = table.place(given, Arena(HUGE_PAGE))
        table.enter(1, placed)
        assert placed.loose_bytes == (whole if keeps_parts else 0)
        assert table.parts[1] == (tuple(given) if keeps_parts else ())


def test_an_adapter_that_has_left_adds_nothing(adapt, table):
    table.enter(1, ())
    assert torch.equal(run(adapt, random(1, INPUTS), [1], table), random(1, OUTPUTS, seed=5))


def test_the_op_is_not_for_other_activations(library):
    spec = OpSpec("adapt", torch.device("cpu"), torch.bfloat16, frozenset(), 64, toolkit=library)
    assert "fp32" in str(kernel.declines(spec))


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, ""), (torch.bfloat16, ""), (torch.float32, "q8_0")],
)
def test_adapters_join_the_product_that_was_recorded_before_them(library, dtype, quantization):
    weight = StoredWeight.from_tensor(random(300, 64, seed=8).to(dtype))
    product, adapt = pack_linear(library, weight, quantization), kernel.make(library)
    table, tokens = AdapterTable(64, 40, 9, bool(quantization)), AdapterTokens(200)
    for number in range(1, 10):
        down, up = random(4 * number, 64, seed=number), random(300 - 7 * number, 4 * number)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        table.enter(number, [AdapterPart(7 * number, down.to(dtype), up.to(dtype), 0.3)])
    x = random(200, 64, seed=9)

    def work():
        out = product(x, random_bias)
        adapt(out, x, table, tokens)
        return out

    random_bias = random(300, seed=3)
    recording = library.record(work, 200, 3)
    for adapters in ([0] * 5, [1], list(range(10)), [2] * 7 + [0, 5, 5, 5, 5, 5], [3] * 200):
        tokens.fill(np.array(adapters))
        recording.run(len(adapters), 1, 0)
        found = recording.result[: len(adapters)].clone()
        expected = product(x[: len(adapters)], random_bias)
        adapt(expected, x[: len(adapters)], table, tokens)
        assert torch.equal(found, expected)
    names = [time.name for time in recording.times(4, 1, 0)]
    assert len(names) == (2 if isinstance(product, RoundedLinear) else 1) and names[-1].endswith(
        " + adapters"
    )


@pytest.mark.parametrize("odd", [False, True])
def test_matrices_next_to_rounded_weights_are_kept_in_as_few_bits_as_change_them_little(adapt, odd):
    down, up = random(6, INPUTS, seed=1) * 1e-9, random(OUTPUTS, 6, seed=2) * 1e-7
    down[2], up[:, 3] = 0.0, 0.0
    if odd:
        up[17] *= 300
    made = [AdapterTable(INPUTS, 6, 1, is_rounded=is_rounded) for is_rounded in (False, True)]
    for each in made:
        each.enter(1, [AdapterPart(0, down, up, 1e16)])
    x = random(3, INPUTS)
    exact, rounded = (run(adapt, x, [1, 1, 0], each) for each in made)
    assert not torch.equal(exact, rounded)
    assert [int(each.entries[1, 4]) for each in made] == [0, 2 if odd else 3]  # fp32, half, 8 bits
    change = (rounded - exact)[:2].norm() / (exact - run(adapt, x, [0] * 3, made[0]))[:2].norm()
    assert change < (1e-3 if odd else 0.02)


def test_a_token_is_the_same_bits_in_a_batch_where_matrices_are_in_8_bits(adapt):
    table = AdapterTable(INPUTS, 40, 3, is_rounded=True)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for number, dtype in enumerate(dtypes, 1):
        table.enter(number, [part(8 * number, 200, 11 * number, number, dtype)])
    assert {int(kind) for kind in table.entries[1:, 4]} == {3}
    x, adapters = random(9, INPUTS), [1, 2, 2, 2, 2, 2, 0, 3, 1]
    together = run(adapt, x, adapters, table)
    for at, number in enumerate(adapters):
        tokens, out = AdapterTokens(1), random(len(x), OUTPUTS, seed=5)[at : at + 1].clone()
        tokens.fill(np.array([number]))
        adapt(out, x[at : at + 1], table, tokens)
        assert torch.equal(out[0], together[at])
    expected = run(reference.adapt, x, adapters, table)
    plain = run(reference.adapt, x, [0] * 9, table)
    assert (together - expected).norm() < 0.02 * (expected - plain).norm()


@pytest.mark.parametrize("quantization", ["q8_0", ""])
def test_matrices_of_many_ranks_are_multiplied_as_the_base_is_with_the_same_bits(
    library, quantization
):
    """Beside the product, whose inputs they share if those are in 8 bits, or by themselves."""
    weight = StoredWeight.from_tensor(random(300, 77, seed=8).bfloat16())
    product = pack_linear(library, weight, quantization)
    table, tokens, adapt = AdapterTable(77, 64, 4, True), AdapterTokens(9), kernel.make(library)
    for number, rank in enumerate((16, 30, 61, 5), 1):
        table.enter(number, [part(8 * number, 200, rank, number, torch.bfloat16, 2.0)])
    assert table.entries[1:, 4].tolist() == [4, 4, 4, 3], "few ranks are no tile"
    x, adapters = random(9, 77, seed=9), [1, 2, 2, 0, 3, 3, 4, 1, 2]

    def work():
        out = product(x)
        adapt(out, x, table, tokens)
        return out

    recording = library.record(work, 9, 3)
    tokens.fill(np.array(adapters))
    recording.run(9, 1, 0)
    together, plain = recording.result.clone(), product(x)
    alone = plain.clone()
    adapt(alone, x, table, tokens)
    assert torch.equal(alone, together)
    expected = plain.clone()
    reference.adapt(expected, x, table, tokens)
    for at, number in enumerate(adapters):
        assert (together - expected)[at].norm() <= 0.03 * (expected - plain)[at].norm()
        one, some = AdapterTokens(1), plain[at : at + 1].clone()
        one.fill(np.array([number]))
        adapt(some, x[at : at + 1], table, one)
        assert torch.equal(some[0], together[at])


@pytest.mark.parametrize("rows", [3, 40])
def test_products_that_follow_each_other_are_the_same_bits_as_each_alone(library, rows):
    """One fetches what the next one reads."""
    first, second = (
        pack_linear(library, StoredWeight.from_tensor(random(77, 77, seed=seed)), "q8_0")
        for seed in (8, 9)
    )
    tables = [AdapterTable(77, 64, 2, True) for _ in range(2)]
    for seed, table in enumerate(tables):
        for number in (1, 2):
            down, up = random(15 + number, 77, seed=seed), random(77, 15 + number, seed=number)
            table.enter(number, [AdapterPart(0, down, up, 0.1)])
    x, tokens, adapt = random(rows, 77, seed=9), AdapterTokens(rows), kernel.make(library)
    tokens.fill(np.array([0, 1, 2, *[1] * (rows - 3)]))

    def work():
        middle = first(x)
        adapt(middle, x, tables[0], tokens)
        out = second(middle)
        adapt(out, middle, tables[1], tokens)
        return out

    recording = library.record(work, rows, 2)
    expected = work()
    recording.run(rows, 1, 0)
    assert torch.equal(recording.result, expected)
