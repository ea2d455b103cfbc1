"""One call or more of each operator of an Ascend NPU, with what plain torch makes of the same.

For whoever has a device, or thinks so: the self-check compares numbers, the real package's meta
kernels compare shapes. Inputs are the same every time.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from banyan.ascend.ops.case import Case, Outcome, Place
from banyan.ascend.ops.four_bit_cases import four_bit_cases
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.prologue_cases import as_fractal, prologue_cases
from banyan.base.errors import BanyanError
from banyan.ops import reference

HEADS, KV_HEADS, PAGE, PAGES = 8, 2, 128, 16
LENGTHS: tuple[int, ...] = (130, 257, 5)
"""Keys of three rows, this step's included."""
COUNTS = (10, 30, 5)
_EPSILON = 1e-5
_SLACK = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""How far a result may be off, absolutely and relatively: kernels add in an order of their own."""


def cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float16):
        kind = str(dtype).removeprefix("torch.")
        yield from _rows(dtype, kind)
        for dim in (64, 128):
            yield from _attention(dtype, dim, f"{kind}, heads of {dim}")
        yield from _latents(dtype, kind)
        yield from _sparse(dtype, kind)
        yield from _experts(dtype, kind)
    yield from products()
    yield _rotary()
    yield from prologue_cases()
    yield from four_bit_cases()


def try_out(case: Case, operators: Operators, place: Place) -> Outcome:
    """Run a case and compare; an error of the device is an outcome too."""
    try:
        found = [result.cpu() for result in case.run(operators, place)]
    except (BanyanError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        return Outcome(case, math.inf, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    worst = 0.0
    for got, wanted in zip(found, case.wanted(), strict=True):
        if got.shape != wanted.shape:
            return Outcome(case, math.inf, f"{list(got.shape)} instead of {list(wanted.shape)}")
        off = (got.float() - wanted.float()).abs() / (1 + wanted.float().abs())
        worst = max(worst, float(off.max().nan_to_num(nan=math.inf)))
    why = "" if worst <= case.slack else f"off by {worst:.2g}, {case.slack:.2g} is allowed"
    return Outcome(case, worst, why)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def _rows(dtype: torch.dtype, kind: str) -> Iterator[Case]:
    x, residual, weight = (_random(*shape, dtype=dtype) for shape in ((5, 64), (64, 5), (64,)))
    residual = residual.t().contiguous()
    slack = _SLACK[dtype]
    yield Case(
        "npu_rms_norm",
        kind,
        lambda ops, place: [ops.rms_norm(place(x), place(weight), _EPSILON)],
        lambda: [reference.rms_norm(x, weight, _EPSILON)],
        slack,
    )
    yield Case(
        "npu_add_rms_norm",
        kind,
        lambda ops, place: ops.add_rms_norm(place(x), place(residual), place(weight), _EPSILON),
        lambda: reference.add_rms_norm(x, residual, weight, _EPSILON),
        slack,
    )
    yield Case(
        "npu_swiglu",
        kind,
        lambda ops, place: [ops.swiglu(place(x))],
        lambda: [reference.silu_and_mul(x)],
        slack,
    )
    yield _scatter(dtype, kind)


def _scatter(dtype: torch.dtype, kind: str) -> Case:
    pages, updates = torch.zeros(6, 4, dtype=dtype), _random(2, 4, dtype=dtype)
    places = torch.tensor([[4], [1]])

    def run(operators: Operators, place: Place) -> list[Tensor]:
        there = place(pages)
        operators.scatter(there, place(places), place(updates))
        return [there]

    def wanted() -> list[Tensor]:
        return [pages.index_copy(0, places[:, 0], updates)]

    return Case("npu_scatter_nd_update_", kind, run, wanted, 0.0)


def _rotary() -> Case:
    q, angles = (_random(*shape, dtype=torch.float32) for shape in ((5, 4, 16), (5, 8)))
    both = torch.cat([angles, angles], -1)[None, :, None]

    def run(operators: Operators, place: Place) -> list[Tensor]:
        turned = operators.rotary_mul(place(q[None]), place(both.cos()), place(both.sin()))
        return [turned.squeeze(0)]

    def wanted() -> list[Tensor]:
        return [reference.rotary(q, q, angles.cos(), angles.sin())[0]]

    return Case("npu_rotary_mul", "float32", run, wanted, _SLACK[torch.float32])


class _Scene:
    """Pages of three rows, far apart and in falling order."""

    def __init__(self, dtype: torch.dtype, dim: int) -> None:
        self.dtype, self.dim, self.scale = dtype, dim, 1 / math.sqrt(dim)
        self.k, self.v = (_random(PAGES, PAGE, KV_HEADS, dim, dtype=dtype) for _ in range(2))
        self.table = torch.zeros(len(LENGTHS), 4, dtype=torch.int32)
        pages = iter(range(PAGES - 1, 0, -2))
        for row, length in enumerate(LENGTHS):
            for column in range(-(-length // PAGE)):
                self.table[row, column] = next(pages)

    def query(self, counts: Sequence[int]) -> Tensor:
        return _random(sum(counts), HEADS, self.dim, dtype=self.dtype)

    def wanted(
        self,
        rows: Sequence[int],
        counts: Sequence[int],
        window: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of some of the rows, `counts` tokens each. [tokens, heads, dim]"""
        starts = torch.tensor([0, *counts]).cumsum(0)
        contexts = torch.tensor([LENGTHS[r] - c for r, c in zip(rows, counts, strict=True)])
        return reference.paged_attention(
            *(self.query(counts).float(), self.k.float(), self.v.float()),
            *(self.table[list(rows)], starts, contexts, self.scale, window, 0.0, sinks),
        )

    def pages(self, place: Place) -> tuple[Tensor, Tensor]:
        return place(self.k).flatten(2), place(self.v).flatten(2)


