"""Blocks of experts in Triton against the reference; `triton_device.py` says where they run."""

from dataclasses import replace

import pytest
import torch

from banyan.models.weights.quant.fp4 import from_mxfp4
from banyan.models.weights.quant.fp8 import Fp8
from banyan.ops import blocks, reference, rounding
from banyan.ops.cuda import expert_weights, triton_experts
from banyan.ops.cuda.needs import CudaToolkit
from banyan.ops.experts_api import Clamp, StoredExperts
from banyan.ops.stored import E4M3, StoredWeight
from tests.ops.triton_device import ABSENCE, DEVICE, TYPES, close, exact_float8, random

if ABSENCE:
    pytest.skip(ABSENCE, allow_module_level=True)

__all__ = ["exact_float8"]
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


def packed_of(experts, dtype=torch.float32) -> triton_experts.GroupedExperts:
    return triton_experts.GroupedExperts(experts, dtype, WHERE)


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

    got = packed_of(experts, dtype)(x, ids, weights)

    close(got, in_double(experts, x, ids, weights), dtype)


@pytest.mark.parametrize("first", [0, 4, 9])
def test_experts_that_are_elsewhere_add_nothing(first):
    experts = replace(experts_of(5, 48, 32, torch.float32, first=first), total=14)
    x, (ids, weights) = random(30, 48, seed=3), routed(30, 14, 4)
    packed = packed_of(experts)

    got, pairs = packed(x, ids, weights), packed.apart(x, ids)

    close(got, in_double(experts, x, ids, weights), torch.float32)
    exact = reference.pack_experts(experts, torch.float64, WHERE)
    close(pairs, exact.apart(x.double(), ids), torch.float32)
    assert pairs.view(*ids.shape, -1)[(ids < first) | (ids >= first + 5)].eq(0).all()


def test_a_token_may_name_a_place_twice_where_pairs_stay_apart():
    experts = experts_of(4, 32, 32, torch.float32)
    x, ids = random(9, 32, seed=3), torch.tensor([[1, 1, 3]] * 9, device=DEVICE)
    packed = packed_of(experts)

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
    packed = packed_of(experts)

    whole = packed(x, ids, weights)

    pairs = packed.apart(x, ids)
    assert torch.equal(whole, triton_experts.combine_experts.run(pairs, ids, weights, 6))


def test_a_place_takes_another_expert_in_the_memory_that_it_has():
    experts = experts_of(4, 32, 48, torch.float32, has_biases=True)
    x, (ids, _) = random(9, 32, seed=3), routed(9, 4, 2)
    packed = packed_of(experts)
    where = [part.data_ptr() for part in packed.parts(2)]

    packed.put(2, [part.clone() for part in packed.parts(0)])

    assert [part.data_ptr() for part in packed.parts(2)] == where
    assert all(part.is_contiguous() for part in packed.parts(2))
    moved = torch.where(ids == 2, 0, ids)
    assert torch.equal(packed.apart(x, ids), packed.apart(x, moved))


def test_a_token_that_is_no_number_spoils_no_other():
    experts = experts_of(4, 64, 48, torch.float32)
    x, (ids, weights) = random(40, 64, seed=3), routed(40, 4, 2)
    packed = packed_of(experts)
    want = packed(x, ids, weights)
    x[7] = float("nan")

    got = packed(x, ids, weights)

    others = [at for at in range(40) if at != 7]
    assert torch.equal(got[others], want[others]) and got[7].isnan().all()


def test_choices_may_lie_apart():
    """As `route` leaves them: the first ones of all experts in order."""
    experts = experts_of(6, 64, 48, torch.float32)
    x, (ids, weights) = random(20, 64, seed=3), routed(20, 6, 6)
    packed = packed_of(experts)
    few, their = ids[:, :2], weights[:, :2]

    got, pairs = packed(x, few, their), packed.apart(x, few)

    assert torch.equal(got, packed(x, few.contiguous(), their.contiguous()))
    assert torch.equal(pairs, packed.apart(x, few.contiguous()))


