"""Attention that the NPU's operators do not have, by torch's: soft caps, and layers whose first
positions hold nothing. Row by row, with lengths that the host knows, so nothing waits; but a graph
could not be told other lengths, so steps of a model that needs it are launched anew.
"""

import torch
from torch import Tensor

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
) -> Tensor:
    """As `paged_attention` of ops/api.py. k_pages: parts of the keys, [pages, page size,
    kv_heads, width] each; v_pages: the same of one width; lengths: keys of each row."""
    out = q.new_empty(*q.shape[:2], v_pages.shape[-1])
    size = v_pages.shape[1]
    for row, length in enumerate(lengths):
        tokens = slice(starts[row], starts[row + 1])
        context = length - (tokens.stop - tokens.start)
        first = max(0, context - window + 1) if window > 0 else -window
        before = first // size * size
        pages = page_tables[row, first // size : -(-length // size)].long()
        v, *keys = (
            part[pages].flatten(0, 1)[first - before : length - before]
            for part in (v_pages, *k_pages)
        )
        k = torch.cat(keys, -1)
        positions = torch.arange(context, length, device=q.device)
        seen = visible(positions, first, length - first, window)
        out[tokens] = dense_attention(q[tokens], k, v, seen, scale, soft_cap, sinks)
    return out
