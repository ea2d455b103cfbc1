"""The Triton kernels against the reference; `triton_device.py` says where they run."""

import math

import pytest
import torch

from banyan.ops import reference
from banyan.ops.cuda import triton_attention, triton_rows
from banyan.ops.pages import FLOAT8, to_numbers, to_stored
from tests.ops.triton_device import (
    ABSENCE,
    DEVICE,
    IS_INTERPRETED,
    PAGE,
    SHAPES,
    TYPES,
    close,
    random,
)

if ABSENCE:
    pytest.skip(ABSENCE, allow_module_level=True)


def check_attention(
    rows: list[tuple[int, int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    limits: tuple[int, float],
    has_sinks: bool = False,
    page: int = PAGE,
    kept: torch.dtype | None = None,
) -> None:
    """The kernels next to the reference in float64, where what no row may see is no number.

    shape: heads, kv_heads, head_dim; limits: window, soft_cap; kept: type of the pages.
    """
    (heads, kv_heads, head_dim), (window, soft_cap) = shape, limits
    counts = torch.tensor([count for _, count in rows])
    contexts = torch.tensor([context for context, _ in rows], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32)
    columns = max(sum(row) for row in rows) // page + 2
    tables = torch.randperm(len(rows) * columns, generator=torch.Generator().manual_seed(1)) + 1
    tables = tables.view(len(rows), columns).to(torch.int32)
    places = (len(rows) * columns + 1, page)
    pages = [random(*places, kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (2, 3)]
    for row, (context, count) in enumerate(rows):
        lowest = max(0, context - window + 1) if window > 0 else -window
        dead = [*range(lowest), *range(context + count, columns * page)]
        for at in dead:
            for each in pages:
                each[tables[row, at // page].item(), at % page] = float("nan")
    pages = [to_stored(each, kept or dtype) for each in pages]
    q = random(int(counts.sum()), heads * 2, head_dim, dtype=dtype)[:, ::2]
    where = [x.to(DEVICE) for x in (tables, starts, contexts)]
    sinks = torch.linspace(-3, 4, heads, device=DEVICE) if has_sinks else None
    rest = (head_dim**-0.5, window, soft_cap, sinks)
    got = triton_attention.paged_attention.run(q, *pages, *where, *rest)
    double = [x.double() if kept is None else x for x in pages]
    want = reference.paged_attention(q.double(), *double, *where, *rest)
    close(got, want, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "limits", "has_sinks"),
    [
        ((4, 2, 64), (0, 0.0), False),
        ((6, 2, 80), (24, 0.0), True),
        ((8, 1, 128), (0, 30.0), False),
        ((2, 2, 256), (9, 5.0), True),
        ((4, 2, 8), (0, 0.0), True),
    ],
)
def test_attention_is_that_of_the_reference(rows, shape, limits, dtype, has_sinks):
    check_attention(rows, shape, dtype, limits, has_sinks)


@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize(
    ("shape", "limits", "has_sinks"),
    [
        ((4, 1, 128), (0, 0.0), False),
        ((8, 1, 64), (100, 0.0), True),
        ((2, 2, 256), (-70, 5.0), False),
    ],
)
def test_attention_reads_blocks_of_keys_that_lie_in_one_page(page, shape, limits, has_sinks):
    rows = [(290, 30), (70, 140), (75, 1), (100, 64)]
    check_attention(rows, shape, torch.float16, limits, has_sinks, page)


@pytest.mark.parametrize("rows", [[(120, 30), (300, 1)], [(300, 1), (0, 1), (257, 1)]], ids=str)
@pytest.mark.parametrize(
    ("shape", "limits"), [((4, 1, 128), (0, 0.0)), ((4, 4, 80), (40, 0.0)), ((2, 1, 256), (0, 4.0))]
)
def test_attention_reads_bytes_and_their_scales(rows, shape, limits):
    check_attention(rows, shape, torch.float16, limits, page=64, kept=torch.int8)


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (40, 0.0), (0, 3.0)])
def test_tokens_of_a_span_see_each_other(window, soft_cap):
    k_pages, v_pages = random(30, PAGE, 2, 64, seed=2), random(30, PAGE, 2, 64, seed=3)
    tables = torch.arange(1, 25, dtype=torch.int32, device=DEVICE).view(2, 12)
    starts = torch.tensor([0, 140, 170], dtype=torch.int32, device=DEVICE)
    contexts = torch.tensor([20, 60], dtype=torch.int32, device=DEVICE)
    ends = torch.zeros(170, dtype=torch.int32, device=DEVICE)
    ends[10:80], ends[120:140], ends[140:150] = 100, 160, 70
    q = random(170, 4, 64)
    rest = (tables, starts, contexts, 0.1, window, soft_cap)
    got = triton_attention.paged_attention.run(q, k_pages, v_pages, *rest, ends=ends)
    double = [x.double() for x in (q, k_pages, v_pages)]
    want = reference.paged_attention(*double, *rest, ends=ends)
    close(got, want, torch.float32)


def test_a_token_has_the_same_bits_alone_and_among_others():
    k_pages, v_pages = random(30, PAGE, 2, 64, seed=2), random(30, PAGE, 2, 64, seed=3)
    tables = torch.arange(1, 25, dtype=torch.int32, device=DEVICE).view(4, 6)
    contexts = torch.tensor([50, 3, 80, 17], dtype=torch.int32, device=DEVICE)
    q = random(4, 4, 64)
    starts = torch.arange(5, dtype=torch.int32, device=DEVICE)
    attend = triton_attention.paged_attention.run
    together = attend(q, k_pages, v_pages, tables, starts, contexts, 0.1, 0, 0.0)
    for i in range(4):
        part = slice(i, i + 1)
        alone = attend(
            q[part], k_pages, v_pages, tables[part], starts[:2], contexts[part], 0.1, 0, 0.0
        )
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_keys_and_values_are_written_where_they_belong(dtype):
    wide = random(5, 12, 80, dtype=dtype)
    k, v = wide[:, :2], wide[:, 4:6]
    locations = torch.tensor([17, 3, 95, 16, 40], device=DEVICE)
    pages = [torch.zeros(6, PAGE, 2, 80, dtype=dtype, device=DEVICE) for _ in range(4)]
    triton_attention.write_kv.run(k, v, pages[0], pages[1], locations)
    reference.write_kv(k, v, pages[2], pages[3], locations)
    assert torch.equal(pages[0], pages[2]) and torch.equal(pages[1], pages[3])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_bytes_and_their_scales_are_those_of_the_reference(dtype):
    k, v = random(9, 2, 80, dtype=dtype), random(9, 2, 80, dtype=dtype, seed=1)
    k[0], k[1, 0], k[2, 1, 5], k[3, 0, 7] = 0.0, 1e-31, float("inf"), float("nan")
    v[4] = torch.arange(-40, 40, device=DEVICE) + 0.5  # halves of the scale, among others
    v[4, :, 0] = 127.0
    pages = [torch.zeros(2, PAGE, 2, 84, dtype=torch.int8, device=DEVICE) for _ in range(4)]
    locations = torch.tensor([17, 3, 31, 16, 20, 21, 22, 23, 24], device=DEVICE)
    triton_attention.write_kv.run(k, v, *pages[:2], locations)
    reference.write_kv(k, v, *pages[2:], locations)
    for got, want in zip(pages[:2], pages[2:], strict=True):
        torch.testing.assert_close(
            to_numbers(got), to_numbers(want), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [64, 576, 2048])
def test_row_wise_ops_are_those_of_the_reference(dtype, width):
    x, residual, weight = (
        random(*s, dtype=dtype, seed=i) for i, s in enumerate([(5, width), (5, width), (width,)])
    )
    close(triton_rows.rms_norm.run(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    for got, want in zip(
        triton_rows.add_rms_norm.run(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        close(got, want, dtype)
    heads = x.view(5, -1, 32)
    close(
        triton_rows.rms_norm.run(heads, weight[:32], 1e-5),
        reference.rms_norm(heads, weight[:32], 1e-5),
        dtype,
    )
    for limit in (math.inf, 0.75):
        got = triton_rows.silu_and_mul.run(x, limit)
        close(got, reference.silu_and_mul(x, limit), dtype)
    angles = random(5, 12)
    got = triton_rows.rotary.run(heads, heads[:, :1], angles.cos(), angles.sin())
    want = reference.rotary(heads, heads[:, :1], angles.cos(), angles.sin())
    for one, other in zip(got, want, strict=True):
        close(one, other, dtype)
    asked = (heads, heads[:, :1], weight[:32], weight[32:64], 1e-5, angles.cos(), angles.sin())
    got, want = triton_rows.norm_rotary.run(*asked), reference.norm_rotary(*asked)
    for one, other in zip(got, want, strict=True):
        close(one, other, dtype)


@pytest.mark.parametrize("kind", FLOAT8, ids=str)
@pytest.mark.parametrize("rows", SHAPES[2:4], ids=str)
def test_pages_of_eight_bits_are_written_and_read_in_their_unit(rows, kind):
    counts = torch.tensor([count for _, count in rows])
    contexts = torch.tensor([context for context, _ in rows], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32)
    columns, tokens = 24, int(counts.sum())
    tables = torch.arange(1, len(rows) * columns + 1, dtype=torch.int32).view(len(rows), columns)
    shape, unit = (len(rows) * columns + 1, PAGE, 2, 64), 0.37
    dtype = torch.float16
    known = torch.arange(shape[0] * PAGE, device=DEVICE)
    kv = [100 * random(len(known), 2, 64, dtype=dtype, seed=seed) for seed in (2, 3)]
    kv[0][5, 0, :2] = torch.tensor([6e4, -6e4])  # too large for the page
    kv[1][-1, 0, :2] = torch.tensor([float("inf"), float("nan")])  # read by nobody
    pages = [torch.zeros(shape, device=DEVICE).to(kind) for _ in range(4)]
    triton_attention.write_kv.run(*kv, *pages[:2], known, unit)
    reference.write_kv(*kv, *pages[2:], known, unit)
    for got, want in zip(pages[:2], pages[2:], strict=True):
        # The interpreter (3.6) forgets to carry where a number rounds up to a power of two.
        differ = got.view(torch.uint8) != want.view(torch.uint8)
        assert differ.float().mean() < (0.05 if IS_INTERPRETED else 1e-9)
    q = random(tokens, 4, 64, dtype=dtype)
    where = [x.to(DEVICE) for x in (tables, starts, contexts)]
    rest = (0.001, 0, 0.0, None, unit)
    got = triton_attention.paged_attention.run(q, *pages[2:], *where, *rest)
    want = reference.paged_attention(q.double(), *pages[2:], *where, *rest)
    torch.testing.assert_close(got.double(), want, atol=0.3, rtol=4e-3)
