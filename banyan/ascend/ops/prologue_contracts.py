"""What the NPU's operator for all that comes before latent attention accepts, as `contracts.py` has
it. Its rows are joined along the tokens, and its pages are not quantised."""

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
MODES = PLAIN_PAGES, FRACTAL_PAGES = "PA_BSND", "PA_NZ"
"""How pages lie: token by token; or 16 numbers of each token of a page, then the next 16."""
_NAME = "npu_mla_prolog_v3"
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
    require(mode in (PLAIN, QUERIES, WHOLLY), _NAME, f"weight_quant_mode {mode} is not served here")
    require(cache_mode in MODES, _NAME, f"cache_mode must be {either(MODES)}, it is {cache_mode}")
    floats = {"gamma_cq": gammas[0], "gamma_ckv": gammas[1], "rope_sin": angles[0]}
    floats |= {"rope_cos": angles[1], "kv_cache": pages[0], "kr_cache": pages[1]}
    inner = {"weight_dq": weights.squeeze, "weight_dkv_kr": weights.latent}
    heads = {"weight_uq_qr": weights.query}
    scales = dict(zip((*inner, *heads), _scales(weights), strict=True))
    rows = {"token_x": x, "dequant_scale_x": units, "cache_index": places}
    placed(_NAME, **rows, weight_uk=weights.keys, **floats, **inner, **heads)
    placed(_NAME, **{f"dequant_scale of {name}": scale for name, scale in scales.items()})
    typed(_NAME, (half,), weight_uk=weights.keys, **floats)
    typed(_NAME, (torch.int8 if mode == WHOLLY else half,), token_x=x, **inner)
    typed(_NAME, (half if mode == PLAIN else torch.int8,), **heads)
    typed(_NAME, (torch.int64,), cache_index=places)
    _sizes(x, weights, gammas, angles, places)
    _paged(pages, (FRACTAL_PAGE,) if cache_mode == FRACTAL_PAGES else LATENT_PAGES)
    for name, scale in scales.items():
        is_rounded = mode == WHOLLY or (mode == QUERIES and name in heads)
        outputs = {**inner, **heads}[name].shape[1]
        _factor(f"the dequant_scale of {name}", scale, (1, outputs) if is_rounded else None)
    _factor("dequant_scale_x", units, (len(x), 1) if mode == WHOLLY else None)


def _scales(weights: PrologWeights) -> tuple[Tensor | None, ...]:
    squeeze, query, latent = weights.scales
    return squeeze, latent, query


def _sizes(
    x: Tensor,
    weights: PrologWeights,
    gammas: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    places: Tensor,
) -> None:
    require(
        x.dim() == 2 and x.shape[1] in DIMS and len(x) <= _MOST_TOKENS,
        _NAME,
        f"token_x must be [up to {_MOST_TOKENS} tokens, {either(DIMS)}], it is {shape_of(x)}",
    )
    tokens, dim = x.shape
    heads = len(weights.keys)
    require(
        heads in HEADS, _NAME, f"heads must be a power of 2 up to {HEADS[-1]}, they are {heads}"
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
            _NAME,
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


def _paged(pages: tuple[Tensor, Tensor], sizes: tuple[int, ...]) -> None:
    latents, keys = pages
    size = latents.shape[1] if latents.dim() == 4 else 0
    for name, part, width in (
        ("kv_cache", latents, LATENT_DIM),
        ("kr_cache", keys, LATENT_ROPE_DIM),
    ):
        require(
            size in sizes and tuple(part.shape) == (len(latents), size, 1, width),
            _NAME,
            f"{name} must be [pages, {either(sizes)}, 1, {width}], it is {shape_of(part)}",
        )


def _factor(name: str, given: Tensor | None, wanted: tuple[int, int] | None) -> None:
    """wanted: None = what it would belong to is not of 8 bits."""
    if wanted is None or given is None:
        is_right = (wanted is None) == (given is None)
        needed = "must be given" if wanted else "must be left out"
        require(is_right, _NAME, f"{name} {needed} in this weight_quant_mode")
        return
    typed(_NAME, (torch.float32,), **{name: given})
    require(
        tuple(given.shape) == wanted,
        _NAME,
        f"{name} must be {list(wanted)}, it is {shape_of(given)}",
    )
