"""Cases of the operator for all that comes before latent attention, as `cases.py` has them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from banyan.ascend.ops.case import Case, Place
from banyan.ascend.ops.contracts import FRACTAL, LATENT_DIM, LATENT_ROPE_DIM
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.prologue_contracts import (
    DIMS,
    FRACTAL_PAGES,
    PLAIN,
    PLAIN_DIM,
    PLAIN_PAGES,
    QUERIES,
    QUERY_RANK,
    WHOLLY,
    PrologWeights,
)
from banyan.ops import reference

_TOKENS, _HEADS, _PAGES, _PAGE = 5, 2, 3, 128
_EPS = (1e-6, 1e-5)
_SLACK = 0.1
"""Squeezed queries are rounded to 8 bits within, and a number may be rounded to its neighbour."""
_NAMES = {PLAIN: "plain weights", QUERIES: "heads of 8 bits", WHOLLY: "weights of 8 bits"}


def prologue_cases() -> Iterator[Case]:
    for mode in _NAMES:
        yield _case(mode)
    yield _case(WHOLLY, is_fractal=True)
    yield _scatter()


def as_fractal(pages: Tensor) -> Tensor:
    """[pages, page size, width] token by token -> [pages, width / 16, page size, 16]"""
    return pages.unflatten(2, (-1, FRACTAL)).transpose(1, 2).contiguous()


def _scatter() -> Case:
    places = torch.tensor([130, 131, 3, 383, 129])
    generator = torch.Generator().manual_seed(9)
    latents, keys = (
        torch.randn(_TOKENS, 1, width, generator=generator).to(torch.bfloat16)
        for width in (LATENT_DIM, LATENT_ROPE_DIM)
    )

    def run(operators: Operators, place: Place) -> list[Tensor]:
        one, two = (place(as_fractal(part[:, :, 0])) for part in empty_pages())
        operators.latents.scatter_pages(place(latents), place(keys), (one, two), place(places))
        return [one, two]

    def wanted() -> list[Tensor]:
        pages = [part[:, :, 0] for part in empty_pages()]
        for part, values in zip(pages, (latents, keys), strict=True):
            part.flatten(0, 1)[places] = values[:, 0]
        return [as_fractal(part) for part in pages]

    return Case("npu_scatter_pa_kv_cache", "fractal pages, bfloat16", run, wanted, 0.0)


def _case(mode: int, is_fractal: bool = False) -> Case:
    pages_lie = FRACTAL_PAGES if is_fractal else PLAIN_PAGES

    def run(operators: Operators, place: Place) -> list[Tensor]:
        x, weights, gammas, turns, places = inputs(mode)
        there = replace(
            weights,
            squeeze=operators.cast_fractal(place(weights.squeeze)),
            query=operators.cast_fractal(place(weights.query)),
            latent=operators.cast_fractal(place(weights.latent)),
            keys=place(weights.keys),
            scales=tuple(None if s is None else place(s) for s in weights.scales),
        )
        units = None
        rows = place(x)
        if mode == WHOLLY:
            rows, units = operators.dynamic_quant(rows)
            units = units.unsqueeze(1)
        latents, keys = empty_pages()
        pages = (place(latents), place(keys))
        norms = (place(gammas[0]), place(gammas[1]))
        angles = (place(turns[0]), place(turns[1]))
        given = (rows, units, there, norms, angles, pages, place(places), _EPS)
        query, turned, normed, factors = operators.latents.mla_prolog(
            *given, has_norm=True, mode=pages_lie
        )
        if mode != PLAIN:
            normed = normed.float() * factors
        return [query, turned, normed, *pages]

    def wanted() -> list[Tensor]:
        *queries, latents, keys = _wanted(mode)
        pages = [latents, keys]
        if is_fractal:  # in the same memory
            pages = [as_fractal(part[:, :, 0]).view(part.shape) for part in pages]
        return [*queries, *pages]

    name = f"{_NAMES[mode]}, {'fractal pages, ' if is_fractal else ''}bfloat16"
    return Case("npu_mla_prolog_v3", name, run, wanted, _SLACK)


def _wanted(mode: int) -> list[Tensor]:
    x, weights, gammas, (sin, cos), places = inputs(mode)
    squeeze, query, latent = (
        part.float() if scale is None else part.float() * scale
        for part, scale in zip(
            (weights.squeeze, weights.query, weights.latent), weights.scales, strict=True
        )
    )
    angles = tuple(part[:, : LATENT_ROPE_DIM // 2].float() for part in (cos, sin))
    normed = reference.rms_norm(x.float() @ squeeze, gammas[0].float(), _EPS[0])
    heads = (normed @ query).unflatten(1, (_HEADS, -1))
    plain, turning = heads.split([PLAIN_DIM, LATENT_ROPE_DIM], -1)
    kept, key = (x.float() @ latent).split([LATENT_DIM, LATENT_ROPE_DIM], -1)
    halves = [part.unflatten(-1, (-1, 2)).mT.flatten(-2) for part in (turning, key.unsqueeze(1))]
    turned, key = reference.rotary(*halves, *angles)
    pages = empty_pages()
    for part, values in zip(
        pages, (reference.rms_norm(kept, gammas[1].float(), _EPS[1]), key), strict=True
    ):
        part.flatten(0, 2)[places] = values.flatten(1).to(part.dtype)
    in_space = torch.einsum("thp,hpr->thr", plain, weights.keys.float())
    return [in_space, turned, normed, *pages]


def empty_pages() -> tuple[Tensor, Tensor]:
    latents = torch.zeros(_PAGES, _PAGE, 1, LATENT_DIM, dtype=torch.bfloat16)
    return latents, latents[..., :LATENT_ROPE_DIM].contiguous()


Inputs = tuple[Tensor, PrologWeights, tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]


@cache
def inputs(mode: int) -> Inputs:
    """x, weights, gammas, sin and cos, places."""
    dim, half = DIMS[0], torch.bfloat16
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def matrix(inputs: int, outputs: int, is_rounded: bool) -> tuple[Tensor, Tensor | None]:
        """A narrow one, side by side: that is quicker to make. Sums of it are about one."""
        narrow = drawn(inputs, 64).repeat(1, outputs // 64)
        if not is_rounded:
            return (narrow * inputs**-0.5).to(half), None
        scale = (1 + torch.arange(outputs).view(1, -1) % 7) / 4 / 32 * inputs**-0.5
        return (narrow * 32).round().clamp(-127, 127).to(torch.int8), scale

    squeeze, of_squeeze = matrix(dim, QUERY_RANK, mode == WHOLLY)
    width = PLAIN_DIM + LATENT_ROPE_DIM
    query, of_query = matrix(QUERY_RANK, _HEADS * width, mode != PLAIN)
    latent, of_latent = matrix(dim, LATENT_DIM + LATENT_ROPE_DIM, mode == WHOLLY)
    keys = (drawn(_HEADS, PLAIN_DIM, LATENT_DIM) * PLAIN_DIM**-0.5).to(half)
    scales = (of_squeeze, of_query, of_latent)
    gammas = ((1 + drawn(QUERY_RANK) / 4).to(half), (1 + drawn(LATENT_DIM) / 4).to(half))
    angles = drawn(_TOKENS, LATENT_ROPE_DIM // 2).repeat(1, 2)
    turns = (angles.sin().to(half), angles.cos().to(half))
    places = torch.tensor([130, 131, 3, 383, 129])
    weights = PrologWeights(mode, squeeze, query, keys, latent, scales)
    return drawn(_TOKENS, dim).to(half), weights, gammas, turns, places
