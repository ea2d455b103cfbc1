"""What the operators of deep_ep for whole blocks of experts compute, and what they refuse.

Rows are rounded to 8 bits with a unit of each, and so is what is between the two products; sums are
of whole numbers, and everything else is in fp32 until the end.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from banyan.ascend.ops import product_contracts
from banyan.ascend.ops.contracts import require
from banyan.ascend.ops.product_contracts import FUSED, MIB, fused_dispatch_of
from banyan.ops.experts_api import Ranks
from tests.ascend.emulation.dispatch_operators import Distributed
from tests.ascend.emulation.quant_operators import Products

SCHEMA = (
    "fused_deep_moe(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, "
    "Tensor down, Tensor down_scale, str group, int size, int rank, int room, int experts, "
    "int quant_mode, int mode) -> (Tensor, Tensor)"
)
_NAME = product_contracts.FUSED_DEEP_MOE


class Fused:
    """
    Args:
        chip: as the driver names it.
        products: knows which weights have the fractal form.
    """

    def __init__(
        self, core: ModuleType, distributed: Distributed, products: Products, chip: str
    ) -> None:
        self._host: Callable[..., Tensor] = core.host_alias
        self._device: Callable[[Tensor, int], Tensor] = core.device_alias
        self._distributed, self._products = distributed, products
        self._limits = fused_dispatch_of(chip)

    def fused_deep_moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        group: str,
        size: int,
        rank: int,
        room: int,
        experts: int,
        quant_mode: int,
        mode: int,
    ) -> tuple[Tensor, Tensor]:
        require(bool(self._limits), _NAME, "this chip has no such operator")
        require(mode in product_contracts._FUSE_MODES, _NAME, f"fuse_mode is 1 or 2, not {mode}")
        ranks, limits = Ranks(group, rank, size), self._limits[mode - 1]
        parts = (gate_up, gate_up_scale, down, down_scale)
        product_contracts.fused_deep_moe(x, ids, weights, *parts, ranks, experts, mode, limits)
        require(quant_mode == 1, _NAME, f"quant_mode is 1, not {quant_mode}")
        for name, part in (("gmm1_permuted_weight", gate_up), ("gmm2_weight", down)):
            is_there = part.data_ptr() in self._products.fractal
            require(is_there, _NAME, f"{name} must have the fractal form (NZ)")
        self._fits(ranks, x, ids, experts, mode)
        counts = self._share(ranks, torch.tensor([len(x)])).flatten().tolist()
        tokens, per_token = max(counts), ids.shape[1]
        if mode == 1:
            require(
                tokens <= room,
                _NAME,
                f"num_max_dispatch_tokens_per_rank is {room}, a rank gives {tokens}",
            )
        chosen = self._host(ids)
        require(
            bool(((chosen >= 0) & (chosen < experts)).all()),
            _NAME,
            f"topk_idx must be 0 to {experts - 1}, they are {int(chosen.min())} to "
            f"{int(chosen.max())}",
        )
        local = experts // size
        more = (0, 0, 0, tokens - len(x))
        rows = self._share(ranks, functional.pad(self._host(x).float(), more)).flatten(0, 1)
        all_ids = self._share(ranks, functional.pad(chosen, more, value=-1)).flatten()
        mine = ((all_ids >= rank * local) & (all_ids < (rank + 1) * local)).nonzero().flatten()
        if mode == 2:
            require(
                len(mine) <= room, _NAME, f"there is room for {room} rows, {len(mine)} have come"
            )
        of_expert = all_ids[mine] - rank * local
        out = torch.zeros(len(all_ids), x.shape[1])
        host = [self._host(part) for part in parts]
        for expert in range(local):
            its = mine[of_expert == expert]
            weight = [part[expert] for part in host]
            out[its] = self._computed(rows[its // per_token], weight, mode)
        pairs = self._share(ranks, out.to(x.dtype)).float().sum(0)  # one rank has made each
        first = rank * tokens * per_token
        pairs = pairs[first : first + len(x) * per_token].unflatten(0, (len(x), per_token))
        total = (pairs * self._host(weights).unsqueeze(-1)).sum(1).to(x.dtype)
        received = torch.bincount(of_expert, minlength=local).int()
        if mode == 1:
            sources = mine // (tokens * per_token)
            received = torch.bincount(of_expert * size + sources, minlength=local * size).int()
        index = x.device.index
        return self._device(total, index), self._device(received, index)

    def _computed(self, rows: Tensor, weight: list[Tensor], mode: int) -> Tensor:
        """rows: [rows, dim]; weight: of one expert, as the operator of this mode wants it."""
        gate_up, gate_up_scale, down, down_scale = weight
        if mode == 1:
            tile = self._limits[0].tile
            gate_up, gate_up_scale = (
                part.unflatten(-1, (-1, 2, tile)).transpose(-3, -2).flatten(-3)
                for part in (gate_up, gate_up_scale)
            )
            down = down.t()
        else:
            gate_up_scale, down_scale = (
                part.int().view(torch.float32) for part in (gate_up_scale, down_scale)
            )
        gate, up = _product(rows, gate_up, gate_up_scale).chunk(2, -1)
        return _product(functional.silu(gate) * up, down, down_scale)

    def _fits(self, ranks: Ranks, x: Tensor, ids: Tensor, experts: int, mode: int) -> None:
        size = (len(x), x.shape[1], ids.shape[1], ranks.size, experts)
        needed = -(-FUSED[mode - 1].buffer_bytes(*size) // MIB)
        there = self._distributed.buffer_mb(_NAME, ranks)
        require(
            needed <= there,
            _NAME,
            f"{len(x)} tokens a rank need {needed} MB of the group's buffer, it has {there}",
        )

    def _share(self, ranks: Ranks, x: Tensor) -> Tensor:
        return self._distributed.exchanged(_NAME, ranks, x.contiguous())


def _product(rows: Tensor, columns: Tensor, scale: Tensor) -> Tensor:
    """rows: [rows, in] fp32, rounded to 8 bits with a unit of each; columns: [in, out] int8."""
    units = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    numbers = (rows / units).round().clamp(-128, 127).int()
    return (numbers @ columns.int()).float() * scale * units
