"""The operators around pages of latents, as `operators.py` has the others."""

from typing import Any

from torch import Tensor

from banyan.ascend.ops import prologue_contracts
from banyan.ascend.ops.prologue_contracts import FRACTAL_PAGES, PLAIN_PAGES, PrologWeights


class LatentOperators:
    """
    Args:
        is_checked, npu: as of `Operators`, and what has them.
    """

    def __init__(self, is_checked: bool, npu: Any) -> None:
        self._is_checked = is_checked
        self._npu = npu

    def mla_prolog(
        self,
        x: Tensor,
        units: Tensor | None,
        weights: PrologWeights,
        gammas: tuple[Tensor, Tensor],
        turns: tuple[Tensor, Tensor],
        pages: tuple[Tensor, Tensor],
        places: Tensor,
        eps: tuple[float, float],
        has_norm: bool = False,
        mode: str = PLAIN_PAGES,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All that comes before latent attention; pages are written. Returns queries in the latent
        space [tokens, heads, 512], turned ones [tokens, heads, 64], and with `has_norm` squeezed
        ones [tokens, 1536] with their units [tokens, 1] where they are int8. The arguments are
        those of `prologue_contracts.mla_prolog`; turns: sin, cos; mode: how
        pages lie."""
        if self._is_checked:
            given = (x, units, weights, gammas, turns, pages, places)
            prologue_contracts.mla_prolog(*given, mode)
        squeeze, query, latent = weights.scales
        found = self._npu.npu_mla_prolog_v3(
            *(x, weights.squeeze, weights.query, weights.keys, weights.latent),
            *(*gammas, *turns, *pages),
            cache_index=places,
            dequant_scale_x=units,
            dequant_scale_w_dq=squeeze,
            dequant_scale_w_uq_qr=query,
            dequant_scale_w_dkv_kr=latent,
            rmsnorm_epsilon_cq=eps[0],
            rmsnorm_epsilon_ckv=eps[1],
            cache_mode=mode,
            query_norm_flag=has_norm,
            weight_quant_mode=weights.mode,
        )
        return found[0], found[1], found[3], found[4]

    def scatter_pages(
        self, latents: Tensor, keys: Tensor, pages: tuple[Tensor, Tensor], places: Tensor
    ) -> None:
        """Write what is kept of each token into fractal pages, as `prologue_contracts.py` has
        them."""
        if self._is_checked:
            prologue_contracts.scatter_pages(latents, keys, pages, places)
        self._npu.npu_scatter_pa_kv_cache(latents, keys, *pages, places, cache_mode=FRACTAL_PAGES)
