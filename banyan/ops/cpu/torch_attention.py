"""Fast paged attention in plain torch: decode rows in padded batches, extend rows one by one.

Pages are gathered by token. A masked position reads the row's newest token, so the content of
unused pages never enters the arithmetic. fp32 is summed in fp64: the fused attention takes other
paths for other shapes, and only sums this exact are equal for a token in a whole prompt, a chunk
and a batch.
"""

import torch
from torch import Tensor
from torch.nn import functional

from banyan.ops import reference
from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.pages import FLOAT8


def _supports(spec: OpSpec) -> str | None:
    if spec.device.type != "cpu":
        return f"tensors are on {spec.device.type}"
    is_wide = spec.cache_dtype.is_floating_point and spec.cache_dtype not in FLOAT8
    return None if is_wide else f"cannot read {spec.cache_dtype}"


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
    paths: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    if soft_cap or sinks is not None:  # torch's fused attention has neither
        return reference.paged_attention(
            q,
            k_pages,
            v_pages,
            page_tables,
            row_starts,
            context_lengths,
            scale,
            window,
            soft_cap,
            sinks,
            paths=paths,
            ends=ends,
        )
    out = torch.empty_like(q)
    starts, contexts = row_starts.tolist(), context_lengths.tolist()
    page_size = k_pages.shape[1]
    batches: dict[int, list[int]] = {}
    for row, context in enumerate(contexts):
        tokens = slice(starts[row], starts[row + 1])
        if paths is not None and tokens.start < tokens.stop and paths[tokens.start, 1]:
            _branch(out, q, k_pages, v_pages, page_tables[row], tokens, paths, scale, window)
        elif tokens.stop - tokens.start == 1:
            seen = min(context + 1, window) if window > 0 else context + 1
            batches.setdefault((-(-seen // page_size)).bit_length(), []).append(row)
        elif tokens.stop > tokens.start:
            mine = None if ends is None else ends[tokens]
            out[tokens] = _extend(
                q[tokens], k_pages, v_pages, page_tables[row], context, scale, window, mine
            )
    for rows in batches.values():
        index = torch.tensor(rows)
        tokens = row_starts[index].long()
        out[tokens] = _decode(
            q[tokens],
            k_pages,
            v_pages,
            page_tables[index],
            context_lengths[index].long(),
            scale,
            window,
        )
    return out


def _branch(
    out: Tensor,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    tokens: slice,
    paths: Tensor,
    scale: float,
    window: int,
) -> None:
    """Compute the tokens of a row with branches, one by one."""
    for token in range(tokens.start, tokens.stop):
        path = paths[token, : 2 + int(paths[token, 1])]
        where = torch.tensor([int(path[0]) + len(path) - 3])
        k, v, _ = reference.gather_row(k_pages, v_pages, page_table, where, window, path)
        out[token] = _attend(q[token : token + 1], k, v, scale, None, is_causal=False)[0]


def _decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_tables: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """One token per row; rows of similar length are computed together.

    q: [rows, heads, head_dim]; page_tables: [rows, max_pages]; positions: [rows] int64.
    """
    rows, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1:3]
    newest = positions.unsqueeze(1)  # [rows, 1]
    first = (newest - window + 1).clamp(min=0) if window > 0 else torch.full_like(newest, -window)
    length = int((newest - first).max()) + 1
    keys = first + torch.arange(length)  # [rows, length]
    seen = keys <= newest
    keys = torch.minimum(keys, newest)
    pages = page_tables.gather(1, keys // page_size)
    locations = (pages * page_size + keys % page_size).view(-1)
    exact = _sum_dtype(q)
    k = k_pages.flatten(0, 1)[locations].view(rows, length, kv_heads, head_dim).to(exact)
    v = v_pages.flatten(0, 1)[locations].view(rows, length, kv_heads, head_dim).to(exact)
    out = functional.scaled_dot_product_attention(
        q.view(rows, kv_heads, heads // kv_heads, head_dim).to(exact),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen[:, None, None, :],
        scale=scale,
    )
    return out.reshape(rows, heads, head_dim).to(q.dtype)


def _extend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context: int,
    scale: float,
    window: int,
    ends: Tensor | None,
) -> Tensor:
    """Many tokens of one row. q: [count, heads, head_dim]; page_table: [max_pages]."""
    positions = torch.arange(context, context + len(q))
    k, v, first = reference.gather_row(k_pages, v_pages, page_table, positions, window)
    if ends is not None and not ends.any():
        ends = None
    whole = context == 0 and not window and ends is None
    seen = None if whole else reference.visible(positions, first, k.shape[0], window, ends)
    return _attend(q, k, v, scale, seen, whole)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None, is_causal: bool
) -> Tensor:
    """Tokens of one row over gathered keys [length, kv_heads, head_dim]."""
    count, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    shape = (kv_heads, heads // kv_heads, k.shape[0], head_dim)
    exact = _sum_dtype(q)
    out = functional.scaled_dot_product_attention(
        q.to(exact).view(count, kv_heads, -1, head_dim).permute(1, 2, 0, 3),
        k.to(exact).transpose(0, 1).unsqueeze(1).expand(shape),
        v.to(exact).transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=seen,
        is_causal=is_causal,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(count, heads, head_dim).to(q.dtype)


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float32 else q.dtype


paged_attention = Kernel(run=_paged_attention, supports=_supports, sees_ahead=True)
