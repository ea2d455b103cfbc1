"""Latent attention (MLA) in Triton: one kernel for rows of one token and of many.

With few queries, several programs share the keys of a row. The grids depend on the numbers of rows
and tokens, never on lengths, so launches can be captured. The number of programs per row also
depends on the number of tokens, so the last bits of a result may depend on the rest of the batch.
"""

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cuda.needs import LEAST_BLOCK, TYPES, declines, power_of_two

_LEAST = 128
"""A part of the keys has a multiple of this number."""
_PROGRAMS = 264
"""Two per multiprocessor of an H100."""
_MOST_PARTS = 64
_SCORES = 1 << 26
"""Scores of an indexer that exist at once."""
_TILE = 2048
"""Scores that a program chooses from at once."""


def _declines(spec: OpSpec) -> str | None:
    reason = declines(spec)
    if reason is None and spec.cache_dtype not in TYPES:
        return f"cannot read pages of {spec.cache_dtype}"
    return reason


def _write_latent(
    latent: Tensor, key: Tensor, latent_pages: Tensor, key_pages: Tensor, flat_locations: Tensor
) -> None:
    from banyan.ops.cuda.latent_kernels import write_latents

    (tokens, rank), rope_dim = latent.shape, key.shape[1]
    if not tokens:
        return
    assert latent.stride(1) == key.stride(1) == 1, f"{latent.stride()} {key.stride()}"
    write_latents[(tokens,)](
        latent,
        key,
        latent_pages,
        key_pages,
        flat_locations,
        latent.stride(0),
        key.stride(0),
        *latent_pages.stride()[:2],
        *key_pages.stride()[:2],
        rank,
        rope_dim,
        PAGE=latent_pages.shape[1],
        BLOCK_R=power_of_two(rank, LEAST_BLOCK),
        BLOCK_T=power_of_two(rope_dim, LEAST_BLOCK),
        num_warps=1,
    )


