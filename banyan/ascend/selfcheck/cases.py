"""Cases of the self-check: one call of an operator each, and the result of plain torch.

Norms, rotation, attention over pages, latent attention and its fused prologue; experts, and
products by int8 and int4 weights.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import FRACTAL, LATENT_DIM, LATENT_ROPE_DIM
from banyan.ascend.ops.latent_contracts import (
    DIMS,
    FRACTAL_PAGES,
    PLAIN,
    PLAIN_DIM,
    PLAIN_PAGES,
    QUERIES,
    QUERY_RANK,
    WHOLLY,
    PrologWeights,
)
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.product_contracts import FOUR_BIT_GROUP
from banyan.ascend.ops.products import PackedFourBits
from banyan.base.errors import BanyanError
from banyan.ops import reference
from banyan.ops.activation_quant import BLOCK, FOUR_BITS, FourBits
from banyan.ops.stored import StoredWeight

Place = Callable[[Tensor], Tensor]
"""Brings a tensor to the device."""


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        operator: torch_npu's name; `name` identifies the case.
        run: on a device; wanted: on the host, in float32 where the operator computes so.
        slack: how far results may be apart.
    """

    operator: str
    name: str
    run: Callable[[Operators, Place], Sequence[Tensor]]
    wanted: Callable[[], Sequence[Tensor]]
    slack: float


@dataclass(frozen=True)
class CaseOutcome:
    """How a case ended; `worst` is the largest difference, `why` is empty where it is all right."""

    case: Case
    worst: float
    why: str = ""


SLACK = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""Tolerance of a result, absolute and relative: kernels add in another order."""


def try_out(case: Case, operators: Operators, place: Place) -> CaseOutcome:
    """Run a case and compare; an error of the device is an outcome too."""
    try:
        found = [result.cpu() for result in case.run(operators, place)]
    except (BanyanError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        return CaseOutcome(case, math.inf, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    worst = 0.0
    for got, wanted in zip(found, case.wanted(), strict=True):
        if got.shape != wanted.shape:
            return CaseOutcome(case, math.inf, f"{list(got.shape)} instead of {list(wanted.shape)}")
        off = (got.float() - wanted.float()).abs() / (1 + wanted.float().abs())
        worst = max(worst, float(off.max().nan_to_num(nan=math.inf)))
    why = "" if worst <= case.slack else f"off by {worst:.2g}, {case.slack:.2g} is allowed"
    return CaseOutcome(case, worst, why)


def random_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


HEADS, KV_HEADS, PAGE, PAGES = 8, 2, 128, 16
LENGTHS: tuple[int, ...] = (130, 257, 5)
"""Keys of three rows, this step's included."""
COUNTS = (10, 30, 5)
_EPSILON = 1e-5


def attention_cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float16):
        kind = str(dtype).removeprefix("torch.")
        yield from _rows(dtype, kind)
        for dim in (64, 128):
            yield from _attention(dtype, dim, f"{kind}, heads of {dim}")
        yield from _latents(dtype, kind)
        yield from _sparse(dtype, kind)
    yield _rotary()
    for mode in _WEIGHT_NAMES:
        yield _prologue_case(mode)
    yield _prologue_case(WHOLLY, is_fractal=True)
    yield _fractal_scatter()


def _rows(dtype: torch.dtype, kind: str) -> Iterator[Case]:
    x, residual, weight = (
        random_tensor(*shape, dtype=dtype) for shape in ((5, 64), (64, 5), (64,))
    )
    residual = residual.t().contiguous()
    slack = SLACK[dtype]
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
    pages, updates = torch.zeros(6, 4, dtype=dtype), random_tensor(2, 4, dtype=dtype)
    places = torch.tensor([[4], [1]])

    def run(operators: Operators, place: Place) -> list[Tensor]:
        there = place(pages)
        operators.scatter(there, place(places), place(updates))
        return [there]

    def wanted() -> list[Tensor]:
        return [pages.index_copy(0, places[:, 0], updates)]

    return Case("npu_scatter_nd_update_", kind, run, wanted, 0.0)


def _rotary() -> Case:
    q, angles = (random_tensor(*shape, dtype=torch.float32) for shape in ((5, 4, 16), (5, 8)))
    both = torch.cat([angles, angles], -1)[None, :, None]

    def run(operators: Operators, place: Place) -> list[Tensor]:
        turned = operators.rotary_mul(place(q[None]), place(both.cos()), place(both.sin()))
        return [turned.squeeze(0)]

    def wanted() -> list[Tensor]:
        return [reference.rotary(q, q, angles.cos(), angles.sin())[0]]

    return Case("npu_rotary_mul", "float32", run, wanted, SLACK[torch.float32])