def _attention(dtype: torch.dtype, dim: int, kind: str) -> Iterator[Case]:
    scene, slack, operator = _Scene(dtype, dim), _SLACK[dtype], "npu_fused_infer_attention_score"
    rows = range(len(LENGTHS))

    def single(operators: Operators, place: Place) -> list[Tensor]:
        query = place(scene.query([1] * len(rows)).unsqueeze(1))
        lengths, table = list(LENGTHS), place(scene.table)
        pages = scene.pages(place)
        out = operators.attend_single(query, *pages, table, lengths, KV_HEADS, scene.scale)
        return [out.squeeze(1)]

    if dim == 64:
        yield _sinks(scene, f"{operator}_v2", kind)
    yield Case(
        operator,
        f"one token a row, {kind}",
        single,
        lambda: [scene.wanted(rows, [1] * len(rows), 0)],
        slack,
    )
    for window in (0, 20):
        seen = f"window of {window}, {kind}" if window else kind
        yield _one_row(scene, operator, seen, window)
        if dim == 128:
            yield _together(scene, operator, seen, window)


def _one_row(scene: _Scene, operator: str, kind: str, window: int) -> Case:
    row, count = 1, COUNTS[1]

    def run(operators: Operators, place: Place) -> list[Tensor]:
        query = place(scene.query([count]).unsqueeze(0))
        table = place(scene.table[row : row + 1])
        pages = scene.pages(place)
        lengths = [LENGTHS[row]]
        out = operators.attend_rows(query, *pages, table, lengths, KV_HEADS, scene.scale, window)
        return [out.squeeze(0)]

    def wanted() -> list[Tensor]:
        return [scene.wanted([row], [count], window)]

    return Case(operator, f"one row, {kind}", run, wanted, _SLACK[scene.dtype])


def _together(scene: _Scene, operator: str, kind: str, window: int) -> Case:
    def run(operators: Operators, place: Place) -> list[Tensor]:
        ends = torch.tensor(COUNTS).cumsum(0).tolist()
        query, table = place(scene.query(COUNTS)), place(scene.table)
        pages = scene.pages(place)
        return [
            operators.attend_together(
                query, *pages, table, ends, list(LENGTHS), KV_HEADS, scene.scale, window
            )
        ]

    def wanted() -> list[Tensor]:
        return [scene.wanted(range(len(LENGTHS)), COUNTS, window)]

    return Case(operator, f"rows together, {kind}", run, wanted, _SLACK[scene.dtype])


