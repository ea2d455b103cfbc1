"""Cases of experts, and of products by int8 and int4 weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.product_contracts import FOUR_BIT_GROUP
from banyan.ascend.ops.products import PackedFourBits
from banyan.ascend.selfcheck.case import SLACK, Case, Place, random_tensor
from banyan.ops.activation_quant import BLOCK, FOUR_BITS, FourBits
from banyan.ops.stored import StoredWeight


def product_cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float16):
        kind = str(dtype).removeprefix("torch.")
        yield from _experts(dtype, kind)
        yield from _int8_products(dtype, kind)
        yield _four_bit_case(dtype)
        yield _grouped_four_bit_case(dtype)


def _experts(dtype: torch.dtype, kind: str) -> Iterator[Case]:
    tokens, per_token, experts, dim = 6, 2, 4, 64
    x, weight = (
        random_tensor(tokens, dim, dtype=dtype),
        random_tensor(experts, dim, 32, dtype=dtype),
    )
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    ids = ids[:, :per_token].to(torch.int32)
    shares = random_tensor(tokens, per_token, dtype=dtype)
    order = ids.flatten().sort(stable=True).indices
    counts = torch.bincount(ids.flatten(), minlength=experts)
    rows, places = x[order // per_token], order.argsort().to(torch.int32)

    def multiplied() -> list[Tensor]:
        of_row = weight.float()[ids.flatten()[order].long()]
        return [torch.einsum("ri,rio->ro", rows.float(), of_row)]

    def together() -> list[Tensor]:
        each = rows.float()[places.long()].unflatten(0, (tokens, per_token))
        return [(each * shares.float().unsqueeze(-1)).sum(1)]

    yield Case(
        "npu_moe_init_routing_v2",
        kind,
        lambda ops, place: ops.experts.init_routing(place(x), place(ids), 0, experts, experts),
        lambda: [rows, places, counts],
        0.0,
    )
    yield Case(
        "npu_grouped_matmul",
        kind,
        lambda ops, place: [ops.experts.grouped_matmul(place(rows), place(weight), place(counts))],
        multiplied,
        SLACK[dtype],
    )
    yield Case(
        "npu_moe_token_unpermute",
        kind,
        lambda ops, place: [ops.experts.token_unpermute(place(rows), place(places), place(shares))],
        together,
        SLACK[dtype],
    )


def _int8_products(dtype: torch.dtype, kind: str) -> Iterator[Case]:
    x, scale = random_tensor(5, 64, dtype=dtype), random_tensor(32, dtype=torch.float32).abs() / 64
    generator = torch.Generator().manual_seed(1)
    numbers, columns = (
        torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        for shape in ((5, 64), (64, 32))
    )
    units, bias = x.float().abs().amax(-1) / 127, torch.arange(-16, 16, dtype=torch.int32) * 99
    inverse, offset = torch.tensor([32.0], dtype=dtype), torch.tensor([3.0], dtype=dtype)
    total = numbers.int() @ columns.int()

    def rounded(ops: Operators, place: Place) -> list[Tensor]:
        found, each = ops.dynamic_quant(place(x))
        return [found.float() * each.unsqueeze(1), each]

    def by_token(ops: Operators, place: Place) -> list[Tensor]:
        columns_there = ops.cast_fractal(place(columns))
        given = (place(numbers), columns_there, place(scale), dtype, place(units))
        return [ops.quant_matmul(*given)]

    def measured(ops: Operators, place: Place) -> list[Tensor]:
        given = (place(numbers), place(columns), place(scale), dtype, None, place(bias))
        return [ops.quant_matmul(*given)]

    # A number may be rounded to its neighbour.
    yield Case("npu_dynamic_quant", kind, rounded, lambda: [x.float(), units], 2e-2)
    yield Case(
        "npu_quantize",
        kind,
        lambda ops, place: [ops.quantize(place(x), place(inverse), place(offset)).float() / 32],
        lambda: [(x.float() * 32 + 3).round().clamp(-128, 127) / 32],
        4e-2,
    )
    yield Case(
        "npu_quant_matmul",
        f"a unit of each token, {kind}",
        by_token,
        lambda: [total.float() * scale * units.unsqueeze(1)],
        SLACK[dtype],
    )
    yield Case(
        "npu_quant_matmul",
        f"with a bias, {kind}",
        measured,
        lambda: [(total + bias).float() * scale],
        SLACK[dtype],
    )
    many = torch.stack([columns, columns.flip(1)])
    factors = torch.stack([scale, scale.flip(0)])
    factors = factors.to(dtype if dtype == torch.bfloat16 else torch.float32)
    counts = torch.tensor([2, 3])

    def by_group(ops: Operators, place: Place) -> list[Tensor]:
        given = (place(counts), place(factors), place(units), dtype)
        return [
            ops.experts.grouped_quant_matmul(place(numbers), ops.cast_fractal(place(many)), *given)
        ]

    each = [numbers[:2].int() @ many[0].int(), numbers[2:].int() @ many[1].int()]
    wanted = torch.cat([part.float() * factors[at].float() for at, part in enumerate(each)])
    yield Case(
        "npu_grouped_matmul",
        f"of 8 bits, {kind}",
        by_group,
        lambda: [wanted * units.unsqueeze(1)],
        SLACK[dtype],
    )
    yield Case(
        "npu_format_cast",
        kind,
        lambda ops, place: [ops.cast_fractal(place(columns))],
        lambda: [columns],
        0.0,
    )


_FOUR_BIT_ROWS, _FOUR_BIT_INPUTS, _FOUR_BIT_OUTPUTS = 5, 512, 48


def four_bit_weight(seed: int) -> StoredWeight:
    """Counted in a unit of each 256 inputs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (_FOUR_BIT_OUTPUTS, _FOUR_BIT_INPUTS)
    numbers = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    scale = (
        1 + torch.rand(_FOUR_BIT_OUTPUTS, _FOUR_BIT_INPUTS // FOUR_BIT_GROUP, generator=generator)
    ) / 256
    raw = FourBits(numbers, scale.repeat_interleave(FOUR_BIT_GROUP // BLOCK, 1)).raw
    return StoredWeight(FOUR_BITS, shape, raw)


def four_bit_rows() -> tuple[Tensor, Tensor]:
    """int8 numbers, and the unit of each row."""
    generator = torch.Generator().manual_seed(11)
    shape = (_FOUR_BIT_ROWS, _FOUR_BIT_INPUTS)
    numbers = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return numbers, (1 + torch.rand(_FOUR_BIT_ROWS, generator=generator)) / 256


def _four_bit_case(dtype: torch.dtype) -> Case:
    def run(operators: Operators, place: Place) -> list[Tensor]:
        (numbers, units), found = four_bit_rows(), PackedFourBits.of(four_bit_weight(1))
        given = (place(found.columns), place(found.scale), place(units.unsqueeze(1)))
        return [operators.four_bits.matmul(place(numbers), *given, place(found.lift), dtype)]

    def wanted() -> list[Tensor]:
        numbers, units = four_bit_rows()
        return [(numbers.float() @ four_bit_weight(1).dense.t()) * units.unsqueeze(1)]

    kind = f"of 4 bits, {str(dtype).removeprefix('torch.')}"
    return Case("npu_quant_matmul", kind, run, wanted, SLACK[dtype])


def _grouped_four_bit_case(dtype: torch.dtype) -> Case:
    counts = torch.tensor([2, 3])

    def run(operators: Operators, place: Place) -> list[Tensor]:
        (numbers, units), many = (
            four_bit_rows(),
            [PackedFourBits.of(four_bit_weight(seed)) for seed in (1, 2)],
        )
        columns, scale, lift = (
            place(torch.stack(parts))
            for parts in zip(*((p.columns, p.scale, p.lift) for p in many), strict=True)
        )
        given = (place(numbers), columns, place(counts), scale, place(units), lift, dtype)
        return [operators.four_bits.grouped_matmul(*given)]

    def wanted() -> list[Tensor]:
        numbers, units = four_bit_rows()
        first, second = (four_bit_weight(seed).dense.t() for seed in (1, 2))
        each = torch.cat([numbers[:2].float() @ first, numbers[2:].float() @ second])
        return [each * units.unsqueeze(1)]

    kind = f"of 4 bits, {str(dtype).removeprefix('torch.')}"
    return Case("npu_grouped_matmul", kind, run, wanted, SLACK[dtype])
