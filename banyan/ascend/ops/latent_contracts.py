"""Contracts of the operators of latent attention: the fused prologue, fractal pages, the indexer of
sparse attention, and attention over its positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import (
    FRACTAL,
    FRACTAL_PAGE,
    HALVES,
    LATENT_DIM,
    LATENT_PAGES,
    LATENT_ROPE_DIM,
    either,
    placed,
    require,
    shape_of,
    typed,
)

DIMS, QUERY_RANK, PLAIN_DIM = (6144, 7168, 7680), 1536, 128
"""Widths of the residual stream; of squeezed queries; of the part of a head that is not rotated."""
HEADS = tuple(1 << n for n in range(8))
PLAIN, QUERIES, WHOLLY = 0, 1, 2
"""Weights: none, those that make heads, or all but the keys' are of 8 bits."""
PAGE_MODES = PLAIN_PAGES, FRACTAL_PAGES = "PA_BSND", "PA_NZ"
"""How pages lie: token by token; or 16 numbers of each token of a page, then the next 16."""
_PROLOG = "npu_mla_prolog_v3"
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class PrologWeights:
    """
    Attributes:
        mode: PLAIN, QUERIES or WHOLLY.
        squeeze, query, latent: [dim, 1536], [1536, heads · 192], [dim, 576], of int8 or bf16 by the
            mode, in the fractal form.
        keys: [heads, 128, 512] bf16.
        scales: of those three, [1, outputs] fp32, None of plain ones.
    """

    mode: int
    squeeze: Tensor
    query: Tensor
    keys: Tensor
    latent: Tensor
    scales: tuple[Tensor | None, Tensor | None, Tensor | None]


def mla_prolog(
    x: Tensor,
    units: Tensor | None,
    weights: PrologWeights,
    gammas: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    places: Tensor,
    cache_mode: str,
) -> None:
    """x: [tokens, dim], of int8 with units [tokens, 1] where all weights are; gammas: [1536],
    [512]; angles: sin and cos, [tokens, 64]; pages: [pages, page size, 1, 512 and 64]; places:
    [tokens] int64."""
    mode, half = weights.mode, torch.bfloat16
    require(
        mode in (PLAIN, QUERIES, WHOLLY), _PROLOG, f"weight_quant_mode {mode} is not served here"
    )
    require(
        cache_mode in PAGE_MODES,
        _PROLOG,
        f"cache_mode must be {either(PAGE_MODES)}, it is {cache_mode}",
    )
    floats = {"gamma_cq": gammas[0], "gamma_ckv": gammas[1], "rope_sin": angles[0]}
    floats |= {"rope_cos": angles[1], "kv_cache": pages[0], "kr_cache": pages[1]}
    inner = {"weight_dq": weights.squeeze, "weight_dkv_kr": weights.latent}
    heads = {"weight_uq_qr": weights.query}
    scales = dict(zip((*inner, *heads), _prolog_scales(weights), strict=True))
    rows = {"token_x": x, "dequant_scale_x": units, "cache_index": places}
    placed(_PROLOG, **rows, weight_uk=weights.keys, **floats, **inner, **heads)
    placed(_PROLOG, **{f"dequant_scale of {name}": scale for name, scale in scales.items()})
    typed(_PROLOG, (half,), weight_uk=weights.keys, **floats)
    typed(_PROLOG, (torch.int8 if mode == WHOLLY else half,), token_x=x, **inner)
    typed(_PROLOG, (half if mode == PLAIN else torch.int8,), **heads)
    typed(_PROLOG, (torch.int64,), cache_index=places)
    _prolog_sizes(x, weights, gammas, angles, places)
    _prolog_pages(pages, (FRACTAL_PAGE,) if cache_mode == FRACTAL_PAGES else LATENT_PAGES)
    for name, scale in scales.items():
        is_rounded = mode == WHOLLY or (mode == QUERIES and name in heads)
        outputs = {**inner, **heads}[name].shape[1]
        _prolog_scale(f"the dequant_scale of {name}", scale, (1, outputs) if is_rounded else None)
    _prolog_scale("dequant_scale_x", units, (len(x), 1) if mode == WHOLLY else None)


def _prolog_scales(weights: PrologWeights) -> tuple[Tensor | None, ...]:
    squeeze, query, latent = weights.scales
    return squeeze, latent, query


