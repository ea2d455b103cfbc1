"""Attention over pages in Triton: one kernel for rows of one token, one for rows of many.

The grid depends on the numbers of rows and tokens, never on lengths, so launches can be captured. A
block of queries is some tokens of one row times the query heads of one kv head. Keys are processed
in order, in blocks aligned to their size. If few rows of one token would leave multiprocessors
idle, several programs share the keys of each row (Dao et al., Flash-Decoding, 2023).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cuda.needs import LEAST_BLOCK, declines_pages, power_of_two
from banyan.ops.pages import FLOAT8

_LOG2_E = 1 / math.log(2)
_PART = 256
"""Keys of a part, in rows of one token."""
_PROGRAMS = 512
"""Fewer programs leave multiprocessors idle: about four per multiprocessor of a large device."""


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a program.

    Attributes:
        queries: queries of a block, for rows of many tokens.
        keys: keys of a block.
        warps: warps of a program.
        stages: blocks of keys that are loaded ahead.
    """

    queries: int
    keys: int
    warps: int
    stages: int


MANY, MANY_WIDE = Tiles(128, 128, 8, 2), Tiles(32, 32, 4, 2)
"""Rows of many tokens; the second for heads of more than 128 dimensions, or of fp32."""
ONE, ONE_WIDE = Tiles(LEAST_BLOCK, 128, 4, 3), Tiles(LEAST_BLOCK, 32, 4, 2)
"""The same for rows of one token."""


@dataclass(frozen=True)
class _Call:
    """Arguments of both kernels; tensors as in `Ops.paged_attention`. scale: for logits as
    exponents of base 2, unless they are capped first."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_tables: Tensor
    context_lengths: Tensor
    out: Tensor
    sinks: Tensor | None
    numbers: tuple[float, float, float]
    """Scale, soft cap and unit."""
    window: int
    ends: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q.shape[1] // self.k_pages.shape[2]

    @property
    def given_sinks(self) -> Tensor:
        return self.q if self.sinks is None else self.sinks

    @property
    def strides(self) -> tuple[int, ...]:
        pages = (*self.k_pages.stride()[:3], *self.v_pages.stride()[:3])
        rest = (self.page_tables.stride(0), *self.out.stride()[:2])
        return *self.q.stride()[:2], *pages, *rest

    def constants(self, tiles: Tiles, wide: Tiles) -> dict[str, int | bool]:
        """tiles: for most heads; wide: smaller tiles, for large heads."""
        head_dim = self.q.shape[2]
        is_wide = head_dim > 128 or self.q.dtype == torch.float32
        chosen = wide if is_wide else tiles
        return {
            "HAS_CAP": bool(self.numbers[1]),
            "HAS_SINKS": self.sinks is not None,
            "PAGE": self.k_pages.shape[1],
            "HEAD_DIM": head_dim,
            "BLOCK_D": power_of_two(head_dim, LEAST_BLOCK),
            "GROUP": self.group,
            "BLOCK": power_of_two(self.group, chosen.queries),
            "KEYS": chosen.keys,
            "num_warps": chosen.warps,
            "num_stages": chosen.stages,
        }


def _paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tables: Tensor,
    row_starts: Tensor,
    context_lengths: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,
    unit: float = 1.0,
    paths: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    numbers = (scale, soft_cap, unit)
    scale = scale * unit if soft_cap else scale * unit * _LOG2_E
    tensors = (q, k_pages, v_pages, page_tables, context_lengths, out, sinks)
    call = _Call(*tensors, (scale, soft_cap, unit), window, ends)
    if len(q) == len(context_lengths):
        _attend_rows(call)
    else:
        _attend(call, row_starts)
    if paths is not None:
        from banyan.ops.cuda.branch_kernels import enter_branches

        pages = (k_pages, v_pages)
        enter_branches(out, q, pages, page_tables, row_starts, paths, numbers, window, sinks)
    return out


def _attend(call: _Call, row_starts: Tensor) -> None:
    from banyan.ops.cuda.attention_kernels import attend

    constants = call.constants(MANY, MANY_WIDE)
    rows, per_block = len(call.context_lengths), constants["BLOCK"] // call.group
    attend[(len(call.q) // per_block + rows, call.k_pages.shape[2])](
        call.q,
        call.k_pages,
        call.v_pages,
        call.page_tables,
        row_starts,
        call.context_lengths,
        call.out,
        call.given_sinks,
        *call.numbers,
        rows,
        *call.strides,
        call.window,
        call.context_lengths if call.ends is None else call.ends,
        HAS_ENDS=call.ends is not None,
        PER_BLOCK=per_block,
        **constants,
    )


def _attend_rows(call: _Call) -> None:
    from banyan.ops.cuda.attention_kernels import attend_rows, merge

    (rows, heads, _), (page_size, kv_heads) = call.q.shape, call.k_pages.shape[1:3]
    constants = call.constants(ONE, ONE_WIDE)
    parts = -(-call.page_tables.shape[1] * page_size // _PART)
    programs = max(1, min(parts, _PROGRAMS // (rows * kv_heads)))
    room = rows * heads * parts if programs > 1 else 0
    bests, totals = torch.empty((2, room), dtype=torch.float32, device=call.q.device)
    results = bests.new_empty((room, constants["BLOCK_D"]))
    attend_rows[(rows, kv_heads, programs)](
        call.q,
        call.k_pages,
        call.v_pages,
        call.page_tables,
        call.context_lengths,
        call.out,
        call.given_sinks,
        bests,
        totals,
        results,
        *call.numbers,
        heads,
        parts,
        programs,
        *call.strides,
        call.window,
        PART=_PART,
        IS_SPLIT=programs > 1,
        **constants,
    )
    if programs > 1:
        merge[(rows, heads)](
            bests,
            totals,
            results,
            call.context_lengths,
            call.out,
            call.given_sinks,
            call.numbers[2],
            heads,
            parts,
            *call.out.stride()[:2],
            call.window,
            **{name: constants[name] for name in ("HAS_SINKS", "HEAD_DIM", "BLOCK_D")},
            PART=_PART,
            num_warps=1,
        )


def _write_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    flat_locations: Tensor,
    unit: float = 1.0,
) -> None:
    from banyan.ops.cuda.kernels import write_pages

    tokens, kv_heads, head_dim = k.shape
    write_pages[(tokens, kv_heads)](
        k,
        v,
        k_pages,
        v_pages,
        flat_locations,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        1 / unit,
        PAGE=k_pages.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_D=power_of_two(head_dim),
        MOST=torch.finfo(k_pages.dtype).max if k_pages.dtype in FLOAT8 else 0,
        num_warps=1,
    )


paged_attention = Kernel(supports=declines_pages, run=_paged_attention, sees_ahead=True)
write_kv = Kernel(supports=declines_pages, run=_write_kv)
