"""What the NPU's operators of blocks of experts compute, and what they refuse."""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from banyan.ascend.ops import product_contracts
from banyan.ascend.ops.contracts import require
from tests.ascend.emulation.quant_operators import lowered_product

SCHEMAS = {
    "npu_moe_init_routing_v2": "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
    "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, "
    "int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
    "int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "npu_grouped_matmul": "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, "
    "Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
    "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor? group_list=None, "
    "Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
    "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, "
    "int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, "
    "int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]",
    "npu_moe_token_unpermute": "(Tensor permuted_tokens, Tensor sorted_indices, "
    "Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> Tensor",
}
_DTYPES = {5: torch.float16, 15: torch.bfloat16}
_ANYTHING = float("nan")
"""What lies where an operator writes nothing."""


class Experts:
    """The operators by their names."""

    def __init__(self, core: ModuleType) -> None:
        self._host: Callable[[Tensor], Tensor] = core.host_alias
        self._device: Callable[[Tensor, int], Tensor] = core.device_alias

    def npu_moe_init_routing_v2(
        self,
        x: Tensor,
        expert_idx: Tensor,
        *,
        expert_num: int = -1,
        active_expert_range: Sequence[int] = (),
        **given: object,
    ) -> tuple[Tensor, ...]:
        name = "npu_moe_init_routing_v2"
        first, last = active_expert_range or (0, expert_num)
        product_contracts.init_routing(x, expert_idx, expert_num, first, last)
        wanted = {
            "active_num": expert_idx.numel(),
            "drop_pad_mode": 0,
            "expert_tokens_num_type": 1,
            "expert_tokens_num_flag": True,
            "quant_mode": -1,
            "row_idx_type": 0,
        }
        _only(name, given, wanted)
        ids = self._host(expert_idx).long().flatten()
        require(
            bool(((ids >= 0) & (ids < expert_num)).all()),
            name,
            f"experts must be 0 to {expert_num - 1}, they are {int(ids.min())} to {int(ids.max())}",
        )
        is_mine = (ids >= first) & (ids < last)
        order = torch.where(is_mine, ids, expert_num).argsort(stable=True)
        rows = self._host(x)[order // expert_idx.shape[1]]
        rows[int(is_mine.sum()) :] = _ANYTHING
        counts = torch.bincount(ids, minlength=expert_num)[first:last]
        places = torch.where(is_mine, order.argsort(), -1).int()
        found = (rows, places, counts, torch.zeros(len(order)))
        return tuple(self._device(part, x.device.index) for part in found)

    def npu_grouped_matmul(
        self,
        x: list[Tensor],
        weight: list[Tensor],
        *,
        group_list: Tensor | None = None,
        scale: list[Tensor] | None = None,
        per_token_scale: list[Tensor] | None = None,
        output_dtype: int | None = None,
        **given: object,
    ) -> list[Tensor]:
        name = "npu_grouped_matmul"
        require(len(x) == len(weight) == 1, name, "one x and one weight are served here")
        require(group_list is not None, name, "group_list must be given")
        assert group_list is not None
        bias = given.pop("bias", None)
        _only(name, given, {"split_item": 2, "group_type": 0, "group_list_type": 1})
        if weight[0].dtype == torch.int32:
            return self._by_four_bits(
                *(x[0], weight[0], group_list, scale, per_token_scale, bias, output_dtype)
            )
        require(bias is None, name, "bias is not served here")
        is_rounded = scale is not None or per_token_scale is not None or output_dtype is not None
        if is_rounded:
            require(
                bool(scale and per_token_scale and output_dtype),
                name,
                "scale, per_token_scale and output_dtype go together",
            )
            assert scale and per_token_scale and output_dtype
            dtype = _DTYPES.get(output_dtype, torch.int8)
            factors = (scale[0], per_token_scale[0])
            given_all = (x[0], weight[0], group_list, *factors, dtype)
            product_contracts.grouped_quant_matmul(*given_all)
            factor, units = (self._host(part).float() for part in factors)
        else:
            product_contracts.grouped_matmul(x[0], weight[0], group_list)
            dtype, factor, units = x[0].dtype, None, None
        rows, columns = self._host(x[0]), self._host(weight[0])
        counts = self._host(group_list).tolist()
        require(
            sum(counts) <= len(rows),
            name,
            f"the groups have {sum(counts)} rows together, there are {len(rows)}",
        )
        out = torch.full((len(rows), columns.shape[2]), _ANYTHING, dtype=dtype)
        start = 0
        for group, count in enumerate(counts):
            mine = slice(start, start + count)
            if factor is None or units is None:
                out[mine] = (rows[mine].float() @ columns[group].float()).to(dtype)
            else:
                total = (rows[mine].int() @ columns[group].int()).float()
                out[mine] = (total * factor[group] * units[mine].unsqueeze(1)).to(dtype)
            start += count
        return [self._device(out, x[0].device.index)]

    def _by_four_bits(
        self,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        scale: list[Tensor] | None,
        units: list[Tensor] | None,
        bias: object,
        output_dtype: int | None,
    ) -> list[Tensor]:
        name = "npu_grouped_matmul"
        is_whole = bool(scale and units and bias)
        require(
            is_whole, name, "scale, per_token_scale and bias must be given for weights of 4 bits"
        )
        assert scale and units and isinstance(bias, list)
        dtype = _DTYPES.get(output_dtype or 0, torch.int8)
        given = (weight, counts, scale[0], units[0], bias[0])
        product_contracts.grouped_four_bit_matmul(x, *given, dtype)
        rows = self._host(x)
        columns, ends, factors, each, lift = map(self._host, given)
        require(
            int(ends.sum()) <= len(rows),
            name,
            f"the groups have {int(ends.sum())} rows together, there are {len(rows)}",
        )
        out = torch.full((len(rows), lift.shape[1]), _ANYTHING, dtype=dtype)
        start = 0
        for group, count in enumerate(ends.tolist()):
            mine = slice(start, start + count)
            total = lowered_product(rows[mine], columns[group], factors[group]) + lift[group]
            out[mine] = (total * each[mine].unsqueeze(1)).to(dtype)
            start += count
        return [self._device(out, x.device.index)]

    def npu_moe_token_unpermute(
        self, rows: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, **given: object
    ) -> Tensor:
        name = "npu_moe_token_unpermute"
        require(probs is not None, name, "probs must be given")
        assert probs is not None
        product_contracts.token_unpermute(rows, sorted_indices, probs)
        _only(name, given, {})
        places = self._host(sorted_indices).long()
        require(
            not len(places) or (int(places.min()) >= 0 and int(places.max()) < len(rows)),
            name,
            f"sorted_indices must be 0 to {len(rows) - 1}",
        )
        each = self._host(rows)[places].unflatten(0, tuple(probs.shape)).float()
        out = (each * self._host(probs).float().unsqueeze(-1)).sum(1)
        return self._device(out.to(rows.dtype), rows.device.index)


def _only(name: str, given: dict[str, object], wanted: dict[str, object]) -> None:
    """What else was given is what is served here."""
    for key, value in given.items():
        asked = wanted.get(key)
        is_served = value == asked if asked is not None else value in (None, False, 0)
        require(is_served, name, f"{key} must be {asked} here, it is {value}")