def _prolog_sizes(
    x: Tensor,
    weights: PrologWeights,
    gammas: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    places: Tensor,
) -> None:
    require(
        x.dim() == 2 and x.shape[1] in DIMS and len(x) <= _MOST_TOKENS,
        _PROLOG,
        f"token_x must be [up to {_MOST_TOKENS} tokens, {either(DIMS)}], it is {shape_of(x)}",
    )
    tokens, dim = x.shape
    heads = len(weights.keys)
    require(
        heads in HEADS, _PROLOG, f"heads must be a power of 2 up to {HEADS[-1]}, they are {heads}"
    )
    for name, part, wanted in (
        ("weight_dq", weights.squeeze, (dim, QUERY_RANK)),
        ("weight_uq_qr", weights.query, (QUERY_RANK, heads * (PLAIN_DIM + LATENT_ROPE_DIM))),
        ("weight_uk", weights.keys, (heads, PLAIN_DIM, LATENT_DIM)),
        ("weight_dkv_kr", weights.latent, (dim, LATENT_DIM + LATENT_ROPE_DIM)),
        ("gamma_cq", gammas[0], (QUERY_RANK,)),
        ("gamma_ckv", gammas[1], (LATENT_DIM,)),
        ("rope_sin", angles[0], (tokens, LATENT_ROPE_DIM)),
        ("rope_cos", angles[1], (tokens, LATENT_ROPE_DIM)),
        ("cache_index", places, (tokens,)),
    ):
        require(
            tuple(part.shape) == wanted,
            _PROLOG,
            f"{name} must be {list(wanted)}, it is {shape_of(part)}",
        )


def scatter_pages(
    latents: Tensor, keys: Tensor, pages: tuple[Tensor, Tensor], places: Tensor
) -> None:
    """latents, keys: [tokens, 1, width]; pages: in the fractal form, [pages, width / 16, 128, 16];
    places: [tokens]."""
    name = "npu_scatter_pa_kv_cache"
    given = {"key": latents, "value": keys, "key_cache": pages[0], "value_cache": pages[1]}
    placed(name, **given, slot_mapping=places)
    typed(name, HALVES, **given)
    typed(name, (torch.int32, torch.int64), slot_mapping=places)
    tokens = len(places)
    for key, part in (("key", latents), ("value", keys)):
        width = part.shape[-1]
        require(
            tuple(part.shape) == (tokens, 1, width) and width % FRACTAL == 0,
            name,
            f"{key} must be [{tokens}, 1, a multiple of {FRACTAL}], it is {shape_of(part)}",
        )
        wanted = (len(pages[0]), width // FRACTAL, FRACTAL_PAGE, FRACTAL)
        cache = given[f"{key}_cache"]
        require(
            tuple(cache.shape) == wanted,
            name,
            f"{key}_cache must be {list(wanted)}, it is {shape_of(cache)}",
        )


def _prolog_pages(pages: tuple[Tensor, Tensor], sizes: tuple[int, ...]) -> None:
    latents, keys = pages
    size = latents.shape[1] if latents.dim() == 4 else 0
    for name, part, width in (
        ("kv_cache", latents, LATENT_DIM),
        ("kr_cache", keys, LATENT_ROPE_DIM),
    ):
        require(
            size in sizes and tuple(part.shape) == (len(latents), size, 1, width),
            _PROLOG,
            f"{name} must be [pages, {either(sizes)}, 1, {width}], it is {shape_of(part)}",
        )


def _prolog_scale(name: str, given: Tensor | None, wanted: tuple[int, int] | None) -> None:
    """wanted: None = what it would belong to is not of 8 bits."""
    if wanted is None or given is None:
        is_right = (wanted is None) == (given is None)
        needed = "must be given" if wanted else "must be left out"
        require(is_right, _PROLOG, f"{name} {needed} in this weight_quant_mode")
        return
    typed(_PROLOG, (torch.float32,), **{name: given})
    require(
        tuple(given.shape) == wanted,
        _PROLOG,
        f"{name} must be {list(wanted)}, it is {shape_of(given)}",
    )


INDEX_DIM, MOST_INDEX_HEADS = 128, 64
"""Width of a head of the indexer, and how many there may be."""
MOST_CHOSEN = 2048
"""Most positions that a token reads, apart from 3072, 4096 … 8192."""
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
    _sparse_pages(name, key, INDEX_DIM)
    _sparse_rows(name, query, ends, lengths, table)
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
    _sparse_pages(name, latents, LATENT_DIM)
    _sparse_pages(name, key_rope, LATENT_ROPE_DIM)
    _sparse_rows(name, query, ends, lengths, table)
    require(
        chosen.dim() == 3 and chosen.shape[:2] == (len(query), 1) and is_count(chosen.shape[2]),
        name,
        f"sparse_indices must be [{len(query)}, 1, positions], they are {shape_of(chosen)}",
    )


def _sparse_pages(name: str, pages: Tensor, width: int) -> None:
    require(
        pages.dim() == 4
        and tuple(pages.shape[2:]) == (1, width)
        and pages.shape[1] in LATENT_PAGES,
        name,
        f"pages must be [pages, {' or '.join(map(str, LATENT_PAGES))}, 1, {width}], they are "
        f"{shape_of(pages)}",
    )


def _sparse_rows(name: str, query: Tensor, ends: Tensor, lengths: Tensor, table: Tensor) -> None:
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
