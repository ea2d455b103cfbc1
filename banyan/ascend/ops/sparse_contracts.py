"""What the NPU's operators of sparse latent attention accept, as `contracts.py` has it."""

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import (
    HALVES,
    LATENT_DIM,
    LATENT_PAGES,
    LATENT_ROPE_DIM,
    placed,
    require,
    shape_of,
    typed,
)

INDEX_DIM, MOST_INDEX_HEADS = 128, 64
"""Width of a head of the indexer, and how many there may be."""
MOST_CHOSEN = 2048
"""Positions that a token reads, beside 3072, 4096 … 8192."""
_STEP, _MOST_STEPS = 1024, 8
_MOST_HEADS = 128


def is_count(top: int) -> bool:
    """Whether a token may read so many positions."""
    is_large = top % _STEP == 0 and top // _STEP <= _MOST_STEPS
    return 1 <= top <= MOST_CHOSEN or (top > 0 and is_large)


def count_from(top: int) -> int:
    """The least of these counts from `top` on; `top` itself where there is none."""
    steps = range(MOST_CHOSEN + _STEP, _STEP * _MOST_STEPS + 1, _STEP)
    return top if is_count(top) else next((count for count in steps if count >= top), top)


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    ends: Tensor,
    lengths: Tensor,
    table: Tensor,
    top: int,
) -> None:
    """query: [tokens, heads, 128]; key: [pages, page size, 1, 128]; weights: [tokens, heads];
    ends, lengths: [rows], on the device; table: [rows, pages of a row]."""
    name = "npu_lightning_indexer"
    placed(name, query=query, key=key, weights=weights, block_table=table)
    typed(name, HALVES, query=query, key=key, weights=weights)
    require(
        query.dim() == 3 and query.shape[2] == INDEX_DIM and query.shape[1] <= MOST_INDEX_HEADS,
        name,
        f"query must be [tokens, heads up to {MOST_INDEX_HEADS}, {INDEX_DIM}], it is "
        f"{shape_of(query)}",
    )
    require(
        tuple(weights.shape) == tuple(query.shape[:2]),
        name,
        f"weights must be {shape_of(query)[:2]}, they are {shape_of(weights)}",
    )
    _pages(name, key, INDEX_DIM)
    _rows(name, query, ends, lengths, table)
    require(
        is_count(top),
        name,
        f"sparse_count must be 1 to {MOST_CHOSEN} or 3072, 4096 … {_STEP * _MOST_STEPS}, "
        f"it is {top}",
    )


def sparse_flash_attention(
    query: Tensor,
    query_rope: Tensor,
    latents: Tensor,
    key_rope: Tensor,
    chosen: Tensor,
    ends: Tensor,
    lengths: Tensor,
    table: Tensor,
) -> None:
    """query: [tokens, heads, 512]; query_rope: the same, 64 wide; latents: [pages, page size, 1,
    512]; key_rope: the same, 64 wide; chosen: [tokens, 1, positions]; the others as above."""
    name = "npu_sparse_flash_attention"
    placed(name, query=query, query_rope=query_rope, key=latents, key_rope=key_rope)
    placed(name, query=query, sparse_indices=chosen, block_table=table)
    typed(name, HALVES, query=query, query_rope=query_rope, key=latents, key_rope=key_rope)
    typed(name, (torch.int32,), sparse_indices=chosen)
    heads = query.shape[1] if query.dim() == 3 else 0
    require(
        query.dim() == 3
        and query.shape[2] == LATENT_DIM
        and heads <= _MOST_HEADS
        and heads & (heads - 1) == 0,
        name,
        f"query must be [tokens, a power of two up to {_MOST_HEADS}, {LATENT_DIM}], it is "
        f"{shape_of(query)}",
    )
    wanted = [*query.shape[:2], LATENT_ROPE_DIM]
    require(
        shape_of(query_rope) == wanted,
        name,
        f"query_rope must be {wanted}, it is {shape_of(query_rope)}",
    )
    _pages(name, latents, LATENT_DIM)
    _pages(name, key_rope, LATENT_ROPE_DIM)
    _rows(name, query, ends, lengths, table)
    require(
        chosen.dim() == 3 and chosen.shape[:2] == (len(query), 1) and is_count(chosen.shape[2]),
        name,
        f"sparse_indices must be [{len(query)}, 1, positions], they are {shape_of(chosen)}",
    )


def _pages(name: str, pages: Tensor, width: int) -> None:
    require(
        pages.dim() == 4
        and tuple(pages.shape[2:]) == (1, width)
        and pages.shape[1] in LATENT_PAGES,
        name,
        f"pages must be [pages, {' or '.join(map(str, LATENT_PAGES))}, 1, {width}], they are "
        f"{shape_of(pages)}",
    )


def _rows(name: str, query: Tensor, ends: Tensor, lengths: Tensor, table: Tensor) -> None:
    given = {"actual_seq_lengths_query": ends, "actual_seq_lengths_key": lengths}
    placed(name, query=query, **given)
    typed(name, (torch.int32,), block_table=table, **given)
    rows = table.shape[0] if table.dim() == 2 else 0
    for key, of_rows in given.items():
        require(
            tuple(of_rows.shape) == (rows,) and rows > 0,
            name,
            f"{key} must be [{rows}] as block_table has rows, it is {shape_of(of_rows)}",
        )
