"""Compiled routing and experts against the reference, in every instruction set of this machine."""

from dataclasses import replace

import pytest
import torch

from banyan.ops import reference
from banyan.ops.cpu.experts import Experts, make_combine, make_place, make_route
from banyan.ops.cpu.linear import pack_linear
from banyan.ops.cpu.rows import Rows
from banyan.ops.cpu.weights import SOURCES, Arena
from banyan.ops.experts_api import Clamp, ExpertPlaces, Routing, StoredExperts
from banyan.ops.stored import STORAGE_TYPES, StoredWeight
from tests.ops.conftest import MACHINES, beside_the_best, open_library
from tests.support.stored_weights import ROUNDED, assert_close, random, stored

CPU = torch.device("cpu")
RULES = {
    "softmax": (Routing(2), 5, False),
    "one of seven": (Routing(1, is_normalised=False, scale=2.5), 7, False),
    "all eight": (Routing(8), 8, False),
    "of many": (Routing(8, is_normalised=False), 131, False),
    "best expert of a group": (Routing(3, groups=3, top_groups=2, scale=1.7), 9, False),
    "sigmoid": (Routing(4, "sigmoid"), 19, True),
    "sparsemixer": (Routing(2, "sparsemixer", jitter=0.3), 37, False),
    "sparsemixer of two": (Routing(2, "sparsemixer", jitter=0.01), 2, False),
    "two best of a group": (
        Routing(6, "sigmoid", groups=8, top_groups=4, group_best=2, scale=2.5),
        64,
        True,
    ),
}


@pytest.fixture(params=[*MACHINES, *beside_the_best("amx")], ids=str)
def library(request):
    yield from open_library(request)


def experts_of(name, count, dim, inner, first=0, activation="silu", down=""):
    """Stored experts of a type, each with values of its own."""

    def several(outputs, inputs, type, seed):
        weight = stored(type, outputs * count, inputs)
        raw = weight.raw.roll(seed, 0)
        whole = StoredWeight(weight.type, weight.shape, raw)
        return tuple(whole.cut(0, e * outputs, (e + 1) * outputs) for e in range(count))

    gate, up = (several(inner, dim, name, seed) for seed in (0, 3))
    gate = () if activation == "relu2" else gate
    return StoredExperts(first, gate, up, several(dim, inner, down or name, 5), activation)


