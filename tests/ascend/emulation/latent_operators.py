"""What the NPU's operators around pages of latents compute, and what they refuse."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from banyan.ascend.ops import latent_contracts
from banyan.ascend.ops.contracts import FRACTAL, LATENT_DIM, LATENT_ROPE_DIM, require
from banyan.ascend.ops.latent_contracts import FRACTAL_PAGES, PLAIN, PLAIN_DIM, PrologWeights
from tests.ascend.emulation.quant_operators import multiply

_PROLOG, _SCATTER = "npu_mla_prolog_v3", "npu_scatter_pa_kv_cache"
SCHEMAS = {
    _PROLOG: "(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, "
    "Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, "
    "Tensor rope_cos, Tensor(a!) kv_cache, Tensor(b!) kr_cache, *, Tensor? cache_index=None, "
    "Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None, "
    "Tensor? dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None, "
    "Tensor? quant_scale_ckv=None, Tensor? quant_scale_ckr=None, "
    "Tensor? smooth_scales_cq=None, Tensor? actual_seq_len=None, "
    "Tensor? k_nope_clip_alpha=None, float rmsnorm_epsilon_cq=1.0000000000000001e-05, "
    "float rmsnorm_epsilon_ckv=1.0000000000000001e-05, str cache_mode='PA_BSND', "
    "bool query_norm_flag=False, int weight_quant_mode=0, int kv_cache_quant_mode=0, "
    "int query_quant_mode=0, int ckvkr_repo_mode=0, int quant_scale_repo_mode=0, "
    "int tile_size=128, float qc_qr_scale=1.0, float kc_scale=1.0, int? token_x_dtype=None, "
    "int? weight_dq_dtype=None, int? weight_uq_qr_dtype=None, int? weight_dkv_kr_dtype=None, "
    "int? kv_cache_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _SCATTER: "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, "
    "Tensor? seq_lens=None, str? cache_mode='PA_NZ') -> ()",
}
_UNUSED = {"tile_size": 128, "qc_qr_scale": 1.0, "kc_scale": 1.0}
_HALF = torch.bfloat16


class Latents:
    """The operators by their names.

    Args:
        fractal: addresses of what lies in the fractal form.
    """

    def __init__(self, core: ModuleType, fractal: set[int]) -> None:
        self._core, self._fractal = core, fractal
        self._host: Callable[[Tensor], Tensor] = core.host_alias
        self._device: Callable[[Tensor, int], Tensor] = core.device_alias

    def npu_mla_prolog_v3(
        self,
        token_x: Tensor,
        weight_dq: Tensor,
        weight_uq_qr: Tensor,
        weight_uk: Tensor,
        weight_dkv_kr: Tensor,
        rmsnorm_gamma_cq: Tensor,
        rmsnorm_gamma_ckv: Tensor,
        rope_sin: Tensor,
        rope_cos: Tensor,
        kv_cache: Tensor,
        kr_cache: Tensor,
        *,
        cache_index: Tensor | None = None,
        dequant_scale_x: Tensor | None = None,
        dequant_scale_w_dq: Tensor | None = None,
        dequant_scale_w_uq_qr: Tensor | None = None,
        dequant_scale_w_dkv_kr: Tensor | None = None,
        rmsnorm_epsilon_cq: float = 1e-5,
        rmsnorm_epsilon_ckv: float = 1e-5,
        cache_mode: str = "PA_BSND",
        query_norm_flag: bool = False,
        weight_quant_mode: int = PLAIN,
        **given: object,
    ) -> tuple[Tensor, ...]:
        unused = [k for k, value in given.items() if value not in (None, 0, _UNUSED.get(k))]
        require(not unused, _PROLOG, f"{', '.join(unused)} are not served here")
        require(cache_index is not None, _PROLOG, "cache_index must be given")
        assert cache_index is not None
        scales = (dequant_scale_w_dq, dequant_scale_w_uq_qr, dequant_scale_w_dkv_kr)
        weights = PrologWeights(
            *(weight_quant_mode, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr, scales)
        )
        gammas, turns = (rmsnorm_gamma_cq, rmsnorm_gamma_ckv), (rope_sin, rope_cos)
        pages = (kv_cache, kr_cache)
        latent_contracts.mla_prolog(
            *(token_x, dequant_scale_x, weights, gammas, turns, pages, cache_index, cache_mode)
        )
        for name, part in (("dq", weight_dq), ("uq_qr", weight_uq_qr), ("dkv_kr", weight_dkv_kr)):
            is_fractal = part.data_ptr() in self._fractal
            require(is_fractal, _PROLOG, f"weight_{name} must be in the fractal form")

        x = self._host(token_x)
        units = None if dequant_scale_x is None else self._host(dequant_scale_x)
        squeezed = self._product(x, units, weight_dq, scales[0])
        squeezed = _normed(squeezed, self._host(gammas[0]), rmsnorm_epsilon_cq).to(_HALF)
        nothing = factors = torch.zeros(1)
        if weight_quant_mode != PLAIN:
            factors = squeezed.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
            squeezed = (squeezed.float() / factors).round().clamp(-128, 127).to(torch.int8)
        heads = self._product(squeezed, factors, weight_uq_qr, scales[1]).to(_HALF)
        heads = heads.unflatten(1, (len(weight_uk), -1))  # [tokens, heads, 192]
        plain, turning = heads.split([PLAIN_DIM, LATENT_ROPE_DIM], -1)
        query = torch.einsum("thp,hpr->thr", plain.float(), self._host(weight_uk).float())
        sin, cos = (self._host(part).float() for part in turns)
        turned = _turned(turning.float(), sin.unsqueeze(1), cos.unsqueeze(1))
        both = self._product(x, units, weight_dkv_kr, scales[2]).to(_HALF)
        latent, key = both.split([LATENT_DIM, LATENT_ROPE_DIM], -1)
        latent = _normed(latent.float(), self._host(gammas[1]), rmsnorm_epsilon_ckv)
        is_fractal = cache_mode == FRACTAL_PAGES
        key = _turned(key.float(), sin, cos)
        for part, values in ((kv_cache, latent), (kr_cache, key)):
            self._write(_PROLOG, part, cache_index, values, part.shape[1], is_fractal)
        normed = squeezed if query_norm_flag else squeezed.new_zeros(1)
        found = (query.to(_HALF), turned.to(_HALF), nothing, normed)
        factors = factors if query_norm_flag else nothing
        return tuple(self._device(each, token_x.device.index) for each in (*found, factors))

    def _product(
        self, x: Tensor, units: Tensor | None, columns: Tensor, scale: Tensor | None
    ) -> Tensor:
        """In fp32. [tokens, outputs]"""
        if scale is None:
            return x.float() @ self._host(columns).float()
        assert units is not None
        return multiply(x, self._host(columns)).float() * units * self._host(scale)

    def npu_scatter_pa_kv_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        cache_mode: str | None = FRACTAL_PAGES,
        **given: object,
    ) -> None:
        unused = [name for name, each in given.items() if each is not None]
        require(not unused, _SCATTER, f"{', '.join(unused)} are not served here")
        is_served = cache_mode == FRACTAL_PAGES
        require(is_served, _SCATTER, f"cache_mode {cache_mode} is not served here")
        latent_contracts.scatter_pages(key, value, (key_cache, value_cache), slot_mapping)
        for part, values in ((key_cache, key), (value_cache, value)):
            rows = self._host(values)[:, 0]
            self._write(_SCATTER, part, slot_mapping, rows, part.shape[2], True)

    def _write(
        self,
        name: str,
        pages: Tensor,
        places: Tensor,
        values: Tensor,
        size: int,
        is_fractal: bool,
    ) -> None:
        """values: [tokens, width]; size: tokens of a page."""
        at, room = self._host(places).long(), len(pages) * size
        low, high = (int(at.min()), int(at.max())) if len(at) else (0, 0)
        require(
            low >= 0 and high < room,
            name,
            f"places must be 0 to {room - 1}, they are {low} to {high}: a device would write "
            "into memory of others",
        )
        lines, values = self._core.host_alias(pages, True), values.to(pages.dtype)
        if is_fractal:
            lines = lines.view(len(pages), -1, size, FRACTAL)
            lines[at // size, :, at % size] = values.unflatten(1, (-1, FRACTAL))
        else:
            lines.view(room, -1)[at] = values


def _normed(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * gamma.float()


def _turned(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Pairs come in, halves come out."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat([first, second], -1) * cos + torch.cat([-second, first], -1) * sin