def _latent_attention(
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
    from banyan.ops.cuda.latent_kernels import attend_latents, join_parts

    tokens, heads, rank = q.shape
    rows, page_size = len(context_lengths), latent_pages.shape[1]
    out = torch.empty((tokens, heads, rank), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    assert q.stride(2) == q_turned.stride(2) == 1, f"{q.stride()} {q_turned.stride()}"
    block, keys, warps, stages = _sizes(tokens == rows, heads, q.dtype)
    group = min(heads, block)
    # Tokens of a draft tree see different places.
    per_block, head_blocks = block // group if paths is None else 1, -(-heads // group)
    most = page_tables.shape[1] * page_size
    parts = _parts(-(-tokens // per_block) * head_blocks, most)
    found, sums = out.unsqueeze(0), context_lengths
    if parts > 1:
        found, sums = (
            torch.empty((parts, tokens, heads, *more), dtype=torch.float32, device=q.device)
            for more in ((rank,), ())
        )
    widths = {"BLOCK_R": power_of_two(rank, LEAST_BLOCK), "PER_BLOCK": per_block, "LEAST": _LEAST}
    attend_latents[(tokens // per_block + rows, head_blocks, parts)](
        q,
        q_turned,
        latent_pages,
        key_pages,
        page_tables,
        row_starts,
        context_lengths,
        context_lengths if chosen is None else chosen,
        found,
        sums,
        scale,
        first,
        rows,
        heads,
        rank,
        q_turned.shape[2],
        parts,
        *q.stride()[:2],
        *q_turned.stride()[:2],
        *latent_pages.stride()[:2],
        *key_pages.stride()[:2],
        page_tables.stride(0),
        0 if chosen is None else chosen.stride(0),
        found.stride(1),
        found.stride(2),
        found.stride(0),
        tokens * heads,
        *_path_of(paths, row_starts),
        HAS_PATHS=paths is not None,
        HAS_CHOSEN=chosen is not None,
        IS_DIVIDED=parts > 1,
        PAGE=page_size,
        BLOCK_T=power_of_two(q_turned.shape[2], LEAST_BLOCK),
        GROUP=group,
        BLOCK=block,
        KEYS=keys,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **widths,
        num_warps=warps,
        num_stages=stages,
    )
    if parts > 1:
        join_parts[(tokens, heads)](
            found,
            sums,
            out,
            row_starts,
            context_lengths,
            first,
            rows,
            heads,
            rank,
            parts,
            found.stride(1),
            found.stride(2),
            found.stride(0),
            tokens * heads,
            *out.stride()[:2],
            *_path_of(paths, row_starts),
            HAS_PATHS=paths is not None,
            PARTS=parts,
            **widths,
            num_warps=1 if rank <= 128 else 2,
        )
    return out


def _choose_positions(
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
    from banyan.ops.cuda.latent_kernels import choose_best, score_positions

    (tokens, heads, width), rows = q.shape, len(context_lengths)
    rope_dim, page_size = q_turned.shape[2], key_pages.shape[1]
    most = page_tables.shape[1] * page_size
    chosen = torch.zeros((tokens, -(-most // 32)), dtype=torch.int32, device=q.device)
    if not tokens:
        return chosen
    assert q.stride(2) == q_turned.stride(2) == weights.stride(1) == 1
    at_once = max(1, _SCORES // most)
    scores = torch.empty((min(tokens, at_once), most), dtype=torch.float32, device=q.device)
    where = (page_tables, row_starts, context_lengths)
    for begin in range(0, tokens, at_once):
        count = min(at_once, tokens - begin)
        parts = max(1, min(-(-most // _LEAST), _PROGRAMS // count))
        score_positions[(count, parts)](
            q,
            q_turned,
            weights,
            key_pages,
            turned_pages,
            *where,
            scores,
            begin,
            first,
            rows,
            heads,
            width,
            rope_dim,
            top,
            parts,
            *q.stride()[:2],
            *q_turned.stride()[:2],
            weights.stride(0),
            *key_pages.stride()[:2],
            *turned_pages.stride()[:2],
            page_tables.stride(0),
            scores.stride(0),
            *_path_of(paths, row_starts),
            HAS_PATHS=paths is not None,
            PAGE=page_size,
            BLOCK_D=power_of_two(width, LEAST_BLOCK),
            BLOCK_T=power_of_two(rope_dim, LEAST_BLOCK),
            HEADS=power_of_two(heads, LEAST_BLOCK),
            KEYS=_LEAST if q.dtype != torch.float32 else LEAST_BLOCK,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=4,
        )
        choose_best[(count,)](
            scores,
            chosen,
            *where[1:],
            begin,
            first,
            rows,
            top,
            scores.stride(0),
            chosen.stride(0),
            *_path_of(paths, row_starts),
            HAS_PATHS=paths is not None,
            TILE=_TILE,
            num_warps=4,
        )
    return chosen


def _path_of(paths: Tensor | None, other: Tensor) -> tuple[Tensor, int]:
    """A kernel's arguments of paths; other: a pointer that is not read."""
    return (other, 0) if paths is None else (paths, paths.stride(0))


def _sizes(is_decode: bool, heads: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(queries of a step, keys of a step, warps, load stages)."""
    if dtype == torch.float32:
        return 16, 16, 4, 1
    if is_decode and heads <= 16:
        return 16, 64, 4, 2
    if is_decode and heads <= 32:
        return 32, 32, 4, 3
    return 64, 32, 8, 2


def _parts(programs: int, most: int) -> int:
    """How many programs share the keys of a block of queries; a power of two.

    programs: blocks of queries; most: keys that a row can have.
    """
    wanted = min(_PROGRAMS // programs, -(-most // _LEAST), _MOST_PARTS)
    return 1 << max(0, wanted.bit_length() - 1)


write_latent = Kernel(supports=_declines, run=_write_latent)
latent_attention = Kernel(supports=_declines, run=_latent_attention)
choose_positions = Kernel(supports=_declines, run=_choose_positions)
