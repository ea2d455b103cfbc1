"""K and V in pages by the NPU's operators. A page is [page_size, kv_heads, head_dim], as elsewhere;
the operators see it with the heads side by side.

Lengths are taken from the host, where the plan has them: an operator that knew them from the device
would have to wait for it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ops import reference
from banyan.ops.bind import Kernel
from banyan.ops.npu.contracts import TOGETHER_DIMS
from banyan.ops.npu.needs import NpuToolkit, declines_pages
from banyan.ops.npu.operators import Operators


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
    ) -> Tensor:
        assert row_starts.is_cpu and context_lengths.is_cpu, "lengths come from the host"
        if soft_cap or sinks is not None:  # the operators have no such thing
            return reference.paged_attention(
                *(q, k_pages, v_pages, page_tables, row_starts, context_lengths),
                *(scale, window, soft_cap, sinks),
            )
        starts, contexts = row_starts.tolist(), context_lengths.tolist()
        lengths = [
            context + end - start
            for context, start, end in zip(contexts, starts, starts[1:], strict=False)
        ]
        pages = k_pages.flatten(2), v_pages.flatten(2)  # [pages, page_size, kv_heads · head_dim]
        tables, heads = page_tables.contiguous(), k_pages.shape[2]
        operators, query = toolkit.operators, q.contiguous()
        if len(q) == len(lengths) and not window:
            single = query.unsqueeze(1)  # [rows, 1, heads, head_dim]
            return operators.attend_single(single, *pages, tables, lengths, heads, scale).squeeze(1)
        if q.shape[2] in TOGETHER_DIMS:
            ends = starts[1:]
            return operators.attend_together(
                query, *pages, tables, ends, lengths, heads, scale, window
            )
        return _row_by_row(operators, query, pages, tables, starts, lengths, heads, scale, window)

    return run


def _row_by_row(
    operators: Operators,
    query: Tensor,
    pages: tuple[Tensor, Tensor],
    tables: Tensor,
    starts: list[int],
    lengths: list[int],
    heads: int,
    scale: float,
    window: int,
) -> Tensor:
    """Head sizes that the operator takes from one row at a time only."""
    found = []
    for row, length in enumerate(lengths):
        mine = query[None, starts[row] : starts[row + 1]]  # [1, count, heads, head_dim]
        where = tables[row : row + 1]
        if mine.shape[1] == 1 and window:
            found.append(_last_window(operators, mine, pages, where, length, heads, scale, window))
        elif mine.shape[1] == 1:
            found.append(operators.attend_single(mine, *pages, where, [length], heads, scale))
        else:
            found.append(operators.attend_row(mine, *pages, where, length, heads, scale, window))
    return torch.cat(found, dim=1).squeeze(0)


def _last_window(
    operators: Operators,
    query: Tensor,
    pages: tuple[Tensor, Tensor],
    table: Tensor,
    length: int,
    heads: int,
    scale: float,
    window: int,
) -> Tensor:
    """A single token with a window: windows hold for several tokens only, so it comes twice."""
    pair = torch.cat([query, query], dim=1)
    return operators.attend_row(pair, *pages, table, length, heads, scale, window)[:, 1:]


write_kv = Kernel(supports=declines_pages, make=_write_kv)
paged_attention = Kernel(supports=declines_pages, make=_paged_attention)
