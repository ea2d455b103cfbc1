"""What attention over pages must compute, in plain torch; the other ops are in `reference.py`."""

import torch
from torch import Tensor

from banyan.ops.draft_paths import move_tokens, places_on, walk_rows
from banyan.ops.pages import FLOAT8, to_numbers, to_stored


def write_latent(
    latent: Tensor, key: Tensor, latent_pages: Tensor, key_pages: Tensor, flat_locations: Tensor
) -> None:
    _put(latent_pages, flat_locations, to_stored(latent, latent_pages.dtype))
    _put(key_pages, flat_locations, to_stored(key, key_pages.dtype))


def latent_attention(
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
    out = torch.empty_like(q)
    whole = torch.cat([q, q_turned], dim=-1)
    latents, keys = latent_pages.unsqueeze(2), key_pages.unsqueeze(2)  # one head
    for row, tokens, positions, path in walk_rows(row_starts, context_lengths, paths):
        v, k, lowest = gather_row(latents, keys, page_tables[row], positions, -first, path)
        seen = visible(positions, lowest, k.shape[0], 0)
        if chosen is not None:
            seen &= unpack_bits(chosen[tokens])[:, lowest : lowest + k.shape[0]]
        out[tokens] = dense_attention(whole[tokens], torch.cat([v, k], -1), v, seen, scale, 0.0)
    return out


def choose_positions(
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
    words = -(-page_tables.shape[1] * key_pages.shape[1] // 32)
    chosen = torch.zeros(len(q), words * 32, dtype=torch.bool, device=q.device)
    whole = torch.cat([q, q_turned], dim=-1).float()
    keys, turned = key_pages.unsqueeze(2), turned_pages.unsqueeze(2)  # one head
    for row, tokens, positions, path in walk_rows(row_starts, context_lengths, paths):
        parts = gather_row(keys, turned, page_tables[row], positions, 0, path)[:2]
        k = torch.cat(parts, dim=-1).squeeze(1).float()  # [length, width of a head]
        each = torch.einsum("thd,ld->thl", whole[tokens], k).relu()
        scores = torch.einsum("thl,th->tl", each, weights[tokens].float())
        seen = visible(positions, 0, len(k), 0)
        seen[:, :first] = False
        scores = scores.masked_fill(~seen, float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        mine = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)
        chosen[tokens, : len(k)] = mine & (scores > float("-inf"))
    worth = 1 << torch.arange(32, device=q.device)
    packed = (chosen.view(len(q), words, 32) * worth).sum(-1)
    return packed.to(torch.int32)


def unpack_bits(words: Tensor) -> Tensor:
    """[n, words] int32 -> [n, 32 · words] bool"""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> places) & 1).bool().flatten(1)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    flat_locations: Tensor,
    unit: float = 1.0,
) -> None:
    _put(k_pages, flat_locations, to_stored(k, k_pages.dtype, unit))
    _put(v_pages, flat_locations, to_stored(v, v_pages.dtype, unit))


def move_kv(k_pages: Tensor, v_pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    for pages in (k_pages, v_pages):
        move_tokens(pages, sources, targets)


def _put(pages: Tensor, flat_locations: Tensor, stored: Tensor) -> None:
    """torch moves no floats of 8 bits, but their bytes."""
    flat = pages.flatten(0, 1)
    if stored.dtype in FLOAT8:
        flat, stored = flat.view(torch.uint8), stored.view(torch.uint8)
    flat[flat_locations] = stored


def paged_attention(
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
) -> Tensor:
    out = torch.empty_like(q)
    for row, tokens, positions, path in walk_rows(row_starts, context_lengths, paths):
        k, v, first = gather_row(k_pages, v_pages, page_tables[row], positions, window, path)
        seen = visible(positions, first, k.shape[0], window)
        of_row = dense_attention(q[tokens], k, v, seen, scale * unit, soft_cap, sinks)
        out[tokens] = of_row if unit == 1.0 else of_row * unit
    return out


def gather_row(
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    window: int,
    path: Tensor | None = None,
) -> tuple[Tensor, Tensor, int]:
    """K and V that a row's positions may see, and the position of the first one.

    page_table: [max_pages] int32; positions: [count], consecutive; path: of the only position.
    returns: k, v [length, kv_heads, head_dim], first.
    """
    page_size = k_pages.shape[1]
    if path is not None:
        last = int(positions[0])  # sync: lengths of host-side slices
        first = max(0, last - window + 1) if window > 0 else -window
        places = places_on(path, first, last)
        where = page_table[places // page_size].long() * page_size + places % page_size
        k, v = (_taken(of.flatten(0, 1), where) for of in (k_pages, v_pages))
        return to_numbers(k), to_numbers(v), first
    start, stop = int(positions[0]), int(positions[-1]) + 1  # sync: lengths of host-side slices
    first = max(0, start - window + 1) if window > 0 else -window
    first_page = first // page_size
    pages = page_table[first_page : -(-stop // page_size)].long()
    inside = slice(first - first_page * page_size, stop - first_page * page_size)
    k, v = (_taken(of, pages).flatten(0, 1)[inside] for of in (k_pages, v_pages))
    return to_numbers(k), to_numbers(v), first


def _taken(pages: Tensor, chosen: Tensor) -> Tensor:
    if pages.dtype in FLOAT8:
        return pages.view(torch.uint8)[chosen].view(pages.dtype)
    return pages[chosen]


def visible(positions: Tensor, first: int, length: int, window: int) -> Tensor:
    """Which of the keys at first … first + length − 1 each position sees. [count, length] bool"""
    keys = torch.arange(first, first + length, device=positions.device)
    seen = keys <= positions.unsqueeze(1)
    return seen & (keys > positions.unsqueeze(1) - window) if window > 0 else seen


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one row over gathered keys, in fp32.

    q: [count, heads, head_dim]; k: [length, kv_heads, head_dim];
    v: [length, kv_heads, value_dim]; seen: [count, length] bool; sinks: [heads] fp32.
    returns: [count, heads, value_dim], dtype of q.
    """
    count, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.float().view(count, kv_heads, heads // kv_heads, head_dim)
    logits = torch.einsum("ckgd,lkd->ckgl", grouped, k.float()) * scale
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~seen[:, None, None, :], float("-inf"))
    if sinks is None:
        weights = logits.softmax(-1)
    else:
        sink = sinks.to(logits).view(1, kv_heads, -1, 1).expand(count, -1, -1, 1)
        weights = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
    out = torch.einsum("ckgl,lkd->ckgd", weights, v.float())
    return out.reshape(count, heads, v.shape[-1]).to(q.dtype)
