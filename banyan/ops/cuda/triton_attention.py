"""Attention over pages in Triton: one kernel for rows of one token, one for rows of many.

The grid depends on the numbers of rows and tokens, never on lengths, so launches can be captured. A
block of queries is some tokens of one row times the query heads of one kv head. Keys are processed
in order, in blocks aligned to their size. If few rows of one token would leave multiprocessors
idle, several programs share the keys of each row (Dao et al., Flash-Decoding, 2023).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cuda.needs import LEAST_BLOCK, declines_pages, power_of_two
from banyan.ops.pages import FLOAT8

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1 / math.log(2)
_PART = 256
"""Keys of a part, in rows of one token."""
_MERGED_AT_ONCE = 16
"""Parts whose sums are loaded together."""
PROGRAMS = 512
"""Fewer programs leave multiprocessors idle: about four per multiprocessor of a large device."""


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a program.

    Attributes:
        queries: queries of a block, for rows of many tokens.
        keys: keys of a block.
        warps: warps of a program.
        stages: blocks of keys that are loaded ahead.
        is_apart: warps of their own load the keys (`hopper_kernels.py`); for rows of one token:
            keys are loaded as tiles.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    is_apart: bool = False


MANY = {128: Tiles(128, 64, 4, 2), 256: Tiles(128, 64, 8, 2)}
"""Rows of many tokens, by the most dimensions of a head."""
MANY_ON_HOPPER = Tiles(128, 64, 4, 4, is_apart=True)
"""The same on Hopper, for heads of 64 or 128 dimensions."""
MANY_CONVERTED = Tiles(128, 64, 8, 2)
"""The same where numbers of pages are converted, for heads of up to 128 dimensions."""
MANY_APART = {128: Tiles(128, 128, 8, 2), 256: Tiles(32, 32, 4, 2)}
"""The same where a block of keys does not lie in one page."""
MANY_FLOAT = Tiles(32, 32, 4, 2)
"""The same for activations of fp32."""
ONE, ONE_WIDE = Tiles(LEAST_BLOCK, 64, 4, 5), Tiles(LEAST_BLOCK, 32, 4, 5)
"""Rows of one token; the second for heads of more than 128 dimensions, or of fp32."""
ONE_OF_8_BITS = Tiles(LEAST_BLOCK, 64, 2, 5)
"""The same for pages of 8 bits: fewer warps keep more of a program's numbers in registers."""


@lru_cache
def _has_tile_loads(device: torch.device) -> bool:
    """Whether it loads a block of lines with one instruction (TMA); the interpreter can, too."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    """Whether `hopper_kernels.py` is for it. Its language changes between releases of Triton."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return import_module("triton").__version__.startswith("3.6.")


def as_scales(pages: Tensor) -> Tensor:
    """Pages of bytes as fp32, which the scales among them are."""
    return pages.view(torch.float32) if pages.dtype == torch.int8 else pages


