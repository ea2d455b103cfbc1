"""The compiled ops on states against the plain ones, in every instruction set of this machine."""

import math
from dataclasses import replace

import pytest
import torch

from banyan.ops import reference as reference
from banyan.ops.cpu.state import States
from banyan.ops.state_api import StateRows

PAGES = 9


@pytest.fixture
def states(library):
    return States(library)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(x, room=5):
    """The same values as part of wider rows."""
    wide = torch.full((x.shape[0], x[0].numel() + room), math.nan)
    part = wide[:, : x[0].numel()]
    part.copy_(x.flatten(1))
    return part.unflatten(1, x.shape[1:]) if x.dim() == 3 else part


def rows_of(*rows):
    """(page, tokens, positions before) of each row; the pages lie in the columns of a table."""
    table = torch.zeros(len(rows), 3, dtype=torch.int32)
    table[:, 0] = torch.tensor([page for page, _, _ in rows])
    starts = torch.tensor([0, *(count for _, count, _ in rows)]).cumsum(0).int()
    return StateRows(table[:, 0], starts, torch.tensor([c for _, _, c in rows]).int())


def with_rollback_checkpoints(rows, *rollback_checkpoints):
    return replace(rows, rollback_checkpoints=torch.tensor(rollback_checkpoints, dtype=torch.int32))


MIXED = ((4, 3, 7), (2, 1, 0), (8, 0, 5), (1, 13, 0), (5, 1, 2))
"""Rows that go on, that begin, and one without tokens."""
TOKENS = sum(count for _, count, _ in MIXED)


def assert_same(run, run_plain, kept):
    """Outputs and pages of a kernel equal the reference's; unused pages keep their bits."""
    mine, plain = kept.clone(), kept.clone()
    for got, want in zip(run(mine), run_plain(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=2e-5, equal_nan=True)
    idle = [page for page in range(PAGES) if page not in (4, 2, 1, 5)]
    assert torch.equal(mine[idle].view(torch.int32), kept[idle].view(torch.int32))


def stale(*shape):
    """States, with no numbers where a row begins anew."""
    kept = random(PAGES, *shape, seed=7)
    kept[[1, 2]] = math.nan
    return kept


@pytest.mark.parametrize("channels", [1, 21, 64, 130])
@pytest.mark.parametrize(("taps", "has_bias", "has_silu"), [(2, False, True), (4, True, False)])
def test_a_convolution_equals_the_reference(states, channels, taps, has_bias, has_silu):
    x, weight = apart(random(TOKENS, channels)), random(taps, channels, seed=1)
    more = (random(channels, seed=2) if has_bias else None, has_silu)

    def run(of):
        return lambda kept: [of.short_conv(x, weight, *more, kept, rows_of(*MIXED))]

    assert_same(run(states), run(reference), stale(taps - 1, channels))


def scan_inputs(heads, key_heads, key_dim, value_dim, tokens=TOKENS, by_key=False):
    q, k = (apart(random(tokens, key_heads, key_dim, seed=s) * 0.4) for s in (1, 2))
    v = apart(random(tokens, heads, value_dim, seed=3))
    kept = random(tokens, heads, *((key_dim,) if by_key else ()), seed=4).sigmoid()
    strength = apart(random(tokens, heads, seed=5))
    return q, k, v, kept, strength


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (6, 2, 5, 19), (4, 4, 16, 32), (3, 1, 33, 8)])
def test_a_scan_equals_the_reference(states, shape, has_delta, by_key):
    inputs = scan_inputs(*shape, by_key=by_key)
    skip = None if has_delta else random(shape[0], seed=6)

    def run(of):
        return lambda kept: [of.scan(*inputs, skip, has_delta, kept, rows_of(*MIXED))]

    assert_same(run(states), run(reference), stale(shape[0], *shape[2:]))


@pytest.mark.parametrize(("key_dim", "channels"), [(1, 1), (5, 19), (16, 40)])
def test_a_selective_scan_equals_the_reference_wherever_it_is_cut(states, key_dim, channels):
    q, k = (apart(random(TOKENS, key_dim, seed=s)) for s in (1, 2))
    v, step = (apart(random(TOKENS, channels, seed=s)) for s in (3, 4))
    inputs = (q, k, v, step.exp(), random(key_dim, channels, seed=5).exp())
    skip = random(channels, seed=6)

    def run(of):
        return lambda kept: [of.selective_scan(*inputs, skip, kept, rows_of(*MIXED))]

    assert_same(run(states), run(reference), stale(key_dim, channels))
    kept, cut = (torch.zeros(PAGES, key_dim, channels) for _ in range(2))
    whole = states.selective_scan(*inputs, skip, kept, rows_of((3, TOKENS, 0)))
    parts, first = [], 0
    for count in (1, 9, TOKENS - 10):
        part = [x[first : first + count] for x in inputs[:4]]
        row = rows_of((3, count, first))
        parts.append(states.selective_scan(*part, inputs[4], skip, cut, row))
        first += count
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(cut, kept)


