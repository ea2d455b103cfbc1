"""Ops on states in Triton against the reference; `triton_device.py` says where they run."""

from dataclasses import replace

import pytest
import torch

from banyan.ops import reference
from banyan.ops.cuda import triton_state
from banyan.ops.state_api import StateRows
from tests.ops.triton_device import ABSENCE, DEVICE, TOLERANCE, TYPES, close, random

if ABSENCE:
    pytest.skip(ABSENCE, allow_module_level=True)

PAGES = 9
MIXED = ((4, 3, 7), (2, 1, 0), (8, 0, 5), (1, 23, 0), (5, 1, 2))
"""(page, tokens, positions before) of rows that go on, that begin, and one without tokens."""
DECODE = ((4, 1, 7), (2, 1, 0), (6, 1, 1), (5, 1, 200))
PROMPT = ((3, 140, 0), (4, 70, 11), (7, 1, 3))
BATCHES = [MIXED, DECODE, PROMPT]


def rows_of(*rows):
    """The pages lie in the columns of a table."""
    table = torch.zeros(len(rows), 3, dtype=torch.int32)
    table[:, 0] = torch.tensor([page for page, _, _ in rows])
    starts = torch.tensor([0, *(count for _, count, _ in rows)]).cumsum(0).int()
    contexts = torch.tensor([context for _, _, context in rows]).int()
    return StateRows(table.to(DEVICE)[:, 0], starts.to(DEVICE), contexts.to(DEVICE))


def apart(*shape, dtype=torch.float32, seed=0, factor=1.0):
    """Numbers that are part of wider rows."""
    width = torch.Size(shape[1:]).numel()
    wide = random(shape[0], width + 5, dtype=dtype, seed=seed) * factor
    return wide[:, :width].unflatten(1, shape[1:])


def near(got, want, dtype):
    """A state is a long sum of products, and a device's exponentials are rounded."""
    most = max(TOLERANCE[dtype], 1e-4)
    torch.testing.assert_close(got.double(), want.double(), atol=most, rtol=most)


def assert_same(run, rows, shape, inputs, dtype):
    """Outputs and pages of a kernel equal the reference's in fp64 of the same numbers; pages of no
    row keep their bits. Pages of rows that begin anew hold no numbers."""
    kept = random(PAGES, *shape, seed=7)
    for page, _, context in rows:
        if not context:
            kept[page] = float("nan")
    mine, plain = kept.clone(), kept.double()
    got = run(triton_state, mine, inputs)
    want = run(reference, plain, [None if x is None else x.double() for x in inputs])
    near(got, want, dtype)
    used = [page for page, count, _ in rows if count]
    near(mine[used], plain[used], torch.float32)
    idle = [page for page in range(PAGES) if page not in used]
    assert torch.equal(mine[idle].view(torch.int32), kept[idle].view(torch.int32))


def call(module, name):
    op = getattr(module, name)
    return op if module is reference else op.run


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", BATCHES, ids=["mixed", "decode", "prompt"])
@pytest.mark.parametrize(
    ("channels", "taps", "has_bias", "has_silu"), [(21, 2, False, True), (130, 4, True, False)]
)
def test_a_convolution_equals_the_reference(rows, channels, taps, has_bias, has_silu, dtype):
    tokens = sum(count for _, count, _ in rows)
    bias = random(channels, seed=2) if has_bias else None
    inputs = [apart(tokens, channels, dtype=dtype), random(taps, channels, seed=1), bias]

    def run(module, kept, given):
        return call(module, "short_conv")(*given, has_silu, kept, rows_of(*rows))

    assert_same(run, rows, (taps - 1, channels), inputs, dtype)


