"""What the NPU's kernels share and what they need; imports no driver."""

from dataclasses import dataclass

import torch

from banyan.ascend.ops.contracts import (
    HALVES,
    LARGEST_PAGE,
    LATENT_DIM,
    LATENT_ROPE_DIM,
    PAGE_STEP,
)
from banyan.ascend.ops.fused_operators import Fuser
from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.prologue import open_prologue
from banyan.ascend.ops.sparse_contracts import INDEX_DIM, MOST_INDEX_HEADS, count_from, is_count
from banyan.ops.api import Recorder
from banyan.ops.bind import OpSpec
from banyan.ops.index_api import IndexShape
from banyan.ops.prologue_api import LatentPrologue, PrologueShape
from banyan.platform.base import Dispatch
from banyan.platform.dispatch import A3


@dataclass(frozen=True)
class NpuToolkit:
    operators: Operators
    limits: Dispatch = A3
    """Of the exchanges of rows."""
    absence: str = ""
    recorder: Recorder | None = None
    fuses_latents: bool = False
    """What comes before latent attention is to be one operator."""
    fractal_pages: bool = False
    """Pages of latents are to have the fractal form (NZ)."""
    fuser: Fuser | None = None
    """What sends rows to experts and runs these in one; None = several operators do."""

    def cache_dtype(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        return dtype

    def joins_index(self, shape: IndexShape) -> bool:
        widths = (shape.rank, shape.rope_dim, shape.dim)
        is_served = widths == (LATENT_DIM, LATENT_ROPE_DIM, INDEX_DIM)
        # A layer that drafts asks for one position more, see `sparse.py`.
        are_counts = is_count(shape.top) and is_count(count_from(shape.top + 1))
        return is_served and shape.heads <= MOST_INDEX_HEADS and are_counts

    def open_prologue(
        self, shape: PrologueShape, dtype: torch.dtype, device: torch.device
    ) -> LatentPrologue | None:
        if not self.fuses_latents:
            return None
        return open_prologue(self.operators, shape, dtype, device, self._tell, self.fractal_pages)

    def _tell(self, why: str) -> None:
        told = "SGLANG_NPU_USE_MLAPO: several operators come before latent attention"
        self.operators.warn(f"{told}: {why}")


def declines(spec: OpSpec) -> str | None:
    """Why no kernel can serve; None when one can."""
    if not isinstance(spec.toolkit, NpuToolkit):
        return "no driver of the NPU is open"
    return None if spec.dtype in HALVES else f"activations are {spec.dtype}"


def declines_pages(spec: OpSpec) -> str | None:
    """The same for kernels that read or write pages."""
    reason = declines(spec)
    if reason is not None:
        return reason
    if spec.cache_dtype != spec.dtype:
        return f"pages are {spec.cache_dtype}, activations {spec.dtype}"
    if spec.head_dim % 16 or spec.head_dim > 512:
        return f"heads of {spec.head_dim} dimensions, not a multiple of 16 up to 512"
    if spec.page_size % PAGE_STEP or spec.page_size > LARGEST_PAGE:
        return f"pages of {spec.page_size} tokens, not a multiple of {PAGE_STEP} to {LARGEST_PAGE}"
    return None
