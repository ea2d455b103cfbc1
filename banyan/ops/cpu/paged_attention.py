"""Compiled attention over pages, and the writing of K and V into them.

Within a page the bytes have another order than the reference's: K is [kv_head, head_dim,
page_size] and V [kv_head, page_size, head_dim]. With int8, the scales of a kv_head's tokens follow
its numbers. The tensors' shapes are the usual ones.

Layers of one geometry share a plan, which is made once per run of a program.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library, LibraryRecording
from banyan.ops.pages import FLOAT8

PAGES = "by head, K transposed"
"""Name of the page layout."""
PAGE_SIZES = (16, 32, 64, 128, 256)
_ALIGNMENT = 64
CACHE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3} | {
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}


@dataclass
class PagedAttention:
    """Attributes:
    shares_prefixes: rows whose page tables start with the same pages load them together.
    rounds: queries, keys, values and attention weights may be rounded if there is code for it.
    """

    library: Library
    shares_prefixes: bool = True
    rounds: bool = False
    _plans: "WeakKeyDictionary[LibraryRecording, dict[tuple[int, ...], np.ndarray]]" = field(
        default_factory=WeakKeyDictionary
    )

    def write_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        flat_locations: Tensor,
        unit: float = 1.0,
    ) -> None:
        tokens, kv_heads, head_dim = k.shape
        self.library.call(
            "bn_write_kv",
            tokens,
            CACHE_TYPES[k_pages.dtype],
            *_rows(k),
            *_rows(v),
            _whole(k_pages),
            _whole(v_pages),
            _whole(flat_locations),
            k_pages.shape[1],
            kv_heads,
            head_dim,
            1 / unit,
        )

    def paged_attention(
        self,
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
        tokens, heads, head_dim = q.shape
        page_size, kv_heads = k_pages.shape[1:3]
        assert page_size in PAGE_SIZES, f"pages of {page_size} tokens, not one of {PAGE_SIZES}"
        assert head_dim % 8 == 0, f"heads of {head_dim} dimensions, not a multiple of 8"
        shape = (page_size, kv_heads, heads // kv_heads, head_dim, window)
        cache = CACHE_TYPES[k_pages.dtype]
        rounds = self.rounds and rounds_here(self.library, cache, head_dim)
        lengths = (row_starts, context_lengths)
        plan = self.plan(tokens, page_tables, *lengths, shape, paths, rounds, ends)
        out = self.library.empty(q.shape)
        self.library.call(
            "bn_paged_attention",
            tokens,
            cache,
            *_rows(q),
            _whole(k_pages),
            _whole(v_pages),
            plan.ctypes.data,
            page_tables.data_ptr(),
            page_tables.stride(0),
            out.data_ptr(),
            *shape,
            scale,
            soft_cap,
            0 if sinks is None else _whole(sinks),
            unit,
            int(rounds),
            rows=context_lengths.shape[0],
        )
        return out

    def plan(
        self,
        tokens: int,
        page_tables: Tensor,
        row_starts: Tensor,
        context_lengths: Tensor,
        shape: tuple[int, int, int, int, int],
        paths: Tensor | None = None,
        rounds: bool = False,
        ends: Tensor | None = None,
    ) -> np.ndarray:
        """Memory of the plan for this geometry; a recording has one for all its layers.

        rounds: the layers compute with rounded numbers.
        """
        places = (*given_paths(paths), 0 if ends is None else _whole(ends))
        lengths = (row_starts.data_ptr(), context_lengths.data_ptr())
        key = (page_tables.data_ptr(), *lengths, *shape, rounds, *places)
        recording = self.library.recording
        plans = {} if recording is None else self._plans.setdefault(recording, {})
        if key not in plans:
            _, kv_heads, group, head_dim, _ = shape
            size = self.library.function("bn_attention_plan_bytes")(
                tokens, kv_heads, group, head_dim
            )
            memory = np.empty(size + _ALIGNMENT, np.uint8)
            plans[key] = memory[-memory.ctypes.data % _ALIGNMENT :]
            self.library.call(
                "bn_attention_plan",
                tokens,
                plans[key].ctypes.data,
                page_tables.data_ptr(),
                page_tables.stride(0),
                _whole(row_starts),
                _whole(context_lengths),
                *shape,
                tokens,
                int(self.shares_prefixes),
                int(rounds),
                *places,
                rows=context_lengths.shape[0],
            )
        return plans[key]


def rounds_here(library: Library, cache: int, head_dim: int) -> bool:
    """Whether there is rounding code for pages of a type, given as its number in CACHE_TYPES."""
    return bool(library.function("bn_rounds_attention")(cache, head_dim))


def given_paths(paths: Tensor | None) -> tuple[int, int]:
    """Address and token stride of int32 paths [tokens, 2 + most], zeros = none."""
    if paths is None:
        return 0, 0
    assert paths.dtype == torch.int32 and paths.stride(1) == 1, "expected int32 paths by token"
    return paths.data_ptr(), paths.stride(0)


def move_kv(k_pages: Tensor, v_pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    size = k_pages.shape[1]
    source, target = (sources // size, sources % size), (targets // size, targets % size)
    for pages, is_turned in ((k_pages, True), (v_pages, False)):
        numbers, scales = _as_they_lie(pages, is_turned)
        numbers[target[0], :, target[1]] = numbers[source[0], :, source[1]]
        if scales is not None:
            scales[target[0], :, target[1]] = scales[source[0], :, source[1]]


def _as_they_lie(pages: Tensor, is_turned: bool) -> tuple[Tensor, Tensor | None]:
    """Numbers [num_pages, kv_heads, page_size, head_dim] and scales [num_pages, kv_heads,
    page_size, 4] of pages, both as bytes or whole numbers that torch can move."""
    num_pages, size, kv_heads, width = pages.shape
    head_dim = width - (4 if pages.dtype == torch.int8 else 0)
    moved = pages.view(torch.uint8) if pages.dtype in FLOAT8 else pages
    flat = moved.view(num_pages, kv_heads, size * width)
    inside = (head_dim, size) if is_turned else (size, head_dim)
    numbers = flat[..., : size * head_dim].unflatten(-1, inside)
    scales = flat[..., size * head_dim :].unflatten(-1, (size, 4)) if width > head_dim else None
    return numbers.transpose(-1, -2) if is_turned else numbers, scales


def plain_kv(k_pages: Tensor, v_pages: Tensor) -> tuple[Tensor, Tensor]:
    """The same pages in the reference's layout."""
    return _plain(k_pages, is_turned=True), _plain(v_pages, is_turned=False)