def _sinks(scene: _Scene, operator: str, kind: str) -> Case:
    """Single tokens, each twice, because a window holds for several tokens only."""
    rows, window = range(len(LENGTHS)), 20
    sinks = _random(HEADS, dtype=torch.bfloat16)

    def run(operators: Operators, place: Place) -> list[Tensor]:
        query = place(scene.query([1] * len(rows)).unsqueeze(1).repeat(1, 2, 1, 1))
        where = (place(scene.table), list(LENGTHS), KV_HEADS, scene.scale, window)
        return [operators.attend_rows(query, *scene.pages(place), *where, place(sinks))[:, 1]]

    def wanted() -> list[Tensor]:
        return [scene.wanted(rows, [1] * len(rows), window, sinks.float())]

    return Case(
        operator, f"a window of {window} and sinks, {kind}", run, wanted, _SLACK[scene.dtype]
    )


def _latents(dtype: torch.dtype, kind: str) -> Iterator[Case]:
    """All heads share one vector of 512 numbers and one turned key of 64."""
    heads, table, scale = 32, _Scene(dtype, 64).table, 1 / math.sqrt(192)
    latents, keys = (_random(PAGES, PAGE, width, dtype=dtype) for width in (512, 64))

    def case(counts: Sequence[int], name: str, is_fractal: bool = False) -> Case:
        total, is_single = sum(counts), set(counts) == {1}
        q, turned = (_random(total, heads, width, dtype=dtype) for width in (512, 64))
        ends = torch.tensor(counts).cumsum(0).tolist()

        def run(operators: Operators, place: Place) -> list[Tensor]:
            one, two = (place(part.unsqueeze(1) if is_single else part) for part in (q, turned))
            where = (place(table), None if is_single else ends, list(LENGTHS), scale)
            pages = (latents, keys)
            if is_fractal:  # one head
                pages = (as_fractal(latents).unsqueeze(1), as_fractal(keys).unsqueeze(1))
            out = operators.attend_latents(one, two, place(pages[0]), place(pages[1]), *where)
            return [out.squeeze(1) if is_single else out]

        def wanted() -> list[Tensor]:
            starts = torch.tensor([0, *ends])
            contexts = torch.tensor([n - c for n, c in zip(LENGTHS, counts, strict=True)])
            one, two, three, four = (part.float() for part in (q, turned, latents, keys))
            where = (table, starts, contexts, scale)
            return [reference.latent_attention(one, two, three, four, *where)]

        operator = "npu_fused_infer_attention_score"
        return Case(operator, f"over latents, {name}, {kind}", run, wanted, _SLACK[dtype])

    yield case((1, 1, 1), "one token a row")
    yield case((16, 3, 5), "rows together")
    yield case((1, 1, 1), "fractal pages, one token a row", is_fractal=True)
    yield case((16, 3, 5), "fractal pages, rows together", is_fractal=True)


