"""Latent attention by the NPU's operators, over plain and fractal pages, and the indexer of sparse
attention.

All heads share one latent vector and one rotated key per token. Lengths come from the host, as in
`paged_attention.py`. The operator takes rows of up to 16 tokens, so a longer row is cut into pieces
that share its pages; each piece sees keys up to its own last token. The indexer returns positions,
[tokens, 1, top] with the best first and -1 after the last, not the bits of ops/api.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from banyan.ascend.ops.contracts import (
    FRACTAL,
    FRACTAL_PAGE,
    LATENT_DIM,
    LATENT_HEADS,
    LATENT_PAGES,
    LATENT_ROPE_DIM,
    LATENT_TOKENS,
)
from banyan.ascend.ops.latent_contracts import count_from
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.paged_attention import attend_apart, attend_plainly, lengths_of
from banyan.ascend.ops.toolkit import NpuToolkit, declines
from banyan.ops import reference
from banyan.ops.bind import Kernel, OpSpec


def _declines(spec: OpSpec) -> str | None:
    reason = declines(spec)
    if reason is None and spec.cache_dtype != spec.dtype:
        reason = f"pages are {spec.cache_dtype}, activations {spec.dtype}"
    if reason is None and spec.page_size not in LATENT_PAGES:
        sizes = " or ".join(map(str, LATENT_PAGES))
        reason = f"pages of {spec.page_size} tokens, not of {sizes}"
    return reason


def _declines_fractal(spec: OpSpec) -> str | None:
    reason = _declines(spec)
    if reason is None and not (isinstance(spec.toolkit, NpuToolkit) and spec.toolkit.fractal_pages):
        return "pages have the plain form"
    if reason is None and spec.page_size != FRACTAL_PAGE:
        reason = f"pages of {spec.page_size} tokens, not of {FRACTAL_PAGE}"
    return reason


def _is_served(latents: Tensor, keys: Tensor) -> bool:
    return (latents.shape[-1], keys.shape[-1]) == (LATENT_DIM, LATENT_ROPE_DIM)


def _fractal(pages: Tensor) -> Tensor:
    """The same memory. [pages, page size, width] -> [pages, width / 16, page size, 16]"""
    count, size, width = pages.shape
    return pages.view(count, width // FRACTAL, size, FRACTAL)


def _write_fractal(toolkit: NpuToolkit) -> Callable[..., None]:
    write_plain = _write_latent(toolkit)

    def run(
        latent: Tensor, key: Tensor, latent_pages: Tensor, key_pages: Tensor, flat_locations: Tensor
    ) -> None:
        if not _is_served(latent_pages, key_pages):  # of an indexer, or of other widths
            return write_plain(latent, key, latent_pages, key_pages, flat_locations)
        latent, key = (part.unsqueeze(1).contiguous() for part in (latent, key))  # one head
        pages = (_fractal(latent_pages), _fractal(key_pages))
        toolkit.operators.latents.scatter_pages(latent, key, pages, flat_locations)

    return run


def _attend_fractal(toolkit: NpuToolkit) -> Callable[..., Tensor]:
    attend, attend_plain = _latent_attention(toolkit, is_fractal=True), _latent_attention(toolkit)

    def run(
        q: Tensor,
        q_turned: Tensor,
        latent_pages: Tensor,
        key_pages: Tensor,
        page_tables: Tensor,
        *rows: Any,
        first: int = 0,
        **more: Any,
    ) -> Tensor:
        given = (q, q_turned, latent_pages, key_pages, page_tables)
        if not _is_served(latent_pages, key_pages):
            return attend_plain(*given, *rows, first=first, **more)
        if first:
            pages, tables = _as_plain((latent_pages, key_pages), page_tables)
            return attend_plain(q, q_turned, *pages, tables, *rows, first=first, **more)
        return attend(*given, *rows, **more)

    return run


def _as_plain(
    pages: tuple[Tensor, Tensor], page_tables: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The pages of some rows, copied token by token, and where they lie among these."""
    chosen = page_tables.flatten().long()
    latents, keys = (_fractal(part)[chosen].transpose(1, 2).flatten(2) for part in pages)
    tables = torch.arange(len(chosen), dtype=page_tables.dtype, device=page_tables.device)
    return (latents, keys), tables.view(page_tables.shape)


