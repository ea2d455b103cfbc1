"""Compiled latent attention (MLA) over pages, the writing of its pages, and its per-head matrices.

The page layout is the reference's. Queries stay in the latent space for prompts and for decoding:
every token is computed with the same arithmetic, whatever else is in the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library
from banyan.ops.cpu.paged_attention import (
    CACHE_TYPES,
    PagedAttention,
    given_paths,
    supports_pages,
)
from banyan.ops.cpu.weights import Arena, pack
from banyan.ops.stored import StoredWeight

_PAIRS = 16
"""Most heads of a block: one vector of the widest instruction set."""
_WHOLE = 16


@dataclass
class LatentAttention:
    library: Library
    _pages: PagedAttention = field(init=False)

    def __post_init__(self) -> None:
        self._pages = PagedAttention(self.library)

    def write_latent(
        self,
        latent: Tensor,
        key: Tensor,
        latent_pages: Tensor,
        key_pages: Tensor,
        flat_locations: Tensor,
    ) -> None:
        self.library.call(
            "bn_write_latent",
            latent.shape[0],
            CACHE_TYPES[latent_pages.dtype],
            *_rows(latent),
            *_rows(key),
            _whole(latent_pages),
            _whole(key_pages),
            _whole(flat_locations),
            latent.shape[-1],
            key.shape[-1],
        )

    def latent_attention(
        self,
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
        tokens, heads, rank = q.shape
        group = next(n for n in range(min(heads, _PAIRS), 0, -1) if heads % n == 0)
        padded = -(-rank // _WHOLE) * _WHOLE
        blocks, page_size = heads // group, latent_pages.shape[1]
        shape = (page_size, blocks, group, padded, -first)
        lengths = (row_starts, context_lengths)
        plan = self._pages.plan(tokens, page_tables, *lengths, shape, paths)
        out = self.library.empty((tokens, heads, padded))
        self.library.call(
            "bn_latent_attention",
            tokens,
            CACHE_TYPES[latent_pages.dtype],
            *_rows(q),
            *_rows(q_turned),
            _whole(latent_pages),
            _whole(key_pages),
            plan.ctypes.data,
            page_tables.data_ptr(),
            page_tables.stride(0),
            out.data_ptr(),
            page_size,
            blocks,
            group,
            padded,
            rank,
            q_turned.shape[-1],
            -first,
            scale,
            *((0, 0) if chosen is None else (chosen.data_ptr(), chosen.shape[1])),
            rows=context_lengths.shape[0],
        )
        return out[..., :rank]

    def choose_positions(
        self,
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
        tokens, heads, plain = q.shape
        page_size = key_pages.shape[1]
        words = -(-page_tables.shape[1] * page_size // 32)
        chosen = self.library.empty((tokens, words), torch.int32)
        self.library.call(
            "bn_choose_positions",
            tokens,
            CACHE_TYPES[key_pages.dtype],
            *_rows(q),
            *_rows(q_turned),
            *_rows(weights),
            _whole(key_pages),
            _whole(turned_pages),
            page_tables.data_ptr(),
            page_tables.stride(0),
            _whole(row_starts),
            _whole(context_lengths),
            chosen.data_ptr(),
            words,
            page_size,
            heads,
            plain,
            q_turned.shape[-1],
            top,
            *given_paths(paths),
            first,
            rows=context_lengths.shape[0],
        )
        return chosen


class HeadLinear:
    """Products of fp32 activations with one matrix per head, in tiles of floats."""

    def __init__(self, library: Library, arena: Arena, weight: Tensor) -> None:
        """weight: [heads, out, in] of fp32, fp16 or bf16."""
        self._library = library
        self._outputs = weight.shape[1]
        # A head begins with a tile of its own.
        whole = torch.nn.functional.pad(weight, (0, 0, 0, -self._outputs % _WHOLE)).flatten(0, 1)
        self.packed = pack(library, arena, StoredWeight.from_tensor(whole))

    def __call__(self, x: Tensor) -> Tensor:
        (tokens, heads, inputs), packed = x.shape, self.packed
        assert x.dtype == torch.float32 and inputs == packed.inputs and x.stride(2) == 1, (
            f"expected heads of {packed.inputs} fp32, got {list(x.shape)} {x.dtype} {x.stride()}"
        )
        out = self._library.empty((tokens, heads, self._outputs))
        self._library.call(
            "bn_head_linear",
            tokens,
            packed.format,
            heads,
            self._outputs,
            inputs,
            packed.tiles.data_ptr(),
            packed.factors.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            out.data_ptr(),
        )
        return out


def _rows(x: Tensor) -> tuple[int, int]:
    """Address and token stride of fp32 rows; each row must be contiguous."""
    assert x.dtype == torch.float32, f"expected fp32 rows, got {x.dtype}"
    inside = x.stride()[1:]
    assert inside == ((1,) if x.dim() == 2 else (x.shape[2], 1)), f"rows lie apart inside: {inside}"
    return x.data_ptr(), x.stride(0)


def _whole(x: Tensor) -> int:
    assert x.is_contiguous(), "expected a contiguous tensor"
    return x.data_ptr()


def _supports_heads(spec: OpSpec) -> str | None:
    if spec.toolkit.absence:
        return spec.toolkit.absence
    return (
        None if spec.dtype == torch.float32 else f"computes in fp32, activations are {spec.dtype}"
    )


def _packer(rounds: bool) -> Callable[[Library], Callable[..., object]]:
    def make(library: Library) -> Callable[..., object]:
        arena = Arena()

        def packer(
            weight: StoredWeight, dtype: torch.dtype, device: torch.device, may_round: bool
        ) -> object:
            values = weight.dense
            return HeadLinear(library, arena, values.half() if rounds and may_round else values)

        return packer

    return make


write_latent = Kernel(
    supports=supports_pages, make=lambda library: LatentAttention(library).write_latent
)
latent_attention = Kernel(
    supports=supports_pages, make=lambda library: LatentAttention(library).latent_attention
)
choose_positions = Kernel(
    supports=supports_pages, make=lambda library: LatentAttention(library).choose_positions
)
rounded = Kernel(supports=_supports_heads, make=_packer(True), rounds_activations=True)
plain = Kernel(supports=_supports_heads, make=_packer(False))
