"""The compiled row-wise ops against the plain ones, in every instruction set of this machine."""

import math

import pytest
import torch

from banyan.ops import reference
from banyan.ops.cpu.rows import Rows

EPS = 1e-5


@pytest.fixture
def rows(library):
    return Rows(library)


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def strided(x, room=5):
    """The same values as part of wider rows."""
    wide = torch.full((x.shape[0], x[0].numel() + room), math.nan)
    part = wide[:, : x[0].numel()]
    part.copy_(x.flatten(1))
    return part.unflatten(1, x.shape[1:]) if x.dim() == 3 else part


def assert_equal_alone(run, *inputs):
    """Bit for bit: each row by itself gives what it gives among the others."""
    together = run(*inputs)
    together = together if isinstance(together, tuple) else (together,)
    for row in range(inputs[0].shape[0]):
        alone = run(*(x[row : row + 1] for x in inputs))
        alone = alone if isinstance(alone, tuple) else (alone,)
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one[0].view(torch.int32), all_rows[row].view(torch.int32))


@pytest.mark.parametrize("tokens", [1, 3, 67])
@pytest.mark.parametrize("dim", [1, 7, 64, 577, 2048])
def test_norms_equal_the_reference_and_each_row_its_own(rows, tokens, dim):
    x, y = strided(random(tokens, dim, scale=3.0)), strided(random(tokens, dim, seed=1), 3)
    weight, bias = random(dim, seed=2), random(dim, seed=3)

    torch.testing.assert_close(
        rows.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), rtol=2e-6, atol=1e-6
    )
    torch.testing.assert_close(
        rows.add_rms_norm(x, y, weight, EPS),
        reference.add_rms_norm(x, y, weight, EPS),
        rtol=2e-6,
        atol=1e-6,
    )
    for offset in (None, bias):
        torch.testing.assert_close(
            rows.layer_norm(x, weight, offset, EPS),
            reference.layer_norm(x, weight, offset, EPS),
            rtol=1e-5,
            atol=4e-6,
        )
    assert_equal_alone(lambda x: rows.rms_norm(x, weight, EPS), x)
    assert_equal_alone(lambda x, y: rows.add_rms_norm(x, y, weight, EPS), x, y)
    assert_equal_alone(lambda x: rows.layer_norm(x, weight, bias, EPS), x)


def test_layer_norm_keeps_its_precision_far_from_zero(rows):
    x, weight = random(3, 577) + 1000.0, torch.ones(577)

    exact = torch.nn.functional.layer_norm(x.double(), (577,), weight.double(), None, EPS)
    torch.testing.assert_close(
        rows.layer_norm(x, weight, None, EPS).double(), exact, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("head_dim", [8, 64, 80, 100])
def test_a_norm_of_heads_takes_each_head_by_itself(rows, head_dim):
    x, weight = strided(random(5, 3, head_dim)), random(head_dim, seed=1)

    torch.testing.assert_close(
        rows.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), rtol=2e-6, atol=1e-6
    )


@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (80, 40), (80, 16), (6, 3)])
def test_rotation_equals_the_reference_and_leaves_the_rest(rows, head_dim, pairs):
    q, k = strided(random(9, 3, head_dim)), strided(random(9, 1, head_dim, seed=1))
    cos, sin = random(9, pairs, seed=2).cos(), random(9, pairs, seed=2).sin()

    torch.testing.assert_close(
        rows.rotary(q, k, cos, sin), reference.rotary(q, k, cos, sin), rtol=1e-6, atol=1e-6
    )
    assert_equal_alone(rows.rotary, q, k, cos, sin)