def scan_inputs(heads, key_heads, key_dim, value_dim, tokens, dtype, by_key=False):
    """Keys and queries of about the length that layers give them."""
    size = key_dim**-0.5
    q, k = (apart(tokens, key_heads, key_dim, dtype=dtype, seed=s, factor=size) for s in (1, 2))
    v = apart(tokens, heads, value_dim, dtype=dtype, seed=3)
    kept = random(tokens, heads, *((key_dim,) if by_key else ()), seed=4).sigmoid()
    return [q, k, v, kept, apart(tokens, heads, seed=5)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("rows", BATCHES, ids=["mixed", "decode", "prompt"])
def test_a_scan_equals_the_reference(rows, has_delta, by_key, dtype):
    tokens = sum(count for _, count, _ in rows)
    shape = (6, 2, 5, 19) if tokens > 30 else (2, 1, 33, 8)
    inputs = scan_inputs(*shape, tokens, dtype, by_key)
    inputs.append(None if has_delta else random(shape[0], seed=6))

    def run(module, kept, given):
        return call(module, "scan")(*given, has_delta, kept, rows_of(*rows))

    assert_same(run, rows, (shape[0], *shape[2:]), inputs, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", BATCHES, ids=["mixed", "decode", "prompt"])
@pytest.mark.parametrize(("key_dim", "channels"), [(1, 1), (5, 19), (16, 150)])
def test_a_selective_scan_equals_the_reference(rows, key_dim, channels, dtype):
    tokens = sum(count for _, count, _ in rows)
    q, k = (apart(tokens, key_dim, dtype=dtype, seed=s) for s in (1, 2))
    v = apart(tokens, channels, dtype=dtype, seed=3)
    step, rate = apart(tokens, channels, seed=4).sigmoid(), random(key_dim, channels, seed=5).exp()
    inputs = [q, k, v, step, rate, random(channels, seed=6)]

    def run(module, kept, given):
        return call(module, "selective_scan")(*given, kept, rows_of(*rows))

    assert_same(run, rows, (key_dim, channels), inputs, dtype)


@pytest.mark.parametrize("has_delta", [False, True])
def test_where_a_row_is_cut_changes_no_bit(has_delta):
    inputs, kept = scan_inputs(4, 2, 12, 20, 40, torch.float32), random(PAGES, 4, 12, 20)
    cut, run, first = kept.clone(), triton_state.scan.run, 0
    whole = run(*inputs, None, has_delta, kept, rows_of((3, 40, 0)))

    parts = []
    for count in (1, 16, 7, 1, 15):
        part = [x[first : first + count] for x in inputs]
        parts.append(run(*part, None, has_delta, cut, rows_of((3, count, first))))
        first += count

    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(cut, kept)


def test_gates_of_decay_equal_the_reference_at_both_ends():
    x = torch.tensor([[-90.0, -30.0, -3.0, 0.0, 2.0, 19.0, 25.0, 300.0]]).repeat(3, 2).to(DEVICE)
    bias, rate = random(8, seed=1), random(8, seed=2).exp()

    for bounds in ((0.0, float("inf")), (0.01, 4.0)):
        got = triton_state.decay_gates.run(x[:, :8], bias, rate, *bounds)
        want = reference.decay_gates(x[:, :8].double(), bias.double(), rate.double(), *bounds)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=3e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("curve", ["", "silu", "sigmoid", "relu"])
@pytest.mark.parametrize("dim", [1, 23, 2100])
def test_a_gate_equals_the_reference(curve, dim, dtype):
    x, gate = apart(5, dim, dtype=dtype), apart(5, dim, dtype=dtype, seed=1)
    for factor in (gate, gate[:1].expand(5, dim)):
        got = triton_state.apply_gate.run(x, factor, curve)
        close(got, reference.apply_gate(x.double(), factor.double(), curve), dtype)


@pytest.mark.parametrize("kind", ["conv", "long conv", "scan", "delta", "selective"])
def test_states_after_each_draft_are_kept(kind):
    """Bit for bit what a row leaves that ends there, for rows that go on and that begin anew."""
    long = 30 if kind == "long conv" else 0
    counts, drafts, before = (7 + long, 1, 6), (3, 0, 2), (7, 2, 0)
    total = sum(counts)
    if "conv" in kind:
        inputs, shape = (apart(total, 21),), (3, 21)
    elif kind == "selective":
        q, k, v = (apart(total, n, seed=n) for n in (5, 5, 19))
        inputs, shape = (q, k, v, apart(total, 19, seed=4).sigmoid()), (5, 19)
    else:
        inputs, shape = scan_inputs(6, 2, 5, 19, total, torch.float32), (6, 5, 19)
    weight, bias = random(4, 21, seed=1), random(21, seed=2)
    rate, skip = random(5, 19, seed=5).exp(), random(19, seed=6)

    def run(kept, inputs, rows):
        if "conv" in kind:
            return triton_state.short_conv.run(*inputs, weight, bias, True, kept, rows)
        if kind == "selective":
            return triton_state.selective_scan.run(*inputs, rate, skip, kept, rows)
        return triton_state.scan.run(*inputs, None, kind == "delta", kept, rows)

    fresh = random(PAGES, *shape, seed=7)
    rows = rows_of(*zip((1, 2, 3), counts, before, strict=True))
    pages = torch.tensor([(4, 3), (7, 0), (7, 2)], dtype=torch.int32, device=DEVICE)
    kept, plain = fresh.clone(), fresh.clone()
    out = run(kept, inputs, replace(rows, rollback_checkpoints=pages))
    assert torch.equal(out, run(plain, inputs, rows)) and torch.equal(kept[:4], plain[:4])
    firsts = (0, counts[0], counts[0] + 1)
    for row, (first, page) in enumerate(zip(firsts, (4, 7, 7), strict=True)):
        for at in range(drafts[row]):
            count, alone = counts[row] - drafts[row] + at, fresh.clone()
            part = tuple(each[first : first + count] for each in inputs)
            run(alone, part, rows_of((row + 1, count, before[row])))
            assert torch.equal(kept[page + at], alone[row + 1]), (row, at)
