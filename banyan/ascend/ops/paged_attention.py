"""Attention over pages of K and V by the NPU's operators, and writing of these pages.

A page is [page_size, kv_heads, head_dim]; the operators read it with the heads side by side.
Lengths come from the plan on the host: an operator that read them from the device would have to
wait for it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import TOGETHER_DIMS
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.toolkit import NpuToolkit, declines_pages
from banyan.ops.bind import Kernel
from banyan.ops.reference import dense_attention, visible


def attend_plainly(
    q: Tensor,
    k_pages: tuple[Tensor, ...],
    v_pages: Tensor,
    page_tables: Tensor,
    starts: list[int],
    lengths: list[int],
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    paths: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """As `paged_attention` of ops/api.py. k_pages: parts of the keys, [pages, page size,
    kv_heads, width] each; v_pages: the same of one width; lengths: keys of each row; paths and
    ends: on the host."""
    out = q.new_empty(*q.shape[:2], v_pages.shape[-1])
    size = v_pages.shape[1]
    for row, length in enumerate(lengths):
        tokens = slice(starts[row], starts[row + 1])
        context = length - (tokens.stop - tokens.start)
        mine = None if paths is None or tokens.start == tokens.stop else paths[tokens].tolist()
        is_tree = mine is not None and bool(mine[0][1])
        lowest = mine[0][0] if mine is not None and is_tree else context
        first = max(0, lowest - window + 1) if window > 0 else -window
        before = first // size * size
        pages = page_tables[row, first // size : -(-length // size)].long()
        v, *keys = (
            part[pages].flatten(0, 1)[first - before : length - before]
            for part in (v_pages, *k_pages)
        )
        k = torch.cat(keys, -1)
        if mine is not None and is_tree:
            seen = seen_along(mine, first, length, window).to(q.device)
        else:
            positions = torch.arange(context, length, device=q.device)
            after = None if ends is None else ends[tokens].to(q.device)
            seen = visible(positions, first, length - first, window, after)
        out[tokens] = dense_attention(q[tokens], k, v, seen, scale, soft_cap, sinks)
    return out


def seen_along(paths: list[list[int]], first: int, length: int, window: int) -> Tensor:
    """Which of the places first … length − 1 each token of a draft tree sees, on the host.

    paths: as in `Ops.paged_attention`, of the row's tokens; returns: [tokens, length - first] bool.
    """
    seen = torch.zeros(len(paths), length - first, dtype=torch.bool)
    for token, (base, count, *places) in enumerate(paths):
        lowest = max(first, base + count - window) if window > 0 else first
        seen[token, lowest - first : base - first] = True
        path = places[max(0, lowest - base) : count]
        seen[token, torch.tensor(path) - first] = True
    return seen


def attend_apart(
    odd: Tensor,
    starts: list[int],
    lengths: list[int],
    alone: Callable[[int, slice], Tensor],
    chain: Callable[[int, slice], Tensor],
) -> Tensor:
    """Attention of a step with rows that the operators cannot compute, row by row.

    Args:
        odd: [tokens], not 0 for a token of a draft tree, or one that sees later tokens.
        alone, chain: attention of one row with such tokens, and of one without, given its number
            and its tokens.
    """
    found: list[Tensor] = []
    for row in range(len(lengths)):
        tokens = slice(starts[row], starts[row + 1])
        if tokens.start < tokens.stop:
            found.append((alone if odd[tokens].any() else chain)(row, tokens))
    return torch.cat(found)


def _write_kv(toolkit: NpuToolkit) -> Callable[..., None]:
    def run(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, flat_locations: Tensor) -> None:
        places = flat_locations.unsqueeze(1)  # [tokens, 1]
        for part, pages in ((k, k_pages), (v, v_pages)):
            toolkit.operators.scatter(pages.flatten(0, 1), places, part.contiguous())

    return run


def _paged_attention(toolkit: NpuToolkit) -> Callable[..., Tensor]:
    def run(
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
        paths: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        assert row_starts.is_cpu and context_lengths.is_cpu, "lengths come from the host"
        if not len(q):
            return torch.empty_like(q)
        starts = row_starts.tolist()
        lengths = lengths_of(starts, context_lengths.tolist())
        if soft_cap or window < 0:  # not supported by the operators
            how = (scale, window, soft_cap, sinks, paths, ends)
            return attend_plainly(q, (k_pages,), v_pages, page_tables, starts, lengths, *how)
        rows = _Rows(
            toolkit.operators,
            (k_pages.flatten(2), v_pages.flatten(2)),  # [pages, page_size, kv_heads · head_dim]
            k_pages.shape[2],
            scale,
            window,
            None if sinks is None else sinks.to(torch.bfloat16),
        )
        tables, query = page_tables.contiguous(), q.contiguous()
        # Per token: whether it does not attend to all before it and to nothing else.
        odd = ends if paths is None else paths[:, 1]
        if odd is not None:

            def alone(row: int, tokens: slice) -> Tensor:
                one = (tables[row : row + 1], [0, tokens.stop - tokens.start], [lengths[row]])
                how = (scale, window, soft_cap, sinks)
                how += tuple(None if each is None else each[tokens] for each in (paths, ends))
                return attend_plainly(query[tokens], (k_pages,), v_pages, *one, *how)

            def chain(row: int, tokens: slice) -> Tensor:
                one = (tables[row : row + 1], [0, tokens.stop - tokens.start], [lengths[row]])
                return rows.one_by_one(query[tokens], *one)

            return attend_apart(odd, starts, lengths, alone, chain)
        if len(q) == len(lengths):
            return rows.single(query, tables, lengths)
        if q.shape[2] in TOGETHER_DIMS:
            return rows.together(query, tables, starts, lengths)
        if len(q) == starts[1] * len(lengths) and starts == list(range(0, len(q) + 1, starts[1])):
            return rows.alike(query.unflatten(0, (len(lengths), -1)), tables, lengths)
        return rows.one_by_one(query, tables, starts, lengths)

    return run


def lengths_of(starts: list[int], contexts: list[int]) -> list[int]:
    """Keys of each row, including this step."""
    return [
        context + end - start
        for context, start, end in zip(contexts, starts, starts[1:], strict=False)
    ]


@dataclass(frozen=True)
class _Rows:
    """The arguments that all calls of the operator in a step share."""

    operators: Operators
    pages: tuple[Tensor, Tensor]
    kv_heads: int
    scale: float
    window: int
    sinks: Tensor | None

    def single(self, query: Tensor, tables: Tensor, lengths: list[int]) -> Tensor:
        """Rows of one token each. query: [rows, heads, head_dim]"""
        each = query.unsqueeze(1)
        given = (tables, lengths, self.kv_heads, self.scale)
        if not self.window:
            return self.operators.attention.attend_single(
                each, *self.pages, *given, self.sinks
            ).squeeze(1)
        # The operator applies windows only to rows of several tokens, so each token comes twice.
        pairs = torch.cat([each, each], dim=1)
        found = self.operators.attention.attend_rows(
            pairs, *self.pages, *given, self.window, self.sinks
        )
        return found[:, 1]

    def together(
        self, query: Tensor, tables: Tensor, starts: list[int], lengths: list[int]
    ) -> Tensor:
        given = (tables, starts[1:], lengths, self.kv_heads, self.scale, self.window, self.sinks)
        return self.operators.attention.attend_together(query, *self.pages, *given)

    def alike(self, query: Tensor, tables: Tensor, lengths: list[int]) -> Tensor:
        """Rows of as many tokens each. query: [rows, tokens, heads, head_dim]"""
        given = (tables, lengths, self.kv_heads, self.scale, self.window, self.sinks)
        return self.operators.attention.attend_rows(query, *self.pages, *given).flatten(0, 1)

    def one_by_one(
        self, query: Tensor, tables: Tensor, starts: list[int], lengths: list[int]
    ) -> Tensor:
        """For head sizes that the operator supports in one row at a time only."""
        found = []
        for row, length in enumerate(lengths):
            mine, where = query[starts[row] : starts[row + 1]], tables[row : row + 1]
            if len(mine) == 1:
                found.append(self.single(mine, where, [length]))
                continue
            given = (where, [length], self.kv_heads, self.scale, self.window, self.sinks)
            found.append(self.operators.attention.attend_rows(mine[None], *self.pages, *given)[0])
        return torch.cat(found)


write_kv = Kernel(supports=declines_pages, make=_write_kv)
paged_attention = Kernel(supports=declines_pages, make=_paged_attention, sees_ahead=True)