@pytest.mark.parametrize("kind", ["scan", "delta", "selective"])
def test_states_in_bf16_are_those_in_fp32_rounded_after_the_step(states, kind):
    """Bit for bit, in rows that go on, in rollback checkpoints, and in the reference too."""
    shape = (5, 19) if kind == "selective" else (6, 5, 19)
    rate, skip = random(5, 19, seed=5).exp(), random(19, seed=6)
    if kind == "selective":
        q, k = (apart(random(TOKENS, 5, seed=s)) for s in (1, 2))
        v, step = (apart(random(TOKENS, 19, seed=s)) for s in (3, 4))
        inputs = (q, k, v, step.exp())
    else:
        inputs = scan_inputs(6, 2, 5, 19)
    rows = with_rollback_checkpoints(rows_of(*MIXED), (7, 2), (0, 0), (0, 0), (0, 0), (0, 0))

    def run(of, kept):
        if kind == "selective":
            return of.selective_scan(*inputs, rate, skip, kept, rows)
        return of.scan(*inputs, None, kind == "delta", kept, rows)

    for of in (states, reference):
        half = random(PAGES, *shape, seed=7).bfloat16()
        whole = half.float()
        assert torch.equal(run(of, half), run(of, whole))
        assert torch.equal(half, whole.bfloat16())


@pytest.mark.parametrize("has_delta", [False, True])
def test_where_a_row_is_cut_changes_no_bit(states, has_delta):
    inputs, kept = scan_inputs(4, 2, 12, 20, tokens=40), torch.zeros(PAGES, 4, 12, 20)
    cut = kept.clone()
    whole = states.scan(*inputs, None, has_delta, kept, rows_of((3, 40, 0)))

    parts, first = [], 0
    for count in (1, 16, 7, 1, 15):
        part = [x[first : first + count] for x in inputs]
        parts.append(states.scan(*part, None, has_delta, cut, rows_of((3, count, first))))
        first += count

    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(cut, kept)


def test_gates_of_decay_equal_the_reference_at_both_ends(states):
    x = apart(torch.tensor([[-90.0, -3.0, 0.0, 2.0, 19.0, 25.0, 300.0]]).repeat(3, 1))
    bias, rate = random(7, seed=1), random(7, seed=2).exp()

    for bounds in ((0.0, math.inf), (0.01, 4.0)):
        got = states.decay_gates(x, bias, rate, *bounds)
        want = reference.decay_gates(x, bias, rate, *bounds)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("curve", ["", "silu", "sigmoid", "relu"])
@pytest.mark.parametrize("dim", [1, 23, 64])
def test_a_gate_equals_the_reference(states, curve, dim):
    x, gate = apart(random(5, dim)), apart(random(5, dim, seed=1), 3)

    torch.testing.assert_close(
        states.apply_gate(x, gate, curve), reference.apply_gate(x, gate, curve)
    )


CUT = 4
"""Tokens of a row before those that may not stand."""


@pytest.mark.parametrize("kind", ["conv", "scan", "delta", "selective"])
def test_a_trail_has_what_the_state_was_after_each_of_the_last_tokens(states, kind):
    """Bit for bit what a row leaves that ends there, for rows that go on and that begin anew."""
    counts, drafts, before = (CUT + 3, 1, CUT + 2), (3, 0, 2), (7, 2, 0)
    total = sum(counts)
    if kind == "conv":
        inputs, shape = (apart(random(total, 21)),), (3, 21)
    elif kind == "selective":
        q, k = (apart(random(total, 5, seed=s)) for s in (1, 2))
        v, step = (apart(random(total, 19, seed=s)) for s in (3, 4))
        inputs, shape = (q, k, v, step.exp()), (5, 19)
    else:
        inputs, shape = scan_inputs(6, 2, 5, 19, total), (6, 5, 19)
    weight, bias = random(4, 21, seed=1), random(21, seed=2)
    rate, skip = random(5, 19, seed=5).exp(), random(19, seed=6)

    def run(of, kept, inputs, rows):
        if kind == "conv":
            return of.short_conv(*inputs, weight, bias, True, kept, rows)
        if kind == "selective":
            return of.selective_scan(*inputs, rate, skip, kept, rows)
        return of.scan(*inputs, None, kind == "delta", kept, rows)

    fresh = random(PAGES, *shape, seed=7)
    rows = rows_of(*zip((1, 2, 3), counts, before, strict=True))
    trailed = with_rollback_checkpoints(rows, (4, 3), (7, 0), (7, 2))
    for of in (states, reference):
        kept, plain = fresh.clone(), fresh.clone()
        out = run(of, kept, inputs, trailed)
        assert torch.equal(out, run(of, plain, inputs, rows))
        assert torch.equal(kept[:4], plain[:4])
        for row, (first, page) in enumerate(
            zip((0, counts[0], counts[0] + 1), (4, 7, 7), strict=True)
        ):
            for at in range(drafts[row]):
                count, alone = counts[row] - drafts[row] + at, fresh.clone()
                part = tuple(each[first : first + count] for each in inputs)
                run(of, alone, part, rows_of((row + 1, count, before[row])))
                assert torch.equal(kept[page + at], alone[row + 1]), (row, at)
