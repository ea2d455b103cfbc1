"""Attention along the paths of draft trees in Triton against the reference; where it runs:
`triton_device.py`."""

import pytest
import torch

from banyan.ops import reference
from banyan.ops.cuda import triton_attention, triton_latent
from tests.ops.triton_device import ABSENCE, DEVICE, PAGE, TYPES, close, random

if ABSENCE:
    pytest.skip(ABSENCE, allow_module_level=True)

PARENTS = (-1, 0, 0, 1, 1, 4)
"""Of the tokens of a tree, the newest token first."""
ROWS = ((3, 4, False), (21, 6, True), (0, 1, False), (64, 5, True))
"""(positions before, tokens, whether they branch)."""
COLUMNS, MOST = 6, 4


def places_to(token: int) -> list[int]:
    return [] if token < 0 else [*places_to(PARENTS[token]), token]


def world(first: int = 0):
    """Rows, their page tables and paths; pages of the tables are in no order."""
    counts = [count for _, count, _ in ROWS]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    paths = torch.zeros(sum(counts), 2 + MOST, dtype=torch.int32)
    for row, (context, count, branches) in enumerate(ROWS):
        for token in range(count if branches else 0):
            path = [context + place for place in places_to(token)]
            line = paths[int(starts[row]) + token]
            line[:2], line[2 : 2 + len(path)] = (
                torch.tensor([context, len(path)]),
                torch.tensor(path),
            )
    contexts = torch.tensor([max(context, first) for context, _, _ in ROWS], dtype=torch.int32)
    tables = torch.randperm(len(ROWS) * COLUMNS, generator=torch.Generator().manual_seed(1)) + 1
    where = (tables.view(len(ROWS), COLUMNS).int(), starts, contexts)
    return tuple(part.to(DEVICE) for part in where), paths.to(DEVICE), sum(counts)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "cap"),
    [(4, 2, 32, 0, 0.0), (3, 3, 20, 9, 0.0), (6, 1, 16, -2, 5.0)],
)
def test_tokens_attend_along_their_paths(heads, kv_heads, head_dim, window, cap, dtype):
    where, paths, tokens = world(max(0, -window))
    q = random(tokens, heads, head_dim, dtype=dtype)
    shape = (len(ROWS) * COLUMNS + 1, PAGE, kv_heads, head_dim)
    pages = [random(*shape, dtype=dtype, seed=s) for s in (1, 2)]
    sinks = random(heads, seed=3) if cap else None
    numbers = (head_dim**-0.5, window, cap, sinks)

    got = triton_attention.paged_attention.run(q, *pages, *where, *numbers, paths=paths)

    double = [part.double() for part in (q, *pages)]
    want = reference.paged_attention(*double, *where, *numbers, paths=paths)
    # Kernels need not keep to the first position in rows that do not branch.
    is_meant = paths[:, 1] > 0 if window < 0 else slice(None)
    close(got[is_meant], want[is_meant], dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("top", [0, 7])
def test_tokens_attend_to_latents_along_their_paths(top, parts, dtype, monkeypatch):
    monkeypatch.setattr(triton_latent, "_parts", lambda *_: parts)
    where, paths, tokens = world()
    q, turned = random(tokens, 5, 40, dtype=dtype), random(tokens, 5, 16, dtype=dtype, seed=5)
    shape = (len(ROWS) * COLUMNS + 1, PAGE)
    pages = [random(*shape, width, dtype=dtype, seed=width) for width in (40, 16)]
    given, chosen, exact = (q, turned, *pages), None, None
    if top:
        coarse = [part.round() for part in given]
        weights = random(tokens, 5, dtype=dtype, seed=9).round()
        asked = (*coarse[:2], weights, *coarse[2:])
        chosen = triton_latent.choose_positions.run(*asked, *where, top, 0, paths)
        exact = reference.choose_positions(*(x.double() for x in asked), *where, top, 0, paths)
        assert torch.equal(chosen, exact)

    got = triton_latent.latent_attention.run(*given, *where, 0.2, chosen, 0, paths)

    double = [part.double() for part in given]
    close(got, reference.latent_attention(*double, *where, 0.2, exact, 0, paths), dtype)