def routed(tokens, count, per_token, seed=0):
    """Different experts for each token, one of them much liked, and weights."""
    generator = torch.Generator().manual_seed(seed)
    liking = torch.rand(tokens, count, generator=generator)
    liking[:, count // 2] += 0.7
    return liking.topk(per_token).indices, torch.rand(tokens, per_token, generator=generator)


@pytest.mark.parametrize("case", RULES)
@pytest.mark.parametrize("dim", [8, 67, 256])
def test_tokens_are_routed_as_the_reference_routes_them(library, case, dim):
    rule, count, has_correction = RULES[case]
    x, weight = random(37, dim, seed=1), random(count, dim, seed=2) * dim**-0.5
    correction = random(count, seed=3) * 0.1 if has_correction else None
    want_ids, want = reference.route(x, weight, correction, rule)

    ids, weights = make_route(library)(x, weight, correction, rule)

    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("rule", [Routing(3), Routing(3, "sigmoid", groups=3, top_groups=2)])
def test_the_lower_expert_and_the_lower_group_win_ties(library, rule):
    x, weight = torch.ones(2, 5), torch.ones(9, 5)

    ids, weights = make_route(library)(x, weight, None, rule)

    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_a_token_is_routed_alike_alone_and_in_any_batch(library):
    x, weight, rule = random(70, 100, seed=4), random(21, 100, seed=5), Routing(4)
    route = make_route(library)
    ids, weights = route(x, weight, None, rule)

    for tokens in (1, 2, 3, 4, 5, 7, 31, 32, 33):
        some_ids, some = route(x[:tokens], weight, None, rule)
        assert torch.equal(some_ids, ids[:tokens]) and torch.equal(some, weights[:tokens])
    assert torch.equal(route(x[69:], weight, None, rule)[1], weights[69:])


def test_a_token_that_is_no_number_spoils_no_other(library):
    x, weight, rule = random(5, 40, seed=6), random(6, 40, seed=7), Routing(3)
    want_ids, want = make_route(library)(x, weight, None, rule)
    x[2, 7] = float("nan")

    ids, weights = make_route(library)(x, weight, None, rule)

    others = [0, 1, 3, 4]
    assert torch.equal(ids[others], want_ids[others]) and torch.equal(weights[others], want[others])
    assert sorted(set(ids[2].tolist())) == sorted(ids[2].tolist()) and max(ids[2]) < 6


@pytest.mark.parametrize("name", SOURCES)
def test_experts_that_round_nothing_equal_the_reference(library, name):
    has_super_blocks = STORAGE_TYPES[name].values == 256
    dim, inner = (256, 512) if has_super_blocks else (96, 160)
    experts = experts_of(name, 5, dim, inner)
    x = random(23, dim, seed=8)
    ids, weights = routed(23, 5, 3)
    want = reference.pack_experts(experts, torch.float32, CPU)(x, ids, weights)

    got = Experts(library, Arena(), experts, is_exact=True)(x, ids, weights)

    coarse = 0.1 if name in ROUNDED else 3e-2
    assert_close(got, want.double(), coarse if has_super_blocks else 2e-5)


@pytest.mark.parametrize(
    ("name", "down"), [("Q4_0", ""), ("Q4_K", "Q6_K"), ("Q8_0", "F32"), ("BF16", "")]
)
def test_rounded_experts_multiply_as_rounded_projections_do(library, name, down):
    """The same tiles, the same products, and one order of experts."""
    dim, inner, tokens = (64, 160, 67) if name == "BF16" else (256, 512, 131)
    experts = experts_of(name, 4, dim, inner, down=down)
    x = random(tokens, dim, seed=9)
    ids, weights = routed(tokens, 4, 2, seed=1)
    rows, want = Rows(library), torch.zeros(tokens, dim)
    for expert in range(4):
        owners, places = torch.where(ids == expert)
        gate, up = (pack_linear(library, w[expert])(x[owners]) for w in (experts.gate, experts.up))
        through = rows.silu_and_mul(torch.cat([gate, up], 1))
        down_ = pack_linear(library, experts.down[expert])
        share = weights[owners, places].unsqueeze(1)
        want[owners] = torch.addcmul(want[owners], share, down_(through))

    got = Experts(library, Arena(), experts, is_exact=False)(x, ids, weights)

    assert_close(got, want.double(), 1e-6)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("name", ["Q4_1", "BF16", "E4M3"])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(library, name, is_exact):
    experts = experts_of(name, 6, 96, 64)
    run = Experts(library, Arena(), experts, is_exact)
    x = random(260, 96, seed=10)
    ids, weights = routed(260, 6, 2, seed=2)

    together = run(x, ids, weights)

    for tokens in (1, 2, 3, 5, 8, 9, 17, 33, 100, 129):
        assert torch.equal(run(x[:tokens], ids[:tokens], weights[:tokens]), together[:tokens])
    for token in (50, 259):
        alone = slice(token, token + 1)
        assert torch.equal(run(x[alone], ids[alone], weights[alone])[0], together[token])


@pytest.mark.parametrize(
    ("name", "bytes_of_32"), [("Q4_0", 18), ("Q4_K", 20), ("Q6_K", 28), ("MXFP4", 18)]
)
def test_experts_stay_in_their_bits(library, name, bytes_of_32):
    run = Experts(library, Arena(), experts_of(name, 4, 256, 512), is_exact=False)

    parts = (run.gate, run.up, run.down)
    taken = sum(packed.tiles.numel() for part in parts for packed in part.packed)

    assert taken == 4 * 3 * 256 * 512 // 32 * bytes_of_32


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize(("dim", "inner"), [(1, 1), (19, 21), (33, 5)])
def test_experts_of_odd_shapes_and_every_activation(library, activation, dim, inner):
    experts = experts_of("F32", 3, dim, inner, activation=activation)
    x = random(7, dim, seed=11)
    ids, weights = routed(7, 3, 2)
    want = reference.pack_experts(experts, torch.float32, CPU)(x, ids, weights)

    got = Experts(library, Arena(), experts, is_exact=False)(x, ids, weights)

    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["F32", "MXFP4"])