def _write_latent(toolkit: NpuToolkit) -> Callable[..., None]:
    def run(
        latent: Tensor, key: Tensor, latent_pages: Tensor, key_pages: Tensor, flat_locations: Tensor
    ) -> None:
        places = flat_locations.unsqueeze(1)  # [tokens, 1]
        pairs = ((latent, latent_pages), (key, key_pages))
        if key_pages is latent_pages:  # of an indexer: both lie side by side
            pairs = ((torch.cat([latent, key], -1), latent_pages),)
        for part, pages in pairs:
            toolkit.operators.scatter(pages.flatten(0, 1), places, part.contiguous())

    return run


def _latent_attention(toolkit: NpuToolkit, is_fractal: bool = False) -> Callable[..., Tensor]:
    def run(
        q: Tensor,
        q_turned: Tensor,
        latent_pages: Tensor,
        key_pages: Tensor,
        page_tables: Tensor,
        row_starts: Tensor,
        context_lengths: Tensor,
        scale: float,
        chosen: Tensor | None = None,
        first: int = 0,
        paths: Tensor | None = None,
    ) -> Tensor:
        if not len(q):
            return torch.empty_like(q)
        if paths is not None and chosen is not None:
            rows = (page_tables, row_starts, context_lengths, scale, chosen, first, paths)
            return reference.latent_attention(q, q_turned, latent_pages, key_pages, *rows)
        heads = q.shape[1]
        widths = (q.shape[2], q_turned.shape[2])
        is_served = widths == (LATENT_DIM, LATENT_ROPE_DIM) and heads <= LATENT_HEADS[-1]
        if chosen is not None and chosen.dim() == 3:  # positions, as the indexer's operator gives
            assert is_served and not is_fractal  # and none before `first`
            rows = toolkit.operators.attention.ends_of(q.device, row_starts, context_lengths)
            given = (latent_pages, key_pages, chosen, page_tables.contiguous(), *rows, scale)
            return _of_chosen(toolkit.operators, q, q_turned, *given)
        assert row_starts.is_cpu and context_lengths.is_cpu, "lengths come from the host"
        starts = row_starts.tolist()
        lengths, tables = lengths_of(starts, context_lengths.tolist()), page_tables.contiguous()
        if first and chosen is None:
            whole = torch.cat([q, q_turned], -1)
            values, turned = latent_pages.unsqueeze(2), key_pages.unsqueeze(2)  # one head
            rows = (tables, starts, lengths, scale, -first, 0.0, None, paths)
            return attend_plainly(whole, (values, turned), values, *rows)
        if paths is not None:

            def tree(row: int, tokens: slice) -> Tensor:
                one = (tables[row : row + 1], [0, tokens.stop - tokens.start], [lengths[row]])
                pages, where = (latent_pages, key_pages), one[0]
                if is_fractal:
                    pages, where = _as_plain(pages, where)
                values, turned = (part.unsqueeze(2) for part in pages)  # one head
                whole = torch.cat([q[tokens], q_turned[tokens]], -1)
                how = (*one[1:], scale, 0, 0.0, None, paths[tokens])
                return attend_plainly(whole, (values, turned), values, where, *how)

            def chain(row: int, tokens: slice) -> Tensor:
                where = (page_tables[row : row + 1], row_starts[row : row + 2] - tokens.start)
                pages = (latent_pages, key_pages, *where, context_lengths[row : row + 1])
                return run(q[tokens], q_turned[tokens], *pages, scale)

            return attend_apart(paths[:, 1], starts, lengths, tree, chain)
        assert not is_fractal or (is_served and chosen is None), "fractal pages have other readers"
        if chosen is not None or not is_served:
            rows = (page_tables, row_starts.to(q.device), context_lengths.to(q.device))
            pages = (latent_pages, key_pages)
            return reference.latent_attention(q, q_turned, *pages, *rows, scale, chosen, first)
        room = next(count for count in LATENT_HEADS if count >= heads) - heads
        q, q_turned = (pad(part, (0, 0, 0, room)).contiguous() for part in (q, q_turned))
        keys = (latent_pages, key_pages)
        if is_fractal:
            keys = (_fractal(latent_pages).unsqueeze(1), _fractal(key_pages).unsqueeze(1))
        attend = toolkit.operators.attention.attend_latents
        if len(q) == len(lengths):
            q, q_turned = q.unsqueeze(1), q_turned.unsqueeze(1)  # [rows, 1, heads, width]
            return attend(q, q_turned, *keys, tables, None, lengths, scale)[:, 0, :heads]
        rows, ends, lengths = _pieces(starts, lengths)
        if len(rows) > len(tables):
            tables = torch.cat([tables[row : row + 1] for row in rows])
        return attend(q, q_turned, *keys, tables, ends, lengths, scale)[:, :heads]

    return run