def _plain(pages: Tensor, is_turned: bool) -> Tensor:
    numbers, scales = _as_they_lie(pages, is_turned)
    numbers = numbers.transpose(1, 2)
    whole = numbers if scales is None else torch.cat([numbers, scales.transpose(1, 2)], -1)
    return whole.contiguous().view(pages.dtype)


def parts_of_head(name: str, width: int, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """Layout of one head's tokens in a page: (lines, bytes) of [lines, page_size, bytes].

    name: "k" | "v".
    """
    scale = ((1, 4),) if dtype == torch.int8 else ()
    head_dim = width - 4 * len(scale)
    of_numbers = (head_dim, dtype.itemsize) if name == "k" else (1, head_dim * dtype.itemsize)
    return (of_numbers, *scale)


def _rows(x: Tensor) -> tuple[int, int]:
    """Address and token stride of fp32 heads [tokens, heads, head_dim]."""
    assert x.dtype == torch.float32, f"expected fp32 rows, got {x.dtype}"
    assert x.stride()[1:] == (x.shape[2], 1), f"heads lie apart: {x.stride()}"
    return x.data_ptr(), x.stride(0)


def _whole(x: Tensor) -> int:
    assert x.is_contiguous(), "expected a contiguous tensor"
    return x.data_ptr()


def supports_pages(spec: OpSpec) -> str | None:
    """Why compiled kernels cannot use such pages; None = they can."""
    if spec.toolkit.absence:
        return spec.toolkit.absence
    if spec.dtype != torch.float32:
        return f"computes in fp32, activations are {spec.dtype}"
    if spec.cache_dtype not in CACHE_TYPES:
        return f"cannot read pages of {spec.cache_dtype}"
    if spec.page_size not in PAGE_SIZES:
        return f"pages of {spec.page_size} tokens, not one of {', '.join(map(str, PAGE_SIZES))}"
    return None


def _supports(spec: OpSpec) -> str | None:
    if reason := supports_pages(spec):
        return reason
    return None if spec.head_dim % 8 == 0 else f"heads of {spec.head_dim}, not a multiple of 8"


def _supports_rounded(spec: OpSpec) -> str | None:
    if reason := _supports(spec):
        return reason
    assert isinstance(spec.toolkit, Library)
    if rounds_here(spec.toolkit, CACHE_TYPES[spec.cache_dtype], spec.head_dim):
        return None
    return "for 16-bit pages and heads of whole vectors, with VNNI and AVX512-BF16"


write_kv = Kernel(
    supports=_supports, make=lambda library: PagedAttention(library).write_kv, pages=PAGES
)
paged_attention = Kernel(
    supports=_supports,
    make=lambda library: PagedAttention(library).paged_attention,
    pages=PAGES,
    plain_pages=plain_kv,
    sees_ahead=True,
)
rounded = Kernel(
    supports=_supports_rounded,
    make=lambda library: PagedAttention(library, rounds=True).paged_attention,
    rounds_activations=True,
    pages=PAGES,
    plain_pages=plain_kv,
    sees_ahead=True,
)
moved = Kernel(supports=_supports, run=move_kv, pages=PAGES)