def test_no_tokens_are_no_work():
    packed = triton_experts.GroupedExperts(
        experts_of(4, 32, 32, torch.float32), torch.float32, WHERE
    )
    none = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    assert packed(random(0, 32), none, none.float()).shape == (0, 32)


def test_adapters_are_refused_by_name():
    packed = triton_experts.GroupedExperts(
        experts_of(4, 32, 32, torch.float32), torch.float32, WHERE
    )
    x, (ids, weights) = random(3, 32), routed(3, 4, 2)
    with pytest.raises(NotImplementedError, match="adapters"):
        packed(x, ids, weights, object())


def in_bytes(count: int, high: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, high, (count,), generator=generator, dtype=torch.uint8)


def e4m3_of(values: torch.Tensor, block: tuple[int, int] | None) -> StoredWeight:
    """block: of a scale; None = one for all."""
    if block is None:
        scale = values.abs().max().view(1) / 448
        return Fp8(None).of_numbers((values / scale).to(torch.float8_e4m3fn), scale).weight
    tall, wide = block
    rows, inputs = values.shape
    largest = values.reshape(-1, tall, inputs // wide, wide).abs().amax((1, 3))
    scale = largest / 448
    spread = scale.repeat_interleave(tall, 0).repeat_interleave(wide, 1)
    return Fp8(block).of_numbers((values / spread).to(torch.float8_e4m3fn), scale).weight


def four_bit_floats_of(type: str, values: torch.Tensor, seed: int) -> StoredWeight:
    """Random numbers of about this size."""
    outputs, inputs = values.shape
    octets = in_bytes(values.numel() // 2, 256, seed)
    if type == "MXFP4":
        exponents = in_bytes(values.numel() // 32, 3, seed).view(outputs, -1) + 119
        return from_mxfp4(octets.view(outputs, -1), exponents).weight
    codes = torch.stack([octets & 15, octets >> 4], 1).view(-1, 16)
    scale = (in_bytes(len(codes), 50, seed).view(-1, 1) + 1).float().to(torch.float8_e4m3fn)
    raw = blocks.lay_nvfp4(codes, scale, 5e-4)
    return StoredWeight(type, (outputs, inputs), raw.view(outputs, -1))


def shared_by_four(weight: StoredWeight, width: int) -> StoredWeight:
    """With the factors, `width` bytes, of each fourth block in its neighbours, too."""
    raw = weight.raw.view(weight.shape[0], weight.shape[1] // 32, -1).clone()
    raw[:, :, :width] = raw[:, ::4, :width].repeat_interleave(4, 1)
    return StoredWeight(weight.type, weight.shape, raw.flatten(1))


FORMS = {
    "fp8 per tensor": lambda values, seed: e4m3_of(values, None),
    "fp8 per output": lambda values, seed: e4m3_of(values, (1, values.shape[1])),
    "fp8 in blocks": lambda values, seed: e4m3_of(values, (128, 128)),
    "fp8 in groups": lambda values, seed: e4m3_of(values, (1, 32)),
    "awq": lambda values, seed: shared_by_four(in_blocks(values, "Q4_1"), 4),
    "gptq": lambda values, seed: shared_by_four(in_blocks(values, "Q4_0"), 2),
    "MXFP4": lambda values, seed: four_bit_floats_of("MXFP4", values, seed),
    "NVFP4": lambda values, seed: four_bit_floats_of("NVFP4", values, seed),
    **{
        type: lambda values, seed, type=type: in_blocks(values, type)
        for type in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
    },
}
"""Name -> a weight from values [out, in]."""
NARROW = ("fp8 per output", "fp8 in groups", "Q4_1", "MXFP4", "NVFP4")
"""Forms of blocks of 32 or less."""


def in_blocks(values: torch.Tensor, type: str) -> StoredWeight:
    return StoredWeight(type, tuple(values.shape), rounding.to_blocks(values, type))


def packed_experts_of(form: str, count: int, dim: int, inner: int, **more) -> StoredExperts:
    def weights(outputs, inputs, seed):
        values = random(count, outputs, inputs, seed=seed).cpu() * inputs**-0.5
        return tuple(FORMS[form](value, seed + at) for at, value in enumerate(values))

    gates = () if more.get("activation") == "relu2" else weights(inner, dim, 31)
    parts = {"activation": "silu", **more}
    return StoredExperts(0, gates, weights(inner, dim, 41), weights(dim, inner, 51), **parts)


def as_rounded(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """As numbers of 8 bits with a factor for each chunk of inputs would be."""
    pieces = x.float().unflatten(-1, (-1, chunk))
    unit = pieces.abs().amax(-1, keepdim=True) * (1 / 448)
    return ((pieces / unit).to(torch.float8_e4m3fn).double() * unit.double()).flatten(-2)


@pytest.mark.parametrize("tokens", [1, 6, 40])
@pytest.mark.parametrize("form", FORMS)
def test_weights_stay_packed(form, tokens):
    experts = packed_experts_of(form, 3, 256, 256 if form[-1] == "K" else 128)
    x, (ids, weights) = random(tokens, 256, dtype=torch.float16, seed=3), routed(tokens, 3, 2)
    packed = packed_of(experts, torch.float16)
    stored = experts.gate[0].raw.nbytes * 3 * 3

    got = packed(x, ids, weights)

    close(got, in_double(experts, x, ids, weights), torch.float16)
    if form[-1] != "K":  # their factors are kept as fp32
        assert packed.gate_up.size_bytes + packed.down.size_bytes <= stored


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("form", NARROW)
def test_packed_weights_of_odd_shapes(form, tokens):
    count, dim, inner = 3, 96, 32 if form == "NVFP4" else 160
    biases = tuple(random(count, size, seed=20).cpu() for size in (inner, inner, dim))
    more = {"activation": "relu2"} if form == "fp8 in groups" else {"clamp": Clamp(0.7, 1.702)}
    more |= {} if form == "fp8 in groups" else {"biases": biases}
    experts = replace(packed_experts_of(form, count, dim, inner, **more), first=2, total=6)
    x, (ids, weights) = random(tokens, dim, seed=3), routed(tokens, 6, 3)
    packed = packed_of(experts)
    exact = reference.pack_experts(experts, torch.float64, WHERE)

    got, pairs = packed(x, ids, weights), packed.apart(x, ids)

    close(got, exact(x.double(), ids, weights.double()), torch.float32)
    close(pairs, exact.apart(x.double(), ids), torch.float32)


@pytest.mark.parametrize("form", ["fp8 in blocks", "fp8 per output", "MXFP4"])
def test_all_tokens_may_choose_one_expert(form):
    experts = packed_experts_of(form, 2, 128, 128)
    x, ids = random(150, 128, dtype=torch.half, seed=3), torch.ones(150, 1, device=DEVICE).long()
    weights = torch.ones(150, 1, device=DEVICE)
    packed = packed_of(experts, torch.half)
    close(packed(x, ids, weights), in_double(experts, x, ids, weights), torch.half)


@pytest.mark.parametrize("tokens", [1, 6, 70])
@pytest.mark.parametrize("form", ["fp8 in blocks", "fp8 per output"])
@pytest.mark.usefixtures("exact_float8")
def test_activations_are_rounded_if_the_checkpoint_asks_for_it(form, tokens, monkeypatch):
    experts = packed_experts_of(form, 2, 256, 128)
    rounds = replace(expert_weights.NUMBER_TYPES[E4M3], rounds=True)
    monkeypatch.setitem(expert_weights.NUMBER_TYPES, E4M3, rounds)
    x, (ids, weights) = random(tokens, 256, dtype=torch.float16, seed=3), routed(tokens, 2, 2)
    packed = packed_of(experts, torch.float16)

    got = packed.apart(x, ids).view(*ids.shape, -1).double().cpu()

    given = as_rounded(x.cpu(), packed.gate_up.chunk)
    for token, chosen in enumerate(ids.tolist()):
        for place, at in enumerate(chosen):
            gate = given[token] @ experts.gate[at].dense.double().T
            middle = (
                gate * gate.sigmoid() * (given[token] @ experts.up[at].dense.double().T)
            ).half()
            want = as_rounded(middle, packed.down.chunk) @ experts.down[at].dense.double().T
            assert (got[token, place] - want).norm() < 2e-2 * want.norm()
    summed = packed(x, ids, weights)
    pairs = packed.apart(x, ids)
    close(summed, triton_experts.combine_experts.run(pairs, ids, weights, 4), torch.float16)


def test_weights_of_several_types_become_floats():
    mixed = packed_experts_of("Q4_0", 4, 64, 64)
    up = (*mixed.up[:3], packed_experts_of("Q8_0", 4, 64, 64).up[3])
    experts = replace(mixed, up=up)
    x, (ids, weights) = random(5, 64, seed=3), routed(5, 4, 2)
    packed = packed_of(experts)
    assert packed.gate_up.type is None and packed.down.type is not None
    close(packed(x, ids, weights), in_double(experts, x, ids, weights), torch.float32)


def test_factors_that_neighbours_share_are_kept_once():
    sizes = {"fp8 in blocks": 4, "fp8 per tensor": 4, "awq": 2, "gptq": 2, "NVFP4": 1}
    for form, each in sizes.items():
        packed = triton_experts.GroupedExperts(
            packed_experts_of(form, 2, 256, 256), torch.half, WHERE
        )
        group, shared = {"fp8 in blocks": (128, 128), "fp8 per tensor": (256, 128)}.get(
            form, (16 if form == "NVFP4" else 128, 1)
        )
        scales = packed.gate_up.scales
        assert scales.nbytes == 2 * 512 * 256 // (group * shared) * each, form


def test_a_place_takes_another_packed_expert():
    x, (ids, _) = random(9, 64, seed=3), routed(9, 4, 2)
    for form in ("MXFP4", "NVFP4", "Q4_1"):
        packed = packed_of(packed_experts_of(form, 4, 64, 64), x.dtype)
        packed.put(2, [part.clone() for part in packed.parts(0)])
        assert torch.equal(packed.apart(x, ids), packed.apart(x, torch.where(ids == 2, 0, ids)))


@pytest.mark.parametrize(("wish", "type"), [("q4_0", "Q4_0"), ("int8", "Q8_0"), ("fp8", "")])
def test_float_experts_are_rounded_at_load(wish, type):
    experts = experts_of(3, 64, 96, torch.bfloat16)
    x, (ids, _) = random(7, 64, seed=3), routed(7, 3, 2)
    packed = triton_experts.packer(CudaToolkit(quantization=wish))(experts, torch.float32, WHERE)

    got = packed.apart(x, ids)

    def as_stored(weights):
        if type:
            return tuple(in_blocks(weight.dense.float(), type) for weight in weights)
        return tuple(
            Fp8(None).of_numbers(*rounding.to_fp8(weight.dense.float(), torch.float32)).weight
            for weight in weights
        )

    parts = {side: as_stored(getattr(experts, side)) for side in ("gate", "up", "down")}
    want = packed_of(replace(experts, **parts))
    if not type:
        want.gate_up, want.down = (
            replace(part, type=packed.down.type) for part in (want.gate_up, want.down)
        )
    assert torch.equal(got, want.apart(x, ids))


def test_experts_of_no_whole_blocks_are_not_rounded_and_that_is_reported(caplog):
    experts = experts_of(2, 40, 24, torch.float32)
    x, (ids, weights) = random(3, 40, seed=3), routed(3, 2, 1)
    packed = triton_experts.GroupedExperts(experts, torch.float32, WHERE, "Q8_0")
    close(packed(x, ids, weights), in_double(experts, x, ids, weights), torch.float32)
    assert "stay as they are" in caplog.text
