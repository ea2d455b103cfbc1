"""What the operators of an Ascend NPU accept: dtypes, shapes, layouts and limits, one function
each.

On the device a wrong argument ends in an error number of the library below, or in wrong results and
no error at all. Here it is a sentence. A contract reads arguments only, no device memory. Limits
are common to A2 and A3. This module has attention, norms and collectives; `latent_contracts.py` and
`product_contracts.py` have the rest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from banyan.base.errors import DeviceError

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
MASKS = (torch.bool, torch.int8, torch.uint8)
MASK_SIZE = 2048
"""Of the one triangle that stands for every causal mask."""
ALL, CAUSAL, BAND = 0, 3, 4
"""Sparse modes: no mask; aligned to the last key; the same with a window."""
PAGE_STEP, LARGEST_PAGE = 128, 512
TOGETHER_DIMS = (128, 192, 256)
"""Head sizes for which rows of many tokens may be joined along the tokens (layout TND)."""
_MOST_HEADS, _MOST_SHARING, _LARGEST_DIM, _DIM_STEP = 256, 64, 512, 16
_MOST_ROWS = 65536
LATENT_DIM, LATENT_ROPE_DIM = 512, 64
"""Widths of the one vector and of the one turned key that all heads of latent attention share."""
FRACTAL, FRACTAL_PAGE, FRACTAL_AXES = 16, 128, 5
"""Pages of latents in the fractal form (NZ): numbers that lie together, tokens of a page, and axes
as attention reads them."""
LATENT_HEADS, LATENT_PAGES, LATENT_TOKENS = (32, 64, 128), (16, 128), 16
"""Counts of heads, sizes of pages, and the most tokens of a row, for latent attention."""
_MOST_WIDTH = 65535
_MOST_ROTARY_DIM, _MOST_ROTARY_HEADS = 896, 1000


class ContractError(DeviceError):
    """An operator was called in a way that the device does not accept."""


def require(is_kept: bool, operator: str, otherwise: str) -> None:
    if not is_kept:
        raise ContractError(f"{operator}: {otherwise}")


def rms_norm(x: Tensor, gamma: Tensor) -> None:
    name = "npu_rms_norm"
    placed(name, x=x, gamma=gamma)
    typed(name, FLOATS, x=x, gamma=gamma)
    _last_dim(name, x, gamma)


def add_rms_norm(x: Tensor, residual: Tensor, gamma: Tensor) -> None:
    name = "npu_add_rms_norm"
    placed(name, x1=x, x2=residual, gamma=gamma)
    typed(name, FLOATS, x1=x, x2=residual, gamma=gamma)
    shapes = f"{shape_of(x)} and {shape_of(residual)}"
    require(x.shape == residual.shape, name, f"x1 and x2 must have one shape, they have {shapes}")
    _last_dim(name, x, gamma)


def swiglu(x: Tensor) -> None:
    name = "npu_swiglu"
    placed(name, x=x)
    typed(name, FLOATS, x=x)
    require(x.shape[-1] % 2 == 0, name, f"the last dimension must be even, it is {x.shape[-1]}")


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x: [1, tokens, heads, dim]; cos, sin: [1, tokens, 1, dim]."""
    name = "npu_rotary_mul"
    placed(name, x=x, r1=cos, r2=sin)
    typed(name, FLOATS, x=x, r1=cos, r2=sin)
    ranks = {tensor.dim() for tensor in (x, cos, sin)}
    require(ranks == {4}, name, f"x, r1 and r2 must have 4 dimensions, they have {sorted(ranks)}")
    width, heads = x.shape[3], x.shape[0] * x.shape[2]
    require(
        width % 2 == 0 and width < _MOST_ROTARY_DIM,
        name,
        f"the last dimension must be even and less than {_MOST_ROTARY_DIM}, it is {width}",
    )
    require(
        heads < _MOST_ROTARY_HEADS,
        name,
        f"batch times heads must be less than {_MOST_ROTARY_HEADS}, it is {heads}",
    )
    wanted = (x.shape[0], x.shape[1], 1, width)
    for given in (cos, sin):
        require(
            tuple(given.shape) == wanted,
            name,
            f"r1 and r2 must be {list(wanted)} for x {shape_of(x)}, one is {shape_of(given)}",
        )


