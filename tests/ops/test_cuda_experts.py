"""Blocks of experts in Triton against the reference; `triton_device.py` tells where they run."""

from dataclasses import replace

import pytest
import torch

from banyan.ops import reference
from banyan.ops.cuda import triton_experts
from banyan.ops.experts_api import Clamp, StoredExperts
from banyan.ops.stored import StoredWeight
from tests.ops.triton_device import ABSENCE, DEVICE, TYPES, close, random

if ABSENCE:
    pytest.skip(ABSENCE, allow_module_level=True)

WHERE = torch.device(DEVICE)
GATES = ["silu", "gelu", "gelu_pytorch_tanh", "clamp", "limit", "relu2"]
CLAMPS = {"clamp": Clamp(0.7, 1.702), "limit": Clamp(0.7, 0.0)}


def experts_of(count, dim, inner, dtype, gate="silu", first=0, has_biases=False) -> StoredExperts:
    def weights(outputs, inputs, seed):
        values = random(count, outputs, inputs, dtype=dtype, seed=seed).cpu() * inputs**-0.5
        return tuple(StoredWeight.from_tensor(value) for value in values)

    gates = () if gate == "relu2" else weights(inner, dim, 11)
    sizes = (inner, inner, dim)
    biases = tuple(random(count, size, seed=20 + i).cpu() for i, size in enumerate(sizes))
    return StoredExperts(
        *(first, gates, weights(inner, dim, 12), weights(dim, inner, 13)),
        activation="silu" if gate in CLAMPS else gate,
        biases=biases if has_biases else None,
        clamp=CLAMPS.get(gate),
    )


def routed(tokens, total, per_token, seed=0):
    """Different experts for each token, one of them much liked, and weights."""
    liking = random(tokens, total, seed=seed)
    liking[:, total // 2] += 1
    weights = random(tokens, per_token, seed=seed + 1).abs()
    return liking.topk(per_token).indices, weights


def in_double(experts, x, ids, weights):
    exact = reference.pack_experts(experts, torch.float64, WHERE)
    return exact(x.double(), ids, weights.double())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 150])
@pytest.mark.parametrize(
    ("count", "per_token", "dim", "inner", "gate", "has_biases"),
    [
        (8, 2, 64, 96, "silu", False),
        (5, 3, 40, 24, "silu", True),
        (9, 4, 72, 33, "gelu", False),
        (3, 1, 64, 64, "gelu_pytorch_tanh", False),
        (6, 2, 96, 80, "clamp", True),
        (7, 3, 64, 48, "relu2", False),
    ],
)
def test_experts_are_those_of_the_reference(
    tokens, count, per_token, dim, inner, gate, has_biases, dtype
):
    experts = experts_of(count, dim, inner, dtype, gate, has_biases=has_biases)
    x = random(tokens, 2 * dim, dtype=dtype, seed=3)[:, :dim]
    ids, weights = routed(tokens, count, per_token)

    got = triton_experts.experts.run(experts, dtype, WHERE)(x, ids, weights)

    close(got, in_double(experts, x, ids, weights), dtype)


@pytest.mark.parametrize("first", [0, 4, 9])
def test_experts_that_are_elsewhere_add_nothing(first):
    experts = replace(experts_of(5, 48, 32, torch.float32, first=first), total=14)
    x, (ids, weights) = random(30, 48, seed=3), routed(30, 14, 4)
    packed = triton_experts.experts.run(experts, torch.float32, WHERE)

    got, pairs = packed(x, ids, weights), packed.apart(x, ids)

    close(got, in_double(experts, x, ids, weights), torch.float32)
    exact = reference.pack_experts(experts, torch.float64, WHERE)
    close(pairs, exact.apart(x.double(), ids), torch.float32)
    assert pairs.view(*ids.shape, -1)[(ids < first) | (ids >= first + 5)].eq(0).all()


def test_a_token_may_name_a_place_twice_where_pairs_stay_apart():
    experts = experts_of(4, 32, 32, torch.float32)
    x, ids = random(9, 32, seed=3), torch.tensor([[1, 1, 3]] * 9, device=DEVICE)
    packed = triton_experts.experts.run(experts, torch.float32, WHERE)

    pairs = packed.apart(x, ids).view(9, 3, -1)

    assert torch.equal(pairs[:, 0], pairs[:, 1]) and not torch.equal(pairs[:, 0], pairs[:, 2])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("per_token", "dim", "home"), [(1, 16, 3), (6, 50, 4), (8, 1500, 100)])
def test_pairs_add_up_as_in_the_reference(per_token, dim, home, dtype):
    x = random(7, per_token * dim, dtype=dtype)
    ids, weights = routed(7, 20, per_token)

    got = triton_experts.combine_experts.run(x, ids, weights, home)

    close(got, reference.combine_experts(x.double(), ids, weights.double(), home), dtype)


def test_apart_and_added_up_are_the_same_bits():
    experts = experts_of(6, 64, 48, torch.float32)
    x, (ids, weights) = random(20, 64, seed=3), routed(20, 6, 3)
    packed = triton_experts.experts.run(experts, torch.float32, WHERE)

    whole = packed(x, ids, weights)

    pairs = packed.apart(x, ids)
    assert torch.equal(whole, triton_experts.combine_experts.run(pairs, ids, weights, 6))


def test_a_place_takes_another_expert_in_the_memory_that_it_has():
    experts = experts_of(4, 32, 48, torch.float32, has_biases=True)
    x, (ids, _) = random(9, 32, seed=3), routed(9, 4, 2)
    packed = triton_experts.experts.run(experts, torch.float32, WHERE)
    where = [part.data_ptr() for part in packed.parts(2)]

    packed.put(2, [part.clone() for part in packed.parts(0)])

    assert [part.data_ptr() for part in packed.parts(2)] == where
    assert all(part.is_contiguous() for part in packed.parts(2))
    moved = torch.where(ids == 2, 0, ids)
    assert torch.equal(packed.apart(x, ids), packed.apart(x, moved))


def test_a_token_that_is_no_number_spoils_no_other():
    experts = experts_of(4, 64, 48, torch.float32)
    x, (ids, weights) = random(40, 64, seed=3), routed(40, 4, 2)
    packed = triton_experts.experts.run(experts, torch.float32, WHERE)
    want = packed(x, ids, weights)
    x[7] = float("nan")

    got = packed(x, ids, weights)

    others = [at for at in range(40) if at != 7]
    assert torch.equal(got[others], want[others]) and got[7].isnan().all()


def test_choices_may_lie_apart():
    """As `route` leaves them: the first ones of all experts in order."""
    experts = experts_of(6, 64, 48, torch.float32)
    x, (ids, weights) = random(20, 64, seed=3), routed(20, 6, 6)
    packed = triton_experts.experts.run(experts, torch.float32, WHERE)
    few, their = ids[:, :2], weights[:, :2]

    got, pairs = packed(x, few, their), packed.apart(x, few)

    assert torch.equal(got, packed(x, few.contiguous(), their.contiguous()))
    assert torch.equal(pairs, packed.apart(x, few.contiguous()))


def test_no_tokens_are_no_work():
    packed = triton_experts.experts.run(experts_of(4, 32, 32, torch.float32), torch.float32, WHERE)
    none = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    assert packed(random(0, 32), none, none.float()).shape == (0, 32)


def test_adapters_are_refused_by_name():
    packed = triton_experts.experts.run(experts_of(4, 32, 32, torch.float32), torch.float32, WHERE)
    x, (ids, weights) = random(3, 32), routed(3, 4, 2)
    with pytest.raises(NotImplementedError, match="adapters"):
        packed(x, ids, weights, object())
