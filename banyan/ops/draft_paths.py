"""Paths: where the past of drafts that branch lies, as `ops.api.Ops.paged_attention` has them, and
tokens that are brought to other places once some drafts stand. The plain definition.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from banyan.ops.pages import FLOAT8


def walk_rows(
    row_starts: Tensor, context_lengths: Tensor, paths: Tensor | None
) -> Iterator[tuple[int, slice, Tensor, Tensor | None]]:
    """Row, tokens, their positions, and the path; a token that has one comes by itself."""
    starts = row_starts.tolist()  # sync: the reference walks the rows one by one
    contexts = context_lengths.tolist()  # sync: as above
    device = context_lengths.device
    for row, context in enumerate(contexts):
        tokens = slice(starts[row], starts[row + 1])
        if paths is None or tokens.start == tokens.stop or not paths[tokens.start, 1]:
            positions = torch.arange(context, context + tokens.stop - tokens.start, device=device)
            yield row, tokens, positions, None
            continue
        for token in range(tokens.start, tokens.stop):
            base, length = paths[token, :2].tolist()  # sync: as above
            last = torch.full((1,), base + length - 1, device=device)
            yield row, slice(token, token + 1), last, paths[token, : 2 + length]


def places_on(path: Tensor, first: int, last: int) -> Tensor:
    """Where the positions first … last lie; [last - first + 1] int64."""
    places = torch.arange(first, last + 1, device=path.device)
    after = places >= path[0]
    places[after] = path[2:].long()[places[after] - path[0]]
    return places


def move_tokens(pages: Tensor, sources: Tensor, targets: Tensor) -> None:
    """What lies token by token to other places, all at once; pages: [num_pages, page_size, …]."""
    flat = pages.flatten(0, 1)
    flat = flat.view(torch.uint8) if flat.dtype in FLOAT8 else flat
    flat[targets] = flat[sources]