def scatter_nd_update(pages: Tensor, indices: Tensor, updates: Tensor) -> None:
    name = "npu_scatter_nd_update_"
    placed(name, self=pages, indices=indices, updates=updates)
    typed(name, (torch.int32, torch.int64), indices=indices)
    types = f"{updates.dtype} and {pages.dtype}"
    require(
        updates.dtype == pages.dtype, name, f"updates must have the dtype of self, they are {types}"
    )
    depth = indices.shape[-1] if indices.dim() else 0
    require(
        indices.dim() >= 2 and depth <= pages.dim(),
        name,
        f"indices must have 2 dimensions or more, the last of at most {pages.dim()}; "
        f"they are {shape_of(indices)}",
    )
    wanted = (*indices.shape[:-1], *pages.shape[depth:])
    require(
        tuple(updates.shape) == wanted,
        name,
        f"updates must be {list(wanted)}, they are {shape_of(updates)}",
    )


def fused_infer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None,
    actual_seq_lengths: Sequence[int] | None,
    actual_seq_lengths_kv: Sequence[int] | None,
    block_table: Tensor | None,
    num_heads: int,
    num_key_value_heads: int,
    input_layout: str,
    sparse_mode: int,
    block_size: int,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> None:
    """Attention over pages. query: BSND [rows, tokens, heads, dim] or TND [tokens, heads, dim];
    key, value: [pages, block_size, kv_heads · dim].

    With query_rope [as query, but 64 wide] and key_rope [pages, block_size, 64] the keys are latent
    vectors, which are the values too; these pages may be fractal, as `prologue_contracts.py` has
    them, with an axis of one head after the pages. learnable_sink: [heads].
    """
    name = "npu_fused_infer_attention_score"
    require(block_table is not None, name, "only attention over pages is served here")
    assert block_table is not None
    placed(name, query=query, key=key, value=value, block_table=block_table, atten_mask=atten_mask)
    typed(name, HALVES, query=query, key=key, value=value)
    typed(name, (torch.int32,), block_table=block_table)
    _heads(name, num_heads, num_key_value_heads)
    is_latent = query_rope is not None or key_rope is not None
    together = (LATENT_DIM,) if is_latent else TOGETHER_DIMS
    rows = _query(name, query, input_layout, num_heads, actual_seq_lengths, together)
    width = query.shape[-1]
    require(
        width <= _LARGEST_DIM and width % _DIM_STEP == 0,
        name,
        f"heads must have a multiple of {_DIM_STEP} and at most {_LARGEST_DIM} dimensions, "
        f"they have {width}",
    )
    is_single = input_layout == "BSND" and query.shape[1] == 1
    is_fractal = is_latent and key.dim() == FRACTAL_AXES
    if is_latent:
        allowed = (FRACTAL_PAGE,) if is_fractal else LATENT_PAGES
        sizes = either(allowed)
        require(block_size in allowed, name, f"block_size must be {sizes}, it is {block_size}")
    else:
        _block_size(name, block_size, is_single)
    wanted = (block_size, num_key_value_heads * width)
    require(wanted[1] <= _MOST_WIDTH, name, f"pages are {wanted[1]} wide, not up to {_MOST_WIDTH}")
    if is_fractal:
        wanted = (num_key_value_heads, width // FRACTAL, block_size, FRACTAL)
    for page in (key, value):
        require(
            tuple(page.shape[1:]) == wanted,
            name,
            f"pages must be [pages, {', '.join(map(str, wanted))}], they are {shape_of(page)}",
        )
    require(key.shape == value.shape, name, "key and value must have as many pages")
    _lengths_of_pages(name, actual_seq_lengths_kv, block_table, rows, block_size)
    if is_latent:
        _latent(name, query, key, query_rope, key_rope, num_key_value_heads)
        _latent_rows(name, query, input_layout, actual_seq_lengths, sparse_mode, is_single)
    if not is_single:
        _mask(name, atten_mask, sparse_mode)
    if learnable_sink is not None:
        _sink(name, query, learnable_sink, num_heads, is_latent)


def _latent(
    name: str,
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    kv_heads: int,
) -> None:
    require(
        query_rope is not None and key_rope is not None,
        name,
        "query_rope and key_rope come together or not at all",
    )
    assert query_rope is not None and key_rope is not None
    placed(name, query=query, query_rope=query_rope, key_rope=key_rope)
    typed(name, HALVES, query=query, query_rope=query_rope, key_rope=key_rope)
    heads, width = query.shape[-2:]
    require(
        width == LATENT_DIM and heads in LATENT_HEADS and kv_heads == 1,
        name,
        f"latents have {LATENT_DIM} dimensions, {either(LATENT_HEADS)} heads and 1 kv head; "
        f"they have {width}, {heads} and {kv_heads}",
    )
    of_key = (*key.shape[:-1], LATENT_ROPE_DIM)
    if key.dim() == FRACTAL_AXES:
        of_key = (*key.shape[:2], LATENT_ROPE_DIM // FRACTAL, *key.shape[3:])
    for rope, wanted in (
        (query_rope, (*query.shape[:-1], LATENT_ROPE_DIM)),
        (key_rope, of_key),
    ):
        require(
            tuple(rope.shape) == wanted,
            name,
            f"query_rope and key_rope must be as query and key but {LATENT_ROPE_DIM} wide; "
            f"{list(wanted)} is {shape_of(rope)}",
        )


def _latent_rows(
    name: str,
    query: Tensor,
    layout: str,
    ends: Sequence[int] | None,
    mode: int,
    is_single: bool,
) -> None:
    counts = [query.shape[1]]
    if layout == "TND":
        assert ends is not None
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    require(
        max(counts) <= LATENT_TOKENS,
        name,
        f"rows over latents have at most {LATENT_TOKENS} tokens, one has {max(counts)}",
    )
    wanted = ALL if is_single else CAUSAL
    require(mode == wanted, name, f"sparse_mode over latents must be {wanted} here, it is {mode}")


def _sink(name: str, query: Tensor, sink: Tensor, heads: int, is_latent: bool) -> None:
    require(not is_latent, name, "there are no sinks over latents")
    placed(name, query=query, learnable_sink=sink)
    typed(name, (torch.bfloat16,), learnable_sink=sink)
    require(
        tuple(sink.shape) == (heads,),
        name,
        f"learnable_sink must be [{heads}], it is {shape_of(sink)}",
    )


def _query(
    name: str,
    query: Tensor,
    layout: str,
    heads: int,
    lengths: Sequence[int] | None,
    together: tuple[int, ...],
) -> int:
    """How many rows the query has."""
    require(layout in ("BSND", "TND"), name, f"layout {layout} is not served here: BSND or TND")
    rank = 4 if layout == "BSND" else 3
    require(
        query.dim() == rank and query.shape[-2] == heads,
        name,
        f"a {layout} query of {heads} heads has {rank} dimensions with the heads before the last, "
        f"it is {shape_of(query)}",
    )
    if layout == "BSND":
        rows = query.shape[0]
        require(0 < rows <= _MOST_ROWS, name, f"rows must be 1 to {_MOST_ROWS}, they are {rows}")
        return rows
    require(
        query.shape[-1] in together,
        name,
        f"TND over pages needs heads of {either(together)} dimensions, they have {query.shape[-1]}",
    )
    require(bool(lengths), name, "TND needs actual_seq_lengths")
    assert lengths is not None
    is_rising = all(a <= b for a, b in zip([0, *lengths], lengths, strict=False))
    require(
        is_rising and lengths[-1] == query.shape[0],
        name,
        "actual_seq_lengths of TND are sums, rising to the number of tokens "
        f"{query.shape[0]}; they are {list(lengths)}",
    )
    return len(lengths)


def _heads(name: str, heads: int, kv_heads: int) -> None:
    is_even = kv_heads > 0 and heads % kv_heads == 0
    require(
        is_even and heads <= _MOST_HEADS and heads // kv_heads <= _MOST_SHARING,
        name,
        f"heads must be at most {_MOST_HEADS} and 1 to {_MOST_SHARING} times the kv heads, "
        f"they are {heads} and {kv_heads}",
    )


def _block_size(name: str, size: int, is_single: bool) -> None:
    step = 16 if is_single else PAGE_STEP
    require(
        0 < size <= LARGEST_PAGE and size % step == 0,
        name,
        f"block_size must be a multiple of {step} and at most {LARGEST_PAGE} here, it is {size}",
    )


def _lengths_of_pages(
    name: str, lengths: Sequence[int] | None, table: Tensor, rows: int, block_size: int
) -> None:
    require(bool(lengths), name, "attention over pages needs actual_seq_lengths_kv")
    assert lengths is not None
    require(
        len(lengths) == rows and min(lengths) >= 0,
        name,
        f"actual_seq_lengths_kv must be {rows} numbers from 0 on, they are {list(lengths)}",
    )
    require(
        table.dim() == 2 and table.shape[0] == rows,
        name,
        f"block_table must be [{rows}, pages of a row], it is {shape_of(table)}",
    )
    needed = -(-max(lengths) // block_size)
    require(
        table.shape[1] >= needed,
        name,
        f"block_table must have {needed} columns for {max(lengths)} positions of {block_size} a "
        f"page, it has {table.shape[1]}",
    )


def _mask(name: str, mask: Tensor | None, mode: int) -> None:
    require(mode in (ALL, CAUSAL, BAND), name, f"sparse_mode {mode} is not served here")
    if mode == ALL:
        require(mask is None, name, "masks of other sizes than the triangle are not served here")
        return
    shape = None if mask is None else tuple(mask.shape)
    require(
        shape == (MASK_SIZE, MASK_SIZE),
        name,
        f"sparse_mode {mode} needs the mask of {MASK_SIZE} x {MASK_SIZE}, it is {shape}",
    )
    assert mask is not None
    typed(name, MASKS, atten_mask=mask)


def placed(name: str, **tensors: Tensor | None) -> None:
    """All on one device, none on the host, each in one piece."""
    devices = {key: x.device for key, x in tensors.items() if x is not None}
    for key, device in devices.items():
        require(device.type != "cpu", name, f"{key} must lie on the NPU, it lies on {device}")
    require(len(set(devices.values())) <= 1, name, f"tensors lie on several devices: {devices}")
    for key, x in tensors.items():
        strides = None if x is None else x.stride()
        require(x is None or x.is_contiguous(), name, f"{key} must be contiguous, not {strides}")


def typed(name: str, allowed: tuple[torch.dtype, ...], **tensors: Tensor) -> None:
    """One of these dtypes, and the same for all."""
    for key, x in tensors.items():
        require(x.dtype in allowed, name, f"{key} must be {either(allowed)}, it is {x.dtype}")
    dtypes = {x.dtype for x in tensors.values()}
    require(
        len(dtypes) == 1, name, f"{', '.join(tensors)} must have one dtype, not {either(dtypes)}"
    )


def _last_dim(name: str, x: Tensor, gamma: Tensor) -> None:
    require(
        tuple(gamma.shape) == tuple(x.shape[-1:]),
        name,
        f"gamma must be [{x.shape[-1]}] for x {shape_of(x)}, it is {shape_of(gamma)}",
    )


def shape_of(x: Tensor) -> list[int]:
    return list(x.shape)


def either(values: object) -> str:
    return " or ".join(sorted(str(value) for value in values))  # type: ignore[attr-defined]


TYPES = (*HALVES, torch.float32, torch.int8, torch.uint8, torch.int32, torch.int64)
"""Number types that all collectives of A2 and A3 take."""


def exchanged(name: str, *tensors: Tensor) -> None:
    """tensors: what a collective is given and what it fills."""
    name = f"hccl {name}"
    named = {f"tensor {at}": x for at, x in enumerate(tensors)}
    placed(name, **named)
    typed(name, TYPES, **named)
