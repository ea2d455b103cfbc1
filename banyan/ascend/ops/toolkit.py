"""The toolkit of the NPU's kernels, and the reasons for which they decline a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from banyan.ascend.driver import open_deep_ep, open_driver
from banyan.ascend.ops.contracts import HALVES, LARGEST_PAGE, LATENT_DIM, LATENT_ROPE_DIM, PAGE_STEP
from banyan.ascend.ops.latent_contracts import INDEX_DIM, MOST_INDEX_HEADS, count_from, is_count
from banyan.ascend.ops.operators import Fuser, Operators
from banyan.ascend.ops.product_contracts import A3, dispatch_of, fused_dispatch_of
from banyan.ascend.ops.prologue import open_prologue
from banyan.base.errors import ConfigError
from banyan.ops.api import IndexShape, LatentPrologue, PrologueShape, Recorder
from banyan.ops.bind import OpSpec, Toolkit
from banyan.platform.expert_exchange import Dispatch


@dataclass(frozen=True)
class NpuToolkit:
    operators: Operators
    limits: Dispatch = A3
    """Limits of expert exchanges."""
    absence: str = ""
    recorder: Recorder | None = None
    fuses_latents: bool = False
    """Use the fused prologue of latent attention."""
    fractal_pages: bool = False
    """Latent pages have the fractal form (NZ)."""
    fuser: Fuser | None = None
    """The fused operator for dispatch and experts; None = several operators."""

    def cache_dtype(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        return dtype

    def joins_index(self, shape: IndexShape) -> bool:
        widths = (shape.rank, shape.rope_dim, shape.dim)
        is_served = widths == (LATENT_DIM, LATENT_ROPE_DIM, INDEX_DIM)
        # A draft layer needs one position more, see `latent_attention.py`.
        are_counts = is_count(shape.top) and is_count(count_from(shape.top + 1))
        return is_served and shape.heads <= MOST_INDEX_HEADS and are_counts

    def open_prologue(
        self, shape: PrologueShape, dtype: torch.dtype, device: torch.device
    ) -> LatentPrologue | None:
        if not self.fuses_latents:
            return None
        return open_prologue(
            self.operators, shape, dtype, device, self._warn_unfused, self.fractal_pages
        )

    def _warn_unfused(self, why: str) -> None:
        line = "SGLANG_NPU_USE_MLAPO: several operators come before latent attention"
        self.operators.warn(f"{line}: {why}")


def declines(spec: OpSpec) -> str | None:
    """Why no kernel supports this; None = one does."""
    if not isinstance(spec.toolkit, NpuToolkit):
        return "no driver of the NPU is open"
    return None if spec.dtype in HALVES else f"activations are {spec.dtype}"


def declines_pages(spec: OpSpec) -> str | None:
    """As `declines`, for kernels that read or write pages."""
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


def open_toolkit(threads: int, wishes: Mapping[str, str]) -> Toolkit:
    """
    Args:
        wishes: "offload" = weights keep a form that copies of bytes preserve; "fuseep-mode" = the
            fused operator for dispatch and experts (1 or 2).

    Raises:
        ConfigError: an unknown wish.
    """
    wishes = dict(wishes)
    keeps_plain = bool(wishes.pop("offload", ""))
    mode = int(wishes.pop("fuseep-mode", 0))
    wishes.pop("fp8-gemm-backend", "")  # nothing to do for it here, as the start has said
    for flag, value in wishes.items():
        raise ConfigError(f"--{flag} {value} does not exist on npu", hint="leave it out")
    driver = open_driver()
    chip = driver.npu.get_device_name()
    operators = Operators(driver.is_checked, keeps_plain=keeps_plain)
    fuser = None
    if mode:
        fuser = Fuser(open_deep_ep(), mode, fused_dispatch_of(chip)[mode - 1], driver.is_checked)
    return NpuToolkit(
        operators=operators,
        limits=dispatch_of(chip),
        fuses_latents=driver.fuses_latents,
        fractal_pages=driver.fractal_pages,
        fuser=fuser,
    )
