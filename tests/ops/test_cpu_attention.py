"""Compiled attention against the plain one, and against itself in every other shape of a step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from banyan.ops import reference
from banyan.ops.cpu.paged_attention import CACHE_TYPES, PagedAttention, rounds_here
from banyan.ops.pages import FLOAT8, stored_width, to_numbers, to_stored

SCALE = 0.3
TOLERANCE = 2e-5
MOST_BY_ROUNDING = 2e-2
"""Of values up to 4, rounded to 8 bits."""
Spans = Sequence[tuple[int, int, int]]
"""(row, first, last) of stretches whose tokens see each other."""


@pytest.fixture
def attention(library):
    return PagedAttention(library)


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    page_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    dtype: torch.dtype = torch.float32
    has_sinks: bool = False
    unit: float = 1.0
    rounds: bool = False

    @property
    def tolerance(self) -> dict[str, float]:
        most = MOST_BY_ROUNDING if self.rounds else TOLERANCE
        return {"rtol": most, "atol": most}


class World:
    """Requests with a whole history of q, k and v; what is in no request's past is NaN.

    Args:
        shared: tokens that all requests begin with, in pages that all of them use.
    """

    def __init__(self, shape: Shape, lengths: list[int], shared: int = 0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.lengths = shape, lengths
        pages = [math.ceil(length / shape.page_size) for length in lengths]
        common = shared // shape.page_size
        order = (torch.randperm(sum(pages) + 1, generator=generator) + 1).tolist()
        prefix = [order.pop() for _ in range(common)]
        self.num_pages = sum(pages) + 2
        self.tables = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32)
        heads = shape.kv_heads * shape.group
        self.sinks = torch.linspace(-3, 5, heads) if shape.has_sinks else None
        self.q, self.k, self.v = [], [], []
        for row, length in enumerate(lengths):
            mine = prefix + [order.pop() for _ in range(pages[row] - common)]
            self.tables[row, : pages[row]] = torch.tensor(mine)
            self.q.append(torch.randn(length, heads, shape.head_dim, generator=generator))
            k, v = torch.randn(2, length, shape.kv_heads, shape.head_dim, generator=generator)
            if row:
                k[:shared], v[:shared] = self.k[0][:shared], self.v[0][:shared]
            self.k.append(k)
            self.v.append(v)

    def pages(self) -> tuple[Tensor, Tensor]:
        dtype = self.shape.dtype
        width = stored_width(self.shape.head_dim, dtype)
        shape = (self.num_pages, self.shape.page_size, self.shape.kv_heads, width)
        nothing = -1 if dtype == torch.int8 else math.nan  # a scale of such bytes is no number
        k = torch.full(shape, nothing, dtype=dtype)
        return k, k.clone()

    def locations(self, row: int, first: int, last: int) -> Tensor:
        where, size = torch.arange(first, last), self.shape.page_size
        return self.tables[row].long()[where // size] * size + where % size

    def geometry(self, chunks: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """page_tables, row_starts, context_lengths of (row, first, last)."""
        starts = [0]
        for _, first, last in chunks:
            starts.append(starts[-1] + last - first)
        tables = self.tables[[row for row, _, _ in chunks]].contiguous()
        contexts = torch.tensor([first for _, first, _ in chunks], dtype=torch.int32)
        return tables, torch.tensor(starts, dtype=torch.int32), contexts

    def chunk(self, of: list[Tensor], chunks: list[tuple[int, int, int]]) -> Tensor:
        return torch.cat([of[row][first:last] for row, first, last in chunks])


def ends_of(chunks: list[tuple[int, int, int]], spans: Spans) -> Tensor | None:
    """`ends` of the tokens of some chunks, where the tokens of each span see each other."""
    found = torch.zeros(sum(last - first for _, first, last in chunks), dtype=torch.int32)
    at = 0
    for row, first, last in chunks:
        for of, begin, end in spans:
            if of == row and begin < last and end > first:
                found[at + begin - first : at + end - first] = end
        at += last - first
    return found if spans else None


def compiled(
    attention: PagedAttention, world: World, chunks: list[tuple[int, int, int]], spans: Spans = ()
) -> Tensor:
    """The chunks (row, first, last) of a step on pages that hold their past and nothing else."""
    attention.rounds = world.shape.rounds
    k_pages, v_pages = world.pages()
    past = [(row, 0, first) for row, first, _ in chunks]
    for part in (past, chunks):
        where = torch.cat([world.locations(*span) for span in part])
        k, v = world.chunk(world.k, part), world.chunk(world.v, part)
        if len(where):
            attention.write_kv(k, v, k_pages, v_pages, where, world.shape.unit)
    return attention.paged_attention(
        world.chunk(world.q, chunks),
        k_pages,
        v_pages,
        *world.geometry(chunks),
        SCALE,
        world.shape.window,
        world.shape.soft_cap,
        world.sinks,
        world.shape.unit,
        ends=ends_of(chunks, spans),
    )


def expected(world: World, chunks: list[tuple[int, int, int]], spans: Spans = ()) -> Tensor:
    """The same by the reference, on its own pages, in fp64."""
    k_pages, v_pages = (to_numbers(pages).double() for pages in world.pages())
    for row, _, last in chunks:
        where = world.locations(row, 0, last)
        dtype, unit = world.shape.dtype, world.shape.unit
        k, v = (to_numbers(to_stored(x[row][:last], dtype, unit)) for x in (world.k, world.v))
        reference.write_kv(k, v, k_pages, v_pages, where)
    return reference.paged_attention(
        world.chunk(world.q, chunks).double(),
        k_pages,
        v_pages,
        *world.geometry(chunks),
        SCALE,
        world.shape.window,
        world.shape.soft_cap,
        world.sinks,
        world.shape.unit,
        ends=ends_of(chunks, spans),
    ).float()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


SHAPES = [
    Shape(),
    Shape(group=1, head_dim=96),
    Shape(kv_heads=1, group=8, head_dim=128),
    Shape(kv_heads=1, group=50, head_dim=16),
    Shape(head_dim=80, page_size=32, soft_cap=2.5),
    Shape(group=2, head_dim=8, page_size=128, window=33),
    Shape(kv_heads=1, head_dim=256, window=300),
    Shape(kv_heads=3, page_size=64, dtype=torch.float16),
    Shape(group=5, head_dim=72, soft_cap=30.0, window=7, dtype=torch.bfloat16),
    Shape(window=1, dtype=torch.float16),
    Shape(has_sinks=True, group=4),
    Shape(has_sinks=True, window=130, soft_cap=3.0, dtype=torch.float16),
    Shape(dtype=torch.int8),
    Shape(dtype=torch.float8_e4m3fn, unit=0.03),
    Shape(group=4, head_dim=72, window=270, dtype=torch.float8_e5m2, has_sinks=True),
    Shape(group=4, head_dim=72, page_size=32, window=270, soft_cap=2.0, dtype=torch.int8),
    Shape(kv_heads=1, group=16, head_dim=128, page_size=256, dtype=torch.int8, has_sinks=True),
    Shape(kv_heads=3, page_size=64, dtype=torch.float16, rounds=True),
    Shape(group=1, head_dim=128, dtype=torch.float16, window=1, rounds=True),
    Shape(group=7, head_dim=80, dtype=torch.float16, window=131, has_sinks=True, rounds=True),
    Shape(group=4, soft_cap=3.0, window=7, dtype=torch.float16, rounds=True),
    Shape(kv_heads=1, group=2, head_dim=256, page_size=32, dtype=torch.bfloat16, rounds=True),
    Shape(kv_heads=1, group=50, head_dim=16, dtype=torch.bfloat16, window=300, rounds=True),
]
ROUNDED = [shape for shape in SHAPES if shape.rounds]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_steps_equal_the_reference_whatever_lies_in_unused_slots(attention, shape):
    world = World(shape, [1, 17, 600, 555, 40, 1030, 90])
    chunks = [
        *((0, 0, 1), (1, 16, 17), (2, 599, 600), (3, 500, 555)),
        *((4, 0, 40), (5, 1025, 1030), (6, 3, 90)),
    ]

    out = compiled(attention, world, chunks)

    wanted = expected(world, chunks)
    torch.testing.assert_close(out, wanted, **shape.tolerance)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if not shape.has_sinks], ids=str)
def test_tokens_of_a_span_see_each_other_in_chunks_of_any_size(attention, shape):
    world = World(shape, [600, 90, 40])
    spans = [(0, 200, 270), (0, 300, 301), (1, 0, 30), (1, 40, 90), (2, 39, 40)]
    whole = [(0, 0, 600), (1, 0, 90), (2, 0, 40)]

    out = compiled(attention, world, whole, spans)

    torch.testing.assert_close(out, expected(world, whole, spans), **shape.tolerance)
    rows = dict(zip((row for row, _, _ in whole), out.split([600, 90, 40]), strict=True))
    for chunk in [
        (0, 0, 200),
        (0, 200, 270),
        (0, 190, 290),
        (0, 599, 600),
        (1, 30, 90),
        (2, 3, 40),
    ]:
        alone = compiled(attention, world, [chunk], spans)
        if not shape.rounds:
            assert torch.equal(bits(alone), bits(rows[chunk[0]][chunk[1] : chunk[2]])), chunk


@pytest.mark.parametrize(
    "shape",
    [Shape(group=4, head_dim=24, window=-1), Shape(head_dim=72, window=-1, dtype=torch.int8)],
    ids=str,
)
def test_positions_that_are_left_out_at_the_beginning_may_be_no_numbers(attention, shape):
    world = World(shape, [2, 17, 600, 555, 40])
    chunks = [(0, 1, 2), (1, 16, 17), (2, 599, 600), (3, 500, 555), (4, 1, 40)]
    for of in (world.k, world.v):
        for row in of:
            row[0] = math.nan

    out = compiled(attention, world, chunks)

    wanted = expected(world, chunks)
    torch.testing.assert_close(out, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_is_the_same_bit_for_bit_alone_in_a_batch_and_in_any_chunks(attention, shape):
    world = World(shape, [530, 61, 300])
    whole = [compiled(attention, world, [(row, 0, n)]) for row, n in enumerate(world.lengths)]

    together = compiled(attention, world, [(row, 0, n) for row, n in enumerate(world.lengths)])
    assert torch.equal(bits(together), bits(torch.cat(whole)))
    for cuts in ([1, 2, 16, 255, 256, 257, 300, 511, 529, 530], [37, 400, 530]):
        first = 0
        for last in cuts:
            chunks = [(1, 60, 61), (0, first, last), (2, 298, 300)]
            out = compiled(attention, world, chunks)
            wanted = torch.cat([whole[row][a:b] for row, a, b in chunks])
            assert torch.equal(bits(out), bits(wanted)), (first, last)
            first = last


@pytest.mark.parametrize("shape", SHAPES[:2] + SHAPES[6:9] + SHAPES[14:17] + ROUNDED, ids=str)
def test_rows_that_share_their_first_pages_are_the_same_bit_for_bit(attention, shape):
    lengths = [900, 801, 1400, 768, 1025, 900, 833, 912, 1000]
    world = World(shape, lengths, shared=768)
    chunks = [(row, n - 1 - row % 3, n) for row, n in enumerate(lengths)]

    together = compiled(attention, world, chunks)
    attention.shares_prefixes = False
    apart = compiled(attention, world, chunks)

    assert torch.equal(bits(together), bits(apart))
    torch.testing.assert_close(together, expected(world, chunks), **shape.tolerance)


@pytest.mark.parametrize("tokens", [1, 2, 17, 67])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 72, 256])
def test_pages_of_bytes_hold_the_bits_of_the_reference(attention, head_dim, tokens):
    kv_heads, page_size = 3, 32
    shape = Shape(kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=torch.int8)
    world = World(shape, [tokens])
    k, v = world.k[0], world.v[0]
    k *= torch.tensor(10.0) ** torch.arange(-50, 17)[:tokens, None, None]
    v[::2, 0], v[1::2, 1] = 0.0, 2.0**-101
    v[::3, 2, head_dim // 2], v[1::3, 2, -1] = 3e38, -1e9
    v[-1, 0, 0], k[-1, 1, 1] = math.inf, math.nan
    pages, wanted = world.pages(), world.pages()
    where = world.locations(0, 0, tokens)

    attention.write_kv(k, v, *pages, where)
    reference.write_kv(k, v, *wanted, where)

    blocks = head_dim * page_size
    for of, by_token, is_k in zip(pages, wanted, (True, False), strict=True):
        of = of.view(-1, kv_heads, blocks + 4 * page_size)
        numbers = of[..., :blocks].unflatten(-1, (head_dim, page_size) if is_k else (-1, head_dim))
        numbers = (numbers.mT if is_k else numbers).transpose(1, 2)
        scales = of[..., blocks:].reshape(-1, kv_heads, page_size, 4).transpose(1, 2)
        assert torch.equal(scales, by_token[..., head_dim:])
        is_number = ~scales.contiguous().view(torch.float32).isnan()
        assert torch.equal(numbers * is_number, by_token[..., :head_dim] * is_number)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("unit", [1.0, 0.3])
def test_pages_of_8_bit_floats_hold_the_bits_of_the_reference(attention, dtype, unit):
    shape = Shape(kv_heads=1, head_dim=64, page_size=16, dtype=dtype)
    world = World(shape, [40])
    bits = torch.randint(-(1 << 31), 1 << 31, (2, 20, 1, 64), dtype=torch.int64)
    world.k[0][:20], world.v[0][:20] = bits.to(torch.int32).view(torch.float32)  # any float
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()  # and what lies between
    near = torch.cat([codes, (codes + codes.roll(1)) / 2, codes * 1.0001, -codes]) * unit
    world.k[0][20:36, 0] = near[: 16 * 64].view(16, 64)
    world.v[0][20:36, 0] = near[: 16 * 64].flip(0).view(16, 64)
    k_pages, v_pages = world.pages()
    where = world.locations(0, 0, 40)

    attention.write_kv(world.k[0], world.v[0], k_pages, v_pages, where, unit)

    for x, pages, is_k in ((world.k[0], k_pages, True), (world.v[0], v_pages, False)):
        wanted = to_stored(x, dtype, unit).view(torch.uint8)
        octets = pages.view(torch.uint8).reshape(len(pages), -1)
        by_token = octets.view(-1, 64, 16).mT if is_k else octets.view(-1, 16, 64)
        found = by_token.reshape(-1, 1, 64)[where]
        is_none = to_stored(x, dtype, unit).float().isnan()
        assert torch.equal(found[~is_none], wanted[~is_none])
        assert found.contiguous().view(dtype).float()[is_none].isnan().all()


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape(dtype=dtype) for dtype in (torch.float32, torch.int8, *FLOAT8)),
        *(Shape(dtype=torch.float16, group=group, rounds=True) for group in (1, 3)),
        Shape(dtype=torch.bfloat16, rounds=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("of", ["k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [3, 4])
def test_a_page_with_something_that_is_not_a_number_spoils_its_own_request_alone(
    attention, shape, of, bad, at
):
    """And of that no token before it, though its key lies beside theirs."""
    world = World(shape, [40, 40])
    getattr(world, of)[0][at] = bad

    out = compiled(attention, world, [(0, 0, 40), (1, 0, 40)])

    assert out[:at].isfinite().all()
    assert not out[at:40].isfinite().any()
    assert out[40:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_keeps_more_of_queries_and_keys_than_bf16_would(attention, dtype):
    """With logits of up to 60 what bf16 leaves out of a product is several percent of a weight."""
    if not rounds_here(attention.library, CACHE_TYPES[dtype], 64):
        pytest.skip("no attention that rounds here")
    world = World(Shape(kv_heads=1, dtype=dtype, rounds=True), [300])
    world.q[0] *= 8
    world.v[0] = (world.v[0] > 0).float()

    out = compiled(attention, world, [(0, 0, 300)])

    error = (out - expected(world, [(0, 0, 300)])).square().mean().sqrt()
    assert error < 1.5e-3  # 3e-3 and more with bf16


@pytest.mark.parametrize("group", [1, 3, 5, 7, 12, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounded_sums_do_not_depend_on_how_many_queries_are_at_work(attention, dtype, group):
    """Few go by vectors; many by whole registers, and what is left of them by parts of one."""
    shape = Shape(kv_heads=2, group=group, head_dim=80, window=290, dtype=dtype, rounds=True)
    world = World(shape, [620])
    whole = compiled(attention, world, [(0, 0, 620)])

    for first, last in (
        (0, 1),
        (255, 256),
        (256, 257),
        (300, 302),
        (511, 516),
        (590, 597),
        (7, 70),
    ):
        out = compiled(attention, world, [(0, first, last)])
        assert torch.equal(bits(out), bits(whole[first:last])), (first, last)
    torch.testing.assert_close(whole, expected(world, [(0, 0, 620)]), **shape.tolerance)


@pytest.mark.parametrize("group", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_query_of_zeros_weighs_all_keys_alike(attention, dtype, group):
    shape = Shape(kv_heads=1, group=group, dtype=dtype, rounds=True)
    world = World(shape, [37])
    world.q[0][:] = 0
    for chunk in ((0, 0, 37), (0, 20, 21)):
        out = compiled(attention, world, [chunk])
        torch.testing.assert_close(out, expected(world, [chunk]), **shape.tolerance)


@pytest.mark.parametrize("size", [1e-30, 1e-38])
def test_tiny_exponentials_and_values_are_the_same_bit_for_bit(attention, size):
    """What lies below the normal numbers counts as zero for one query and for many."""
    shape = Shape(kv_heads=1, group=2, dtype=torch.bfloat16, rounds=True)
    world = World(shape, [90])
    world.q[0] *= 30
    world.v[0][:, :, ::2] *= size
    whole = compiled(attention, world, [(0, 0, 90)])

    for first in (3, 31, 32, 64, 89):
        out = compiled(attention, world, [(0, first, first + 1)])
        assert torch.equal(bits(out), bits(whole[first : first + 1])), first


@pytest.mark.parametrize("group", [1, 9])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_value_that_is_not_finite_spoils_its_own_dimension_alone(attention, bad, group):
    shape = Shape(kv_heads=1, group=group, dtype=torch.float16, rounds=True)
    world, sound = World(shape, [300]), World(shape, [300])
    world.v[0][270, 0, 5] = bad
    sound.v[0][270, 0, 5] = 0.0
    others = [d for d in range(64) if d != 5]

    for chunk in ((0, 0, 300), (0, 271, 272)):
        out, wanted = compiled(attention, world, [chunk]), compiled(attention, sound, [chunk])
        assert torch.equal(bits(out[..., others]), bits(wanted[..., others]))
        seen = torch.arange(chunk[1], chunk[2]) >= 270
        assert not out[seen][..., 5].isfinite().any()
        assert torch.equal(out[~seen], wanted[~seen])


def test_pages_may_be_written_over_by_padding(attention):
    shape = Shape()
    world = World(shape, [20])
    k_pages, v_pages = world.pages()
    padding = torch.zeros(5, dtype=torch.int64)

    attention.write_kv(world.k[0][:5], world.v[0][:5], k_pages, v_pages, padding)

    assert k_pages[1:].isnan().all() and v_pages[1:].isnan().all()


def test_a_recording_serves_every_step_up_to_its_size(attention):
    world = World(Shape(), [300, 290, 600])
    k_pages, v_pages = world.pages()
    for row, length in enumerate(world.lengths):
        where = world.locations(row, 0, length)
        attention.write_kv(world.k[row], world.v[row], k_pages, v_pages, where)
    q = torch.empty(12, 6, 64)
    tables = torch.zeros(8, world.tables.shape[1], dtype=torch.int32)
    starts, contexts = torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)

    def layer(x: Tensor) -> Tensor:
        return attention.paged_attention(
            x, k_pages, v_pages, tables, starts, contexts, SCALE, 0, 0.0
        )

    recording = attention.library.record(lambda: layer(layer(q)), 12, 5)
    for chunks in (
        [(0, 299, 300), (1, 289, 290)],
        [(2, 590, 600), (0, 10, 11)],
        [(2, 599, 600)],
        [(0, 299, 300), (1, 289, 290), (2, 599, 600)],
    ):
        table, start, context = world.geometry(chunks)
        tables[: len(chunks)], starts[: len(start)] = table, start
        contexts[: len(chunks)] = context
        tokens = int(start[-1])
        q[:tokens] = world.chunk(world.q, chunks)
        recording.run(tokens, len(chunks), 1)

        first = attention.paged_attention(
            q[:tokens], k_pages, v_pages, table, start, context, SCALE, 0, 0.0
        )
        second = attention.paged_attention(
            first, k_pages, v_pages, table, start, context, SCALE, 0, 0.0
        )
        assert torch.equal(bits(recording.result[:tokens]), bits(second))