class _Scene:
    """Pages of three rows, far apart and in falling order."""

    def __init__(self, dtype: torch.dtype, dim: int) -> None:
        self.dtype, self.dim, self.scale = dtype, dim, 1 / math.sqrt(dim)
        self.k, self.v = (random_tensor(PAGES, PAGE, KV_HEADS, dim, dtype=dtype) for _ in range(2))
        self.table = torch.zeros(len(LENGTHS), 4, dtype=torch.int32)
        pages = iter(range(PAGES - 1, 0, -2))
        for row, length in enumerate(LENGTHS):
            for column in range(-(-length // PAGE)):
                self.table[row, column] = next(pages)

    def query(self, counts: Sequence[int]) -> Tensor:
        return random_tensor(sum(counts), HEADS, self.dim, dtype=self.dtype)

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
            self.query(counts).float(),
            self.k.float(),
            self.v.float(),
            self.table[list(rows)],
            starts,
            contexts,
            self.scale,
            window,
            0.0,
            sinks,
        )

    def pages(self, place: Place) -> tuple[Tensor, Tensor]:
        return place(self.k).flatten(2), place(self.v).flatten(2)


def _attention(dtype: torch.dtype, dim: int, kind: str) -> Iterator[Case]:
    scene, slack, operator = _Scene(dtype, dim), SLACK[dtype], "npu_fused_infer_attention_score"
    rows = range(len(LENGTHS))

    def single(operators: Operators, place: Place) -> list[Tensor]:
        query = place(scene.query([1] * len(rows)).unsqueeze(1))
        lengths, table = list(LENGTHS), place(scene.table)
        pages = scene.pages(place)
        out = operators.attention.attend_single(
            query, *pages, table, lengths, KV_HEADS, scene.scale
        )
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
        out = operators.attention.attend_rows(
            query, *pages, table, lengths, KV_HEADS, scene.scale, window
        )
        return [out.squeeze(0)]

    def wanted() -> list[Tensor]:
        return [scene.wanted([row], [count], window)]

    return Case(operator, f"one row, {kind}", run, wanted, SLACK[scene.dtype])


def _together(scene: _Scene, operator: str, kind: str, window: int) -> Case:
    def run(operators: Operators, place: Place) -> list[Tensor]:
        ends = torch.tensor(COUNTS).cumsum(0).tolist()
        query, table = place(scene.query(COUNTS)), place(scene.table)
        pages = scene.pages(place)
        return [
            operators.attention.attend_together(
                query, *pages, table, ends, list(LENGTHS), KV_HEADS, scene.scale, window
            )
        ]

    def wanted() -> list[Tensor]:
        return [scene.wanted(range(len(LENGTHS)), COUNTS, window)]

    return Case(operator, f"rows together, {kind}", run, wanted, SLACK[scene.dtype])


def _sinks(scene: _Scene, operator: str, kind: str) -> Case:
    """Single tokens, each twice, because a window holds for several tokens only."""
    rows, window = range(len(LENGTHS)), 20
    sinks = random_tensor(HEADS, dtype=torch.bfloat16)

    def run(operators: Operators, place: Place) -> list[Tensor]:
        query = place(scene.query([1] * len(rows)).unsqueeze(1).repeat(1, 2, 1, 1))
        where = (place(scene.table), list(LENGTHS), KV_HEADS, scene.scale, window)
        return [
            operators.attention.attend_rows(query, *scene.pages(place), *where, place(sinks))[:, 1]
        ]

    def wanted() -> list[Tensor]:
        return [scene.wanted(rows, [1] * len(rows), window, sinks.float())]

    return Case(
        operator, f"a window of {window} and sinks, {kind}", run, wanted, SLACK[scene.dtype]
    )


def _latents(dtype: torch.dtype, kind: str) -> Iterator[Case]:
    """All heads share one vector of 512 numbers and one turned key of 64."""
    heads, table, scale = 32, _Scene(dtype, 64).table, 1 / math.sqrt(192)
    latents, keys = (random_tensor(PAGES, PAGE, width, dtype=dtype) for width in (512, 64))

    def case(counts: Sequence[int], name: str, is_fractal: bool = False) -> Case:
        total, is_single = sum(counts), set(counts) == {1}
        q, turned = (random_tensor(total, heads, width, dtype=dtype) for width in (512, 64))
        ends = torch.tensor(counts).cumsum(0).tolist()

        def run(operators: Operators, place: Place) -> list[Tensor]:
            one, two = (place(part.unsqueeze(1) if is_single else part) for part in (q, turned))
            where = (place(table), None if is_single else ends, list(LENGTHS), scale)
            pages = (latents, keys)
            if is_fractal:  # one head
                pages = (as_fractal(latents).unsqueeze(1), as_fractal(keys).unsqueeze(1))
            out = operators.attention.attend_latents(
                one, two, place(pages[0]), place(pages[1]), *where
            )
            return [out.squeeze(1) if is_single else out]

        def wanted() -> list[Tensor]:
            starts = torch.tensor([0, *ends])
            contexts = torch.tensor([n - c for n, c in zip(LENGTHS, counts, strict=True)])
            one, two, three, four = (part.float() for part in (q, turned, latents, keys))
            where = (table, starts, contexts, scale)
            return [reference.latent_attention(one, two, three, four, *where)]

        operator = "npu_fused_infer_attention_score"
        return Case(operator, f"over latents, {name}, {kind}", run, wanted, SLACK[dtype])

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
        found = operators.attention.choose_positions(q, keys, shares, of_rows, ends, lengths, top)
        return [found.sort(-1, descending=True).values]

    def chosen_down() -> list[Tensor]:
        return [chosen().sort(-1, descending=True).values]

    yield Case("npu_lightning_indexer", kind, choose, chosen_down, 0.0)
    latents, keys = (random_tensor(PAGES, PAGE, 1, width, dtype=dtype) for width in (512, 64))
    q, turned = (random_tensor(total, heads, width, dtype=dtype) for width in (512, 64))
    scale, places = 1 / math.sqrt(192), chosen()

    def attend(operators: Operators, place: Place) -> list[Tensor]:
        one, two, three, four = map(place, (q, turned, latents, keys))
        where, ends, lengths = map(place, rows)
        given = (place(places), where, ends, lengths, scale)
        return [operators.attention.attend_chosen(one, two, three, four, *given)]

    def attended() -> list[Tensor]:
        one, two, three, four = (
            part.float() for part in (q, turned, latents[:, :, 0], keys[:, :, 0])
        )
        return [reference.latent_attention(one, two, three, four, table, *sides, scale, bits())]

    yield Case("npu_sparse_flash_attention", kind, attend, attended, SLACK[dtype])


_PROLOGUE_TOKENS, _PROLOGUE_HEADS, _LATENT_PAGES, _LATENT_PAGE = 5, 2, 3, 128
_NORM_EPS = (1e-6, 1e-5)
_PROLOGUE_SLACK = 0.1
"""Squeezed queries are rounded to 8 bits within, and a number may be rounded to its neighbour."""
_WEIGHT_NAMES = {PLAIN: "plain weights", QUERIES: "heads of 8 bits", WHOLLY: "weights of 8 bits"}


def as_fractal(pages: Tensor) -> Tensor:
    """[pages, page size, width] token by token -> [pages, width / 16, page size, 16]"""
    return pages.unflatten(2, (-1, FRACTAL)).transpose(1, 2).contiguous()


def _fractal_scatter() -> Case:
    places = torch.tensor([130, 131, 3, 383, 129])
    generator = torch.Generator().manual_seed(9)
    latents, keys = (
        torch.randn(_PROLOGUE_TOKENS, 1, width, generator=generator).to(torch.bfloat16)
        for width in (LATENT_DIM, LATENT_ROPE_DIM)
    )

    def run(operators: Operators, place: Place) -> list[Tensor]:
        one, two = (place(as_fractal(part[:, :, 0])) for part in empty_pages())
        operators.latents.scatter_pages(place(latents), place(keys), (one, two), place(places))
        return [one, two]

    def wanted() -> list[Tensor]:
        pages = [part[:, :, 0] for part in empty_pages()]
        for part, values in zip(pages, (latents, keys), strict=True):
            part.flatten(0, 1)[places] = values[:, 0]
        return [as_fractal(part) for part in pages]

    return Case("npu_scatter_pa_kv_cache", "fractal pages, bfloat16", run, wanted, 0.0)


def _prologue_case(mode: int, is_fractal: bool = False) -> Case:
    pages_lie = FRACTAL_PAGES if is_fractal else PLAIN_PAGES

    def run(operators: Operators, place: Place) -> list[Tensor]:
        x, weights, gammas, turns, places = inputs(mode)
        there = replace(
            weights,
            squeeze=operators.cast_fractal(place(weights.squeeze)),
            query=operators.cast_fractal(place(weights.query)),
            latent=operators.cast_fractal(place(weights.latent)),
            keys=place(weights.keys),
            scales=tuple(None if s is None else place(s) for s in weights.scales),
        )
        units = None
        rows = place(x)
        if mode == WHOLLY:
            rows, units = operators.dynamic_quant(rows)
            units = units.unsqueeze(1)
        latents, keys = empty_pages()
        pages = (place(latents), place(keys))
        norms = (place(gammas[0]), place(gammas[1]))
        angles = (place(turns[0]), place(turns[1]))
        given = (rows, units, there, norms, angles, pages, place(places), _NORM_EPS)
        query, turned, normed, factors = operators.latents.mla_prolog(
            *given, has_norm=True, mode=pages_lie
        )
        if mode != PLAIN:
            normed = normed.float() * factors
        return [query, turned, normed, *pages]

    def wanted() -> list[Tensor]:
        *queries, latents, keys = _prologue_wanted(mode)
        pages = [latents, keys]
        if is_fractal:  # in the same memory
            pages = [as_fractal(part[:, :, 0]).view(part.shape) for part in pages]
        return [*queries, *pages]

    name = f"{_WEIGHT_NAMES[mode]}, {'fractal pages, ' if is_fractal else ''}bfloat16"
    return Case("npu_mla_prolog_v3", name, run, wanted, _PROLOGUE_SLACK)


def _prologue_wanted(mode: int) -> list[Tensor]:
    x, weights, gammas, (sin, cos), places = inputs(mode)
    squeeze, query, latent = (
        part.float() if scale is None else part.float() * scale
        for part, scale in zip(
            (weights.squeeze, weights.query, weights.latent), weights.scales, strict=True
        )
    )
    angles = tuple(part[:, : LATENT_ROPE_DIM // 2].float() for part in (cos, sin))
    normed = reference.rms_norm(x.float() @ squeeze, gammas[0].float(), _NORM_EPS[0])
    heads = (normed @ query).unflatten(1, (_PROLOGUE_HEADS, -1))
    plain, turning = heads.split([PLAIN_DIM, LATENT_ROPE_DIM], -1)
    kept, key = (x.float() @ latent).split([LATENT_DIM, LATENT_ROPE_DIM], -1)
    halves = [part.unflatten(-1, (-1, 2)).mT.flatten(-2) for part in (turning, key.unsqueeze(1))]
    turned, key = reference.rotary(*halves, *angles)
    pages = empty_pages()
    for part, values in zip(
        pages, (reference.rms_norm(kept, gammas[1].float(), _NORM_EPS[1]), key), strict=True
    ):
        part.flatten(0, 2)[places] = values.flatten(1).to(part.dtype)
    in_space = torch.einsum("thp,hpr->thr", plain, weights.keys.float())
    return [in_space, turned, normed, *pages]


def empty_pages() -> tuple[Tensor, Tensor]:
    latents = torch.zeros(_LATENT_PAGES, _LATENT_PAGE, 1, LATENT_DIM, dtype=torch.bfloat16)
    return latents, latents[..., :LATENT_ROPE_DIM].contiguous()


Inputs = tuple[Tensor, PrologWeights, tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]


@cache
def inputs(mode: int) -> Inputs:
    """x, weights, gammas, sin and cos, places."""
    dim, half = DIMS[0], torch.bfloat16
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def matrix(inputs: int, outputs: int, is_rounded: bool) -> tuple[Tensor, Tensor | None]:
        """A narrow one, side by side: that is quicker to make. Sums of it are about one."""
        narrow = drawn(inputs, 64).repeat(1, outputs // 64)
        if not is_rounded:
            return (narrow * inputs**-0.5).to(half), None
        scale = (1 + torch.arange(outputs).view(1, -1) % 7) / 4 / 32 * inputs**-0.5
        return (narrow * 32).round().clamp(-127, 127).to(torch.int8), scale

    squeeze, of_squeeze = matrix(dim, QUERY_RANK, mode == WHOLLY)
    width = PLAIN_DIM + LATENT_ROPE_DIM
    query, of_query = matrix(QUERY_RANK, _PROLOGUE_HEADS * width, mode != PLAIN)
    latent, of_latent = matrix(dim, LATENT_DIM + LATENT_ROPE_DIM, mode == WHOLLY)
    keys = (drawn(_PROLOGUE_HEADS, PLAIN_DIM, LATENT_DIM) * PLAIN_DIM**-0.5).to(half)
    scales = (of_squeeze, of_query, of_latent)
    gammas = ((1 + drawn(QUERY_RANK) / 4).to(half), (1 + drawn(LATENT_DIM) / 4).to(half))
    angles = drawn(_PROLOGUE_TOKENS, LATENT_ROPE_DIM // 2).repeat(1, 2)
    turns = (angles.sin().to(half), angles.cos().to(half))
    places = torch.tensor([130, 131, 3, 383, 129])
    weights = PrologWeights(mode, squeeze, query, keys, latent, scales)
    return drawn(_PROLOGUE_TOKENS, dim).to(half), weights, gammas, turns, places


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