def _of_chosen(
    operators: Operators,
    q: Tensor,
    q_turned: Tensor,
    latent_pages: Tensor,
    key_pages: Tensor,
    chosen: Tensor,
    tables: Tensor,
    ends: Tensor,
    lengths: Tensor,
    scale: float,
) -> Tensor:
    heads = q.shape[1]
    room = (1 << (heads - 1).bit_length()) - heads
    q, q_turned = (pad(part, (0, 0, 0, room)).contiguous() for part in (q, q_turned))
    latents, keys = (pages.unsqueeze(2) for pages in (latent_pages, key_pages))
    rows = (chosen, tables, ends, lengths)
    return operators.attention.attend_chosen(q, q_turned, latents, keys, *rows, scale)[:, :heads]


def _pieces(starts: list[int], lengths: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Of each piece: its row, the token after its last one, and its keys."""
    rows, ends, seen = list[int](), list[int](), list[int]()
    for row, length in enumerate(lengths):
        last = starts[row + 1]
        for first in range(starts[row], last, LATENT_TOKENS):
            end = min(first + LATENT_TOKENS, last)
            rows.append(row)
            ends.append(end)
            seen.append(length - (last - end))
    return rows, ends, seen


write_latent = Kernel(supports=_declines, make=_write_latent)
latent_attention = Kernel(supports=_declines, make=_latent_attention)
write_fractal = Kernel(supports=_declines_fractal, make=_write_fractal)
attend_fractal = Kernel(supports=_declines_fractal, make=_attend_fractal)
"""With SGLANG_USE_FIA_NZ. These kernels have names of their own, because servers and stores compare
names of kernels: pages of one form must not be read as the other form."""


def _choose_positions(toolkit: NpuToolkit) -> Callable[..., Tensor]:
    operators = toolkit.operators

    def run(
        q: Tensor,
        q_turned: Tensor,
        weights: Tensor,
        key_pages: Tensor,
        turned_pages: Tensor,
        page_tables: Tensor,
        row_starts: Tensor,
        context_lengths: Tensor,
        top: int,
        first: int = 0,
        paths: Tensor | None = None,
    ) -> Tensor:
        if not len(q):
            return torch.empty((0, 1, top), dtype=torch.int32, device=q.device)
        if key_pages is not turned_pages:  # `joins_index` has said no
            rows = (page_tables, row_starts.to(q.device), context_lengths.to(q.device))
            given = (q, q_turned, weights, key_pages, turned_pages)
            return reference.choose_positions(*given, *rows, top, first, paths)
        if paths is not None:  # both parts of a key are next to each other
            width = q.shape[-1]
            parts = (key_pages[..., :width], key_pages[..., width:])
            rows = (page_tables, row_starts, context_lengths, top, first, paths)
            return reference.choose_positions(q, q_turned, weights, *parts, *rows)
        query = torch.cat([q, q_turned], -1)
        rows = operators.attention.ends_of(q.device, row_starts, context_lengths)
        given = (weights.contiguous(), page_tables.contiguous(), *rows)
        asked = count_from(top + first)
        chosen = operators.attention.choose_positions(query, key_pages.unsqueeze(2), *given, asked)
        return _from_first(chosen, top) if first else chosen

    return run


def _from_first(chosen: Tensor, top: int) -> Tensor:
    """The best of these but for position 0, which holds nothing and may be anywhere among them.

    chosen: [tokens, 1, more than top]; returns [tokens, 1, top].
    """
    passed = (chosen == 0).int().cumsum(-1)[..., :top]  # 1 from its place on
    return chosen.gather(-1, passed + torch.arange(top, device=chosen.device))


choose_positions = Kernel(supports=_declines, make=_choose_positions)