def test_angles_are_exact_at_a_million(rows):
    positions = torch.tensor([0, 1, 77, 4095, 131_071, 1_000_000])
    frequencies = 10_000.0 ** (-torch.arange(0, 64, 2) / 64.0)

    cos, sin = rows.rotary_angles(positions, frequencies, 1.25)

    angles = (positions.unsqueeze(1).float() * frequencies).double()
    torch.testing.assert_close(cos, (angles.cos() * 1.25).float(), rtol=3e-7, atol=1e-7)
    torch.testing.assert_close(sin, (angles.sin() * 1.25).float(), rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("dim", [1, 13, 64, 1537])
@pytest.mark.parametrize("op", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_gates_equal_the_reference_in_fp64(rows, op, dim):
    x = strided(random(7, 2 * dim, scale=4.0))

    expected = getattr(reference, op)(x.double()).float()

    torch.testing.assert_close(getattr(rows, op)(x), expected, rtol=2e-6, atol=1e-6)
    assert_equal_alone(getattr(rows, op), x)


def test_a_gated_unit_has_a_limit(rows):
    x = strided(random(7, 2 * 67, scale=4.0))

    out = rows.silu_and_mul(x, limit=0.75)

    expected = reference.silu_and_mul(x.double(), 0.75).float()
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=1e-6)
    assert (out - reference.silu_and_mul(x)).abs().max() > 1
    assert rows.silu_and_mul(torch.full((1, 18), math.nan), limit=0.75).isnan().all()


@pytest.mark.parametrize("pieces", [1, 3])
def test_each_piece_of_a_row_has_a_gate(rows, pieces):
    x, gate = strided(random(7, 39)), strided(random(7, pieces, scale=3.0))

    out = rows.sigmoid_scale(x, gate)

    by_piece = x.double().view(7, pieces, -1) * gate.double().sigmoid()[..., None]
    torch.testing.assert_close(out, by_piece.flatten(1).float(), rtol=2e-6, atol=1e-6)


def test_gates_saturate_and_pass_what_is_not_a_number_on(rows):
    gate = torch.tensor([-math.inf, -1e30, -200.0, -50.0, -20.0, 0.0, 20.0, 1e30, math.inf])
    x = torch.cat([gate, torch.ones(9)]).unsqueeze(0)
    nan = torch.full((1, 18), math.nan)

    for op in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        out = getattr(rows, op)(x)[0]
        torch.testing.assert_close(out[1:6], torch.zeros(5), atol=1e-6, rtol=0)
        torch.testing.assert_close(out[6:], gate[6:])
        assert getattr(rows, op)(nan).isnan().all()


def test_gelu_keeps_its_relative_precision_in_the_tail(rows):
    x = torch.linspace(-12.0, 12.0, 4001)

    out = rows.gelu_and_mul(torch.cat([x, torch.ones(4001)]).unsqueeze(0))[0]

    exact = x.double() * 0.5 * torch.special.erfc(-x.double() / math.sqrt(2))
    torch.testing.assert_close(out.double(), exact, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("dim", [1, 33, 20_001])
def test_logits_are_scaled_and_capped(rows, dim):
    logits = strided(random(5, dim, scale=40.0))

    for scale, cap in ((1.0, 0.0), (0.25, 0.0), (0.5, 30.0)):
        expected = reference.scale_logits(logits.double(), scale, cap)
        torch.testing.assert_close(
            rows.scale_logits(logits, scale, cap), expected.float(), rtol=1e-6, atol=1e-7
        )
    tiny = torch.tensor([[1e-20, -1e-7, 0.0]])
    torch.testing.assert_close(rows.scale_logits(tiny, 1.0, 30.0), tiny, rtol=3e-7, atol=0)


def test_sums_copies_and_selections_are_exact(rows):
    x, y = strided(random(9, 37)), strided(random(9, 37, seed=1))

    assert torch.equal(rows.add(x, y), x + y)
    assert torch.equal(
        rows.concat([x, y[:, :5], x[:, 30:]]), torch.cat([x, y[:, :5], x[:, 30:]], 1)
    )
    torch.testing.assert_close(
        rows.gelu_tanh(x), reference.gelu_tanh(x.double()).float(), rtol=2e-6, atol=1e-6
    )
    for dtype in (torch.int32, torch.int64):
        index = torch.tensor([8, 0, 0, 3], dtype=dtype)
        assert torch.equal(rows.select_rows(x, index), x[index.long()])
    columns = torch.randperm(50, generator=torch.Generator().manual_seed(2))[:37]
    spread = rows.spread_columns(x, columns, 50)
    assert torch.equal(spread, reference.spread_columns(x, columns, 50))
    assert torch.equal(spread[:, columns], x) and int(spread.isinf().sum()) == 9 * 13


def test_a_recording_runs_for_fewer_rows_than_it_was_made_for(rows):
    x, weight, gate_up = random(6, 40), random(40, seed=1), random(6, 80, seed=2)
    library = rows._library

    recording = library.record(
        lambda: rows.add_rms_norm(rows.silu_and_mul(gate_up), x, weight, EPS)[0], 6, 2
    )
    recording.run(4, 4, 1)

    expected = reference.add_rms_norm(reference.silu_and_mul(gate_up), x, weight, EPS)[0]
    torch.testing.assert_close(recording.result[:4], expected[:4], rtol=3e-6, atol=1e-6)


def test_rows_are_taken_or_added_where_they_are_given(rows):
    x, given = strided(random(6, 40)), random(4, 100, seed=1)[:, 30:70]
    where = torch.tensor([-1, 3, 0, -1, 3, 1], dtype=torch.int32)

    for adds in (False, True):
        found = rows.take_rows(x, where, given, adds)
        assert torch.equal(found, reference.take_rows(x, where, given, adds))
        assert torch.equal(found[0], x[0])
    assert torch.equal(rows.take_rows(x, where, given)[1], given[3])


def test_each_pair_turns_by_the_position_on_its_axis(rows):
    positions, frequencies = torch.arange(5) * 1000, 1.0 / 10.0 ** torch.arange(7)
    shifts = torch.tensor([[0, -3, 900]] * 5, dtype=torch.int32)
    axes = torch.tensor([0, 1, 2, 0, 1, 2, 1], dtype=torch.int32)

    found = rows.rotary_angles(positions, frequencies, 0.5, shifts, axes)

    expected = reference.rotary_angles(positions, frequencies, 0.5, shifts, axes)
    plain = rows.rotary_angles(positions, frequencies, 0.5)
    for one, other, unshifted in zip(found, expected, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)
        assert torch.equal(one[:, [0, 3]], unshifted[:, [0, 3]])
        assert not torch.equal(one[:, 1], unshifted[:, 1])