def _sparse(dtype: torch.dtype, kind: str) -> Iterator[Case]:
    """Numbers whose sums are the same in any order, so that all choose the same positions."""
    heads, top, table, counts = 16, 64, _Scene(dtype, 64).table, COUNTS
    total, ends = sum(counts), torch.tensor(counts).cumsum(0)
    small = [
        torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        for shape in ((total, 4, 128), (PAGES, PAGE, 1, 128), (total, 4))
    ]
    rows = (table, ends.int(), torch.tensor(LENGTHS, dtype=torch.int32))
    sides = (torch.cat([torch.zeros(1), ends]).long(), torch.tensor(LENGTHS) - torch.tensor(counts))

    def bits() -> Tensor:
        q, keys, shares = (part.float() for part in small)
        plain, turning = keys[:, :, 0, :64], keys[:, :, 0, 64:]
        parts = (q[..., :64], q[..., 64:], shares, plain, turning)
        return reference.choose_positions(*parts, table, *sides, top)

    def chosen() -> Tensor:
        seen = reference.unpack_bits(bits())
        found = torch.full((total, 1, top), -1, dtype=torch.int32)
        for token, line in enumerate(seen):
            places = line.nonzero()[:, 0].int()
            found[token, 0, : len(places)] = places
        return found

    def choose(operators: Operators, place: Place) -> list[Tensor]:
        q, keys, shares = map(place, small)
        of_rows, ends, lengths = map(place, rows)
        found = operators.choose_positions(q, keys, shares, of_rows, ends, lengths, top)
        return [found.sort(-1, descending=True).values]

    def chosen_down() -> list[Tensor]:
        return [chosen().sort(-1, descending=True).values]

    yield Case("npu_lightning_indexer", kind, choose, chosen_down, 0.0)
    latents, keys = (_random(PAGES, PAGE, 1, width, dtype=dtype) for width in (512, 64))
    q, turned = (_random(total, heads, width, dtype=dtype) for width in (512, 64))
    scale, places = 1 / math.sqrt(192), chosen()

    def attend(operators: Operators, place: Place) -> list[Tensor]:
        one, two, three, four = map(place, (q, turned, latents, keys))
        where, ends, lengths = map(place, rows)
        given = (place(places), where, ends, lengths, scale)
        return [operators.attend_chosen(one, two, three, four, *given)]

    def attended() -> list[Tensor]:
        one, two, three, four = (
            part.float() for part in (q, turned, latents[:, :, 0], keys[:, :, 0])
        )
        return [reference.latent_attention(one, two, three, four, table, *sides, scale, bits())]

    yield Case("npu_sparse_flash_attention", kind, attend, attended, _SLACK[dtype])


def _experts(dtype: torch.dtype, kind: str) -> Iterator[Case]:
    tokens, per_token, experts, dim = 6, 2, 4, 64
    x, weight = _random(tokens, dim, dtype=dtype), _random(experts, dim, 32, dtype=dtype)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    ids = ids[:, :per_token].to(torch.int32)
    shares = _random(tokens, per_token, dtype=dtype)
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
        lambda ops, place: ops.init_routing(place(x), place(ids), 0, experts, experts),
        lambda: [rows, places, counts],
        0.0,
    )
    yield Case(
        "npu_grouped_matmul",
        kind,
        lambda ops, place: [ops.grouped_matmul(place(rows), place(weight), place(counts))],
        multiplied,
        _SLACK[dtype],
    )
    yield Case(
        "npu_moe_token_unpermute",
        kind,
        lambda ops, place: [ops.token_unpermute(place(rows), place(places), place(shares))],
        together,
        _SLACK[dtype],
    )


def products() -> Iterator[Case]:
    """Of 8-bit weights and activations rounded to 8 bits."""
    for dtype in (torch.bfloat16, torch.float16):
        yield from _products(dtype, str(dtype).removeprefix("torch."))


def _products(dtype: torch.dtype, kind: str) -> Iterator[Case]:
    x, scale = _random(5, 64, dtype=dtype), _random(32, dtype=torch.float32).abs() / 64
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
        _SLACK[dtype],
    )
    yield Case(
        "npu_quant_matmul",
        f"with a bias, {kind}",
        measured,
        lambda: [(total + bias).float() * scale],
        _SLACK[dtype],
    )
    many = torch.stack([columns, columns.flip(1)])
    factors = torch.stack([scale, scale.flip(0)])
    factors = factors.to(dtype if dtype == torch.bfloat16 else torch.float32)
    counts = torch.tensor([2, 3])

    def by_group(ops: Operators, place: Place) -> list[Tensor]:
        given = (place(counts), place(factors), place(units), dtype)
        return [ops.grouped_quant_matmul(place(numbers), ops.cast_fractal(place(many)), *given)]

    each = [numbers[:2].int() @ many[0].int(), numbers[2:].int() @ many[1].int()]
    wanted = torch.cat([part.float() * factors[at].float() for at, part in enumerate(each)])
    yield Case(
        "npu_grouped_matmul",
        f"of 8 bits, {kind}",
        by_group,
        lambda: [wanted * units.unsqueeze(1)],
        _SLACK[dtype],
    )
    yield Case(
        "npu_format_cast",
        kind,
        lambda ops, place: [ops.cast_fractal(place(columns))],
        lambda: [columns],
        0.0,
    )