@dataclass(frozen=True)
class PagedCall:
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

    def is_tiled(self, keys: int) -> bool:
        """Whether blocks of so many keys can be loaded as tiles."""
        (_, page_size, _, width), head_dim = self.k_pages.shape, self.q.shape[2]
        return (
            _has_tile_loads(self.q.device)
            and page_size % keys == 0
            and width == head_dim == power_of_two(head_dim, LEAST_BLOCK)
            and self.k_pages.is_contiguous()
            and self.v_pages.is_contiguous()
        )

    def tiles_of(self, pages: Tensor, keys: int) -> "TensorDescriptor":
        """Blocks of keys of one head in a matrix of tokens and heads' dimensions."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        lines = pages.view(-1, pages.shape[2] * pages.shape[3])
        return TensorDescriptor(lines, [*lines.shape], [*lines.stride()], [keys, pages.shape[3]])

    def constants(self, chosen: Tiles) -> dict[str, int | bool]:
        head_dim = self.q.shape[2]
        return {
            "HAS_SCALES": self.k_pages.dtype == torch.int8,
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
    scale = scale * unit if soft_cap else scale * unit * LOG2_E
    tensors = (q, k_pages, v_pages, page_tables, context_lengths, out, sinks)
    call = PagedCall(*tensors, (scale, soft_cap, unit), window, ends)
    if len(q) == len(context_lengths):
        attend_one(call)
    else:
        attend_many(call, row_starts)
    if paths is not None:
        from banyan.ops.cuda.branch_kernels import enter_branches

        pages = (k_pages, v_pages)
        enter_branches(out, q, pages, page_tables, row_starts, paths, numbers, window, sinks)
    return out


def _tiles_for_many(call: PagedCall) -> Tiles:
    if call.q.dtype == torch.float32:
        return MANY_FLOAT
    head_dim, kept = call.q.shape[2], call.k_pages.dtype
    size = 128 if head_dim <= 128 else 256
    is_converted = kept != call.q.dtype and size == 128
    chosen = MANY_CONVERTED if is_converted else MANY[size]
    if (is_converted and kept == torch.int8) or not call.is_tiled(chosen.keys):
        return chosen if is_converted else MANY_APART[size]
    is_plain = not call.numbers[1] and call.ends is None and call.group <= chosen.queries
    is_whole = kept == call.q.dtype and head_dim in (64, 128)
    return MANY_ON_HOPPER if is_plain and is_whole and _is_hopper(call.q.device) else chosen


def attend_many(call: PagedCall, row_starts: Tensor, chosen: Tiles | None = None) -> None:
    """chosen: instead of the default sizes."""
    from banyan.ops.cuda.attention_kernels import attend

    tiles = chosen or _tiles_for_many(call)
    if tiles.is_apart:
        return _attend_apart(call, row_starts, tiles)
    constants, is_tiled = call.constants(tiles), call.is_tiled(tiles.keys)
    pages = call.k_pages, call.v_pages
    rows, per_block = len(call.context_lengths), constants["BLOCK"] // call.group
    attend[(len(call.q) // per_block + rows, call.k_pages.shape[2])](
        call.q,
        *pages,
        *((call.tiles_of(each, tiles.keys) for each in pages) if is_tiled else pages),
        *map(as_scales, pages),
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
        IS_TILED=is_tiled,
        HAS_ENDS=call.ends is not None,
        PER_BLOCK=per_block,
        **constants,
    )


def _attend_apart(call: PagedCall, row_starts: Tensor, tiles: Tiles) -> None:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from banyan.ops.cuda.hopper_kernels import attend_on_hopper

    rows, per_block = len(call.context_lengths), tiles.queries // call.group
    _, page_size, kv_heads, head_dim = call.k_pages.shape
    layout, block = NVMMASharedLayout(128, 16, 2), [tiles.keys, head_dim]
    lines = [pages.view(-1, kv_heads * head_dim) for pages in (call.k_pages, call.v_pages)]
    scale, _, unit = call.numbers
    attend_on_hopper[(len(call.q) // per_block + rows, kv_heads)](
        call.q,
        *(TensorDescriptor(x, [*x.shape], [*x.stride()], block, layout) for x in lines),
        call.page_tables,
        row_starts,
        call.context_lengths,
        call.out,
        call.given_sinks,
        scale,
        unit,
        rows,
        *call.q.stride()[:2],
        call.page_tables.stride(0),
        *call.out.stride()[:2],
        call.window,
        HAS_SINKS=call.sinks is not None,
        PAGE=page_size,
        HEAD_DIM=head_dim,
        GROUP=call.group,
        PER_BLOCK=per_block,
        KEYS=tiles.keys,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
    )


def attend_one(call: PagedCall, chosen: Tiles | None = None, busy: int = PROGRAMS) -> None:
    """chosen: instead of the default sizes; busy: programs that keep the device busy."""
    from banyan.ops.cuda.attention_kernels import attend_rows, merge

    (rows, heads, head_dim), (page_size, kv_heads) = call.q.shape, call.k_pages.shape[1:3]
    is_wide = head_dim > 128 or call.q.dtype == torch.float32
    of_8_bits = call.k_pages.element_size() == 1
    tiles = chosen or (ONE_WIDE if is_wide else ONE_OF_8_BITS if of_8_bits else ONE)
    constants, pages = call.constants(tiles), (call.k_pages, call.v_pages)
    is_tiled = tiles.is_apart and call.is_tiled(tiles.keys)
    parts = -(-call.page_tables.shape[1] * page_size // _PART)
    programs = max(1, min(parts, busy // (rows * kv_heads)))
    room = rows * heads * parts if programs > 1 else 0
    bests, totals = torch.empty((2, room), dtype=torch.float32, device=call.q.device)
    results = bests.new_empty((room, constants["BLOCK_D"]))
    attend_rows[(rows, kv_heads, programs)](
        call.q,
        *pages,
        *((call.tiles_of(each, tiles.keys) for each in pages) if is_tiled else pages),
        *map(as_scales, pages),
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
        IS_TILED=is_tiled,
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
            AT_ONCE=_MERGED_AT_ONCE,
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
        *(as_scales(pages) for pages in (k_pages, v_pages)),
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
        HAS_SCALE=k_pages.dtype == torch.int8,
        num_warps=1,
        enable_fp_fusion=False,
    )


paged_attention = Kernel(supports=declines_pages, run=_paged_attention, sees_ahead=True)
write_kv = Kernel(supports=declines_pages, run=_write_kv)