@pytest.mark.parametrize("clamp", [None, Clamp(0.4, 1.7), Clamp(0.3, 0.0)])
def test_experts_with_biases_and_a_clamped_gate(library, name, clamp):
    dim, inner = 96, 160
    biases = random(5, inner, seed=18), random(5, inner, seed=19), random(5, dim, seed=20)
    experts = replace(experts_of(name, 5, dim, inner), biases=biases, clamp=clamp)
    x = random(23, dim, seed=21)
    ids, weights = routed(23, 5, 3)
    want = reference.pack_experts(experts, torch.float32, CPU)(x, ids, weights)
    without = replace(experts, biases=None)
    plain = reference.pack_experts(without, torch.float32, CPU)(x, ids, weights)

    exact = Experts(library, Arena(), experts, is_exact=True)(x, ids, weights)
    rounded = Experts(library, Arena(), experts, is_exact=False)(x, ids, weights)

    assert_close(exact, want.double(), 2e-5)
    assert_close(rounded, want.double(), 3e-2)
    assert (want - plain).abs().max() > 0.5


@pytest.mark.parametrize("dim", [67, 256])
def test_a_router_adds_its_bias_to_the_logits(library, dim):
    x, weight = random(37, dim, seed=1), random(21, dim, seed=2) * dim**-0.5
    bias, rule = random(21, seed=3), Routing(4)
    want_ids, want = reference.route(x, weight, None, rule, bias)

    ids, weights = make_route(library)(x, weight, None, rule, bias)

    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, atol=2e-6, rtol=2e-6)
    assert not torch.equal(ids, make_route(library)(x, weight, None, rule)[0])


def test_experts_of_other_ranks_add_nothing(library):
    x = random(40, 64, seed=12)
    ids, weights = routed(40, 6, 3)
    whole = experts_of("Q8_0", 6, 64, 96)
    parts = [
        StoredExperts(first, *(w[first:last] for w in (whole.gate, whole.up, whole.down)), "silu")
        for first, last in ((0, 2), (2, 6))
    ]

    sums = [Experts(library, Arena(), part, False)(x, ids, weights) for part in parts]

    want = Experts(library, Arena(), whole, False)(x, ids, weights)
    torch.testing.assert_close(sums[0] + sums[1], want, atol=1e-5, rtol=1e-5)
    assert sums[0].abs().sum() > 0 and sums[1].abs().sum() > 0


def test_a_recorded_block_runs_for_any_number_of_tokens(library):
    experts = experts_of("Q4_0", 6, 64, 96)
    run, route = Experts(library, Arena(), experts, is_exact=False), make_route(library)
    weight, rule = random(6, 64, seed=13), Routing(2)
    x = random(50, 64, seed=14)
    recording = library.record(lambda: run(x, *route(x, weight, None, rule)), 50, 3)

    for tokens in (50, 1, 7, 0, 33):
        recording.run(tokens, 1, 0)
        want = run(x[:tokens], *route(x[:tokens], weight, None, rule))
        assert torch.equal(recording.result[:tokens], want)


def test_the_cost_of_a_step_counts_the_experts_that_it_uses(library):
    """Of 16 experts, tokens that agree on two read the weights of two."""
    dim, inner = 64, 96
    run = Experts(library, Arena(), experts_of("Q8_0", 16, dim, inner), is_exact=False)
    x, weights = random(4, dim, seed=15), torch.ones(4, 2)
    ids = torch.tensor([[3, 9]] * 4)
    recording = library.record(lambda: run(x, ids, weights), 4, 3)

    def weight_bytes():
        return sum(t.bytes for t in recording.times(4, 1, 0) if "experts_" in t.name)

    two = weight_bytes()
    ids[:] = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    eight = weight_bytes()

    expert = 3 * dim * inner * 34 / 32
    assert eight - two == pytest.approx(6 * expert)
    assert expert * 2 < two < expert * 3


