"""How pages keep K and V: numbers of the cache dtype, their scales, and paths of draft trees.

Floats of 8 bits are multiples of a factor of the layer, 1 by default; a finite number that is too
large becomes the largest one. int8 has a width of its own: a head of D numbers takes D bytes and
the 4 bytes of its fp32 scale, so that a page stays one block of memory. A number is scale · byte;
the largest one of a head is 127 or −127.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE_BYTES = 4
_LEAST = 2.0**-100
"""A head whose numbers are all smaller is kept as zeros: 127 / most must stay finite."""


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that K, or V, of one token and head takes in a page."""
    return head_dim + _SCALE_BYTES if dtype == torch.int8 else head_dim


def to_stored(x: Tensor, dtype: torch.dtype, unit: float = 1.0) -> Tensor:
    """K or V as a page keeps it; in bytes a head, in floats of 8 bits a number that is not finite
    becomes one that is no number.

    x: [..., head_dim]; returns: [..., stored_width] of `dtype`.
    """
    if dtype in FLOAT8:
        most = torch.finfo(dtype).max
        wide = x.float() * (1 / unit)
        return torch.where(wide.isfinite(), wide.clamp(-most, most), torch.nan).to(dtype)
    if dtype != torch.int8:
        return x.to(dtype)
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    is_seen = most >= _LEAST  # not where it is no number
    inverse = torch.full_like(most, 127).div(most)  # 127 / most would round twice
    factor = torch.where(is_seen & most.isfinite(), inverse, 0)
    scale = torch.where(most.isfinite(), torch.where(is_seen, most / 127, 0), torch.nan)
    numbers = (wide * factor).nan_to_num(0).round().to(torch.int8)
    return torch.cat([numbers, scale.view(torch.int8)], dim=-1)


def to_numbers(stored: Tensor) -> Tensor:
    """The numbers that a page keeps.

    stored: [..., stored_width] of a cache dtype; returns: [..., head_dim], fp32 for 8 bits, of
    floats in their units.
    """
    if stored.dtype in FLOAT8:
        return stored.float()
    if stored.dtype != torch.int8:
        return stored
    numbers, scale = stored[..., :-_SCALE_BYTES], stored[..., -_SCALE_BYTES:]
    whole = scale.clone(memory_format=torch.contiguous_format)  # aligned, be it one
    return numbers.float() * whole.view(torch.float32)


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