@pytest.mark.parametrize("tokens", [1, 40])
def test_rows_are_scaled_by_a_sigmoid_of_their_own(library, tokens):
    x, gate = random(tokens, 37, seed=16), random(tokens, 3, seed=17)[:, 1:2]

    got = Rows(library).sigmoid_scale(x, gate)

    torch.testing.assert_close(got, x * gate.sigmoid(), atol=1e-6, rtol=1e-6)


def rank_addresses_of(logical: list[int], count: int) -> ExpertPlaces:
    """Tables of experts whose places hold `logical`."""
    found = [[at for at, expert in enumerate(logical) if expert == e] for e in range(count)]
    room = max(map(len, found))
    slots = torch.tensor([each + [0] * (room - len(each)) for each in found], dtype=torch.int32)
    return ExpertPlaces(slots, torch.tensor([len(e) for e in found], dtype=torch.int32))


@pytest.mark.parametrize("dispatch", ["static", "dynamic", "even"])
def test_pairs_go_where_the_reference_sends_them(library, dispatch):
    ids, _ = routed(40, 6, 3)
    places = rank_addresses_of([0, 1, 2, 3, 4, 5, 0, 0, 3], 6)

    got = make_place(library)(ids, places, dispatch)

    assert torch.equal(got, reference.place_experts(ids, places, dispatch))
    if dispatch != "even":
        assert set(got[ids == 0].tolist()) == {0, 6, 7}
        assert torch.equal(torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 3])[got], ids)


@pytest.mark.parametrize("name", ["F32", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("tokens", [1, 40, 133])
@pytest.mark.parametrize("dim", [64, 96])
def test_experts_anywhere_add_up_to_the_bits_of_experts_in_their_order(library, name, tokens, dim):
    """Six experts of two ranks, against nine places of three ranks that hold them in any order."""
    whole, logical = experts_of(name, 6, dim, 96), [5, 0, 3, 1, 2, 4, 0, 5, 0]
    x = random(tokens, dim, seed=12)
    ids, weights = routed(tokens, 6, 3)

    def share(experts: list[int], first: int) -> Experts:
        parts = [[of[e] for e in experts] for of in (whole.gate, whole.up, whole.down)]
        stored = StoredExperts(first, *map(tuple, parts), "silu")
        return Experts(library, Arena(), stored, False)

    at_home = [share([0, 1, 2], 0)(x, ids, weights), share([3, 4, 5], 3)(x, ids, weights)]
    want = at_home[0] + at_home[1]
    at = make_place(library)(ids, rank_addresses_of(logical, 6), "dynamic")
    apart = [share(logical[f : f + 3], f).apart(x, at) for f in (0, 3, 6)]

    got = make_combine(library)(apart[0] + apart[1] + apart[2], ids, weights, 3)

    assert torch.equal(got, want)


def test_the_reference_adds_up_experts_anywhere_alike():
    whole, logical = experts_of("F32", 6, 32, 48), [5, 0, 3, 1, 2, 4, 0, 5, 0]
    x = random(9, 32, seed=12)
    ids, weights = routed(9, 6, 3)

    def share(experts: list[int], first: int) -> reference.DenseExperts:
        parts = [[of[e] for e in experts] for of in (whole.gate, whole.up, whole.down)]
        return reference.DenseExperts(
            StoredExperts(first, *map(tuple, parts), "silu"), torch.float32, CPU
        )

    want = share([0, 1, 2], 0)(x, ids, weights) + share([3, 4, 5], 3)(x, ids, weights)
    at = reference.place_experts(ids, rank_addresses_of(logical, 6), "static")
    apart = sum(share(logical[f : f + 3], f).apart(x, at) for f in (0, 3, 6))

    got = reference.combine_experts(apart, ids, weights, 3)

    # Plain torch rounds a row by how many there are.
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
