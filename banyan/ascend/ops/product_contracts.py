"""Contracts of the operators of matrix products and experts: int8 and int4 weights, grouped
products, the exchange of rows between ranks, and deep_ep's operators for whole blocks of experts.
The limits of exchanges by chip (`Dispatch`); buffer sizes follow the operators' published formulas.

int4 weights: eight numbers of one input lie in an int32, lower outputs in lower bits; each scale is
shared by 256 inputs of an output, its bits are the lower half of an int64. Source of the deep_ep
limits: documents of sgl-kernel-npu, FUSED_DEEP_MOE.
"""

import torch
from torch import Tensor

from banyan.ascend.ops.contracts import HALVES, placed, require, shape_of, typed
from banyan.ops.experts_api import Ranks
from banyan.platform.expert_exchange import Dispatch, FusedDispatch

LARGEST_WEIGHT = 65535
"""Inputs and outputs of a weight."""
ROW_STEP, COLUMN_STEPS = 16, {torch.int8: 32, **dict.fromkeys(HALVES, 16)}
"""What rows must be multiples of for the fractal form, and columns of each type."""


def dynamic_quant(x: Tensor) -> None:
    name = "npu_dynamic_quant"
    placed(name, input=x)
    typed(name, HALVES, input=x)
    require(x.dim() > 1, name, f"input must have 2 dimensions or more, it is {shape_of(x)}")


def quantize(x: Tensor, inverse: Tensor, offset: Tensor) -> None:
    name = "npu_quantize"
    placed(name, input=x, scales=inverse, zero_points=offset)
    typed(name, HALVES, input=x, scales=inverse, zero_points=offset)
    for part in (inverse, offset):
        require(
            tuple(part.shape) in ((1,), tuple(x.shape[-1:])),
            name,
            f"scales and zero_points must be [1] or {shape_of(x)[-1:]}, one is {shape_of(part)}",
        )


def format_cast(x: Tensor) -> None:
    name = "npu_format_cast"
    placed(name, input=x)
    typed(name, tuple(COLUMN_STEPS), input=x)
    rows, columns = x.shape[-2:]
    step = COLUMN_STEPS[x.dtype]
    require(
        rows % ROW_STEP == 0 and columns % step == 0,
        name,
        f"rows and columns must be multiples of {ROW_STEP} and {step}, they are {rows} and "
        f"{columns}",
    )


def quant_matmul(
    x: Tensor,
    columns: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
) -> None:
    """x: [tokens, in]; columns: [in, out]; scale, bias: [out]; pertoken_scale: [tokens]."""
    name = "npu_quant_matmul"
    given = {"scale": scale, "pertoken_scale": pertoken_scale, "bias": bias}
    placed(name, x1=x, x2=columns, **given)
    typed(name, (torch.int8,), x1=x, x2=columns)
    typed(name, (torch.float32,), scale=scale)
    require(dtype in HALVES, name, f"output_dtype must be one of {HALVES}, it is {dtype}")
    require(
        x.dim() == 2 and columns.dim() == 2 and x.shape[1] == columns.shape[0],
        name,
        f"x1 must be [tokens, in] and x2 [in, out], they are {shape_of(x)} and {shape_of(columns)}",
    )
    widest = max(columns.shape)
    require(
        widest <= LARGEST_WEIGHT,
        name,
        f"x2 must be at most {LARGEST_WEIGHT} wide and long, it has {widest}",
    )
    outputs = columns.shape[1]
    require(
        tuple(scale.shape) in ((1,), (outputs,)),
        name,
        f"scale must be [1] or [{outputs}], it is {shape_of(scale)}",
    )
    for key, part, size, kind in (
        ("pertoken_scale", pertoken_scale, len(x), torch.float32),
        ("bias", bias, outputs, torch.int32),
    ):
        if part is not None:
            typed(name, (kind,), **{key: part})
            require(
                tuple(part.shape) == (size,),
                name,
                f"{key} must be [{size}], it is {shape_of(part)}",
            )


FOUR_BIT_GROUP, FOUR_BITS_IN_WORD = 256, 8
"""Inputs that share a unit, and numbers in an int32."""
MOST_FOUR_BIT_INPUTS = 18432
FOUR_BIT_OFFSET = 8
"""What the operators take from each number of a row; the sum of weights times this puts it back."""


def four_bit_matmul(
    x: Tensor, columns: Tensor, scale: Tensor, units: Tensor, lift: Tensor, dtype: torch.dtype
) -> None:
    """x: [tokens, in] int8; columns: [in, out / 8]; scale: [in / 256, out]; units: [tokens, 1];
    lift: [out]."""
    name = "npu_quant_matmul"
    placed(name, x1=x, x2=columns, scale=scale, pertoken_scale=units, offset=lift)
    _four_bit_types(
        name, dtype, {"x1": x, "x2": columns, "scale": scale}, offset=lift, pertoken_scale=units
    )
    _four_bit_sizes(name, x, columns, scale)
    outputs = columns.shape[1] * FOUR_BITS_IN_WORD
    _shapes(name, pertoken_scale=(units, (len(x), 1)), offset=(lift, (outputs,)))


def grouped_four_bit_matmul(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    scale: Tensor,
    units: Tensor,
    lift: Tensor,
    dtype: torch.dtype,
) -> None:
    """x: [rows, in] int8; weight: [groups, in, out / 8]; counts: [groups]; scale: [groups, in /
    256, out]; units: [rows]; lift: [groups, out]."""
    name = "npu_grouped_matmul"
    given = {"scale": scale, "per_token_scale": units, "bias": lift}
    placed(name, x=x, weight=weight, group_list=counts, **given)
    typed(name, (torch.int64,), group_list=counts)
    _four_bit_types(
        name, dtype, {"x": x, "weight": weight, "scale": scale}, bias=lift, per_token_scale=units
    )
    require(
        weight.dim() == 3 and scale.dim() == 3 and len(scale) == len(weight),
        name,
        f"weight and scale must have 3 dimensions and as many groups, they are {shape_of(weight)} "
        f"and {shape_of(scale)}",
    )
    _four_bit_sizes(name, x, weight[0], scale[0])
    groups, outputs = len(weight), weight.shape[2] * FOUR_BITS_IN_WORD
    _shapes(
        name,
        group_list=(counts, (groups,)),
        per_token_scale=(units, (len(x),)),
        bias=(lift, (groups, outputs)),
    )


def _four_bit_types(
    name: str, dtype: torch.dtype, numbers: dict[str, Tensor], **floats: Tensor
) -> None:
    kinds = (torch.int8, torch.int32, torch.int64)
    for (key, part), kind in zip(numbers.items(), kinds, strict=True):
        typed(name, (kind,), **{key: part})
    typed(name, (torch.float32,), **floats)
    require(dtype in HALVES, name, f"output_dtype must be one of {HALVES}, it is {dtype}")


def _four_bit_sizes(name: str, x: Tensor, columns: Tensor, scale: Tensor) -> None:
    require(
        x.dim() == 2 and columns.dim() == 2 and x.shape[1] == columns.shape[0],
        name,
        f"rows must be [rows, in] and weights [in, out / {FOUR_BITS_IN_WORD}], they are "
        f"{shape_of(x)} and {shape_of(columns)}",
    )
    inputs = x.shape[1]
    require(
        0 < inputs <= MOST_FOUR_BIT_INPUTS and inputs % FOUR_BIT_GROUP == 0,
        name,
        f"inputs must be a multiple of {FOUR_BIT_GROUP} up to {MOST_FOUR_BIT_INPUTS}, they are "
        f"{inputs}",
    )
    wanted = (inputs // FOUR_BIT_GROUP, columns.shape[1] * FOUR_BITS_IN_WORD)
    require(
        tuple(scale.shape) == wanted,
        name,
        f"scale must be {list(wanted)}, it is {shape_of(scale)}",
    )


def _shapes(name: str, **parts: tuple[Tensor, tuple[int, ...]]) -> None:
    for key, (part, wanted) in parts.items():
        require(
            tuple(part.shape) == wanted,
            name,
            f"{key} must be {list(wanted)}, it is {shape_of(part)}",
        )


_GROUPED = "npu_grouped_matmul"
_MOST_PER_TOKEN, _MOST_GROUPS, _WIDEST = 512, 1024, 65536


def init_routing(x: Tensor, ids: Tensor, experts: int, first: int, last: int) -> None:
    """x: [tokens, dim]; ids: [tokens, per_token]."""
    name = "npu_moe_init_routing_v2"
    placed(name, x=x, expert_idx=ids)
    typed(name, (*HALVES, torch.float32), x=x)
    typed(name, (torch.int32,), expert_idx=ids)
    require(
        x.dim() == 2 and ids.dim() == 2 and len(x) == len(ids),
        name,
        f"x must be [tokens, dim] and expert_idx [tokens, experts of a token], they are "
        f"{shape_of(x)} and {shape_of(ids)}",
    )
    require(
        0 < ids.shape[1] <= min(_MOST_PER_TOKEN, experts),
        name,
        f"a token goes through 1 to {min(_MOST_PER_TOKEN, experts)} of {experts} experts, "
        f"not {ids.shape[1]}",
    )
    require(
        0 <= first < last <= experts,
        name,
        f"active_expert_range must be a part of the {experts} experts, it is {first} to {last}",
    )


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> None:
    """x: [rows, in]; weight: [groups, in, out]; counts: [groups], rows of each."""
    placed(_GROUPED, x=x, weight=weight, group_list=counts)
    typed(_GROUPED, (*HALVES, torch.float32), x=x, weight=weight)
    _groups(x, weight, counts)


def grouped_quant_matmul(
    x: Tensor, weight: Tensor, counts: Tensor, scale: Tensor, units: Tensor, dtype: torch.dtype
) -> None:
    """The same of int8 numbers; scale: [groups, out]; units: [rows]; dtype: of what is made."""
    placed(_GROUPED, x=x, weight=weight, group_list=counts, scale=scale, per_token_scale=units)
    typed(_GROUPED, (torch.int8,), x=x, weight=weight)
    require(dtype in HALVES, _GROUPED, f"output_dtype must be one of {HALVES}, it is {dtype}")
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    typed(_GROUPED, (kind,), scale=scale)
    typed(_GROUPED, (torch.float32,), per_token_scale=units)
    _groups(x, weight, counts)
    wanted = (len(weight), weight.shape[2])
    require(
        tuple(scale.shape) == wanted,
        _GROUPED,
        f"scale must be {list(wanted)}, it is {shape_of(scale)}",
    )
    require(
        tuple(units.shape) == (len(x),),
        _GROUPED,
        f"per_token_scale must be [{len(x)}], it is {shape_of(units)}",
    )


def _groups(x: Tensor, weight: Tensor, counts: Tensor) -> None:
    name = _GROUPED
    typed(name, (torch.int64,), group_list=counts)
    require(
        x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[1],
        name,
        f"x must be [rows, in] and weight [groups, in, out], they are {shape_of(x)} and "
        f"{shape_of(weight)}",
    )
    widest = max(x.shape[1], weight.shape[2])
    require(widest < _WIDEST, name, f"widths must be less than {_WIDEST}, one is {widest}")
    groups = len(weight)
    require(
        tuple(counts.shape) == (groups,) and 1 < groups <= _MOST_GROUPS,
        name,
        f"group_list must have a number for each of {groups} groups, 2 to {_MOST_GROUPS}; it is "
        f"{shape_of(counts)}",
    )


def token_unpermute(rows: Tensor, places: Tensor, weights: Tensor) -> None:
    """rows: [tokens · per_token, dim]; places: the row of each pair of a token and an expert;
    weights: [tokens, per_token]."""
    name = "npu_moe_token_unpermute"
    placed(name, permuted_tokens=rows, sorted_indices=places, probs=weights)
    typed(name, HALVES, permuted_tokens=rows, probs=weights)
    typed(name, (torch.int32,), sorted_indices=places)
    require(
        weights.dim() == 2 and places.shape == (weights.numel(),) and len(rows) == len(places),
        name,
        "permuted_tokens, sorted_indices and probs must be of the same pairs of a token and an "
        f"expert, they are {shape_of(rows)}, {shape_of(places)} and {shape_of(weights)}",
    )
    most = _MOST_PER_TOKEN
    require(
        weights.shape[1] <= most, name, f"at most {most} experts a token, not {weights.shape[1]}"
    )


def distribute_dispatch(
    x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, experts: int, limits: Dispatch
) -> None:
    """x: [tokens, dim]; ids, weights: [tokens, per_token]; experts: of all ranks."""
    name = "npu_moe_distribute_dispatch_v2"
    placed(name, x=x, expert_ids=ids, expert_scales=weights)
    typed(name, HALVES, x=x)
    typed(name, (torch.float32,), expert_scales=weights)
    require(
        weights.shape == ids.shape,
        name,
        f"expert_scales must be {shape_of(ids)}, they are {shape_of(weights)}",
    )
    typed(name, (torch.int32,), expert_ids=ids)
    _exchange(name, x, ids, ranks, experts, limits)


def distribute_combine(
    rows: Tensor,
    ids: Tensor,
    places: Tensor,
    received: Tensor,
    weights: Tensor,
    ranks: Ranks,
    experts: int,
    limits: Dispatch,
) -> None:
    """rows, places, received: as the exchange gave them; weights: as ids."""
    name = "npu_moe_distribute_combine_v2"
    placed(name, expand_x=rows, expert_ids=ids, assist_info_for_combine=places)
    placed(name, ep_send_counts=received, expert_scales=weights)
    typed(name, HALVES, expand_x=rows)
    typed(name, (torch.int32,), expert_ids=ids, assist_info_for_combine=places)
    typed(name, (torch.int32,), ep_send_counts=received)
    typed(name, (torch.float32,), expert_scales=weights)
    _exchange(name, rows[: len(ids)], ids, ranks, experts, limits)
    local = experts // ranks.size
    room = len(ids) * ranks.size * min(local, ids.shape[1])
    require(
        len(rows) == room,
        name,
        f"expand_x must be the {room} rows of the exchange, it is {shape_of(rows)}",
    )
    require(
        weights.shape == ids.shape,
        name,
        f"expert_scales must be {shape_of(ids)}, they are {shape_of(weights)}",
    )
    require(
        len(received) >= ranks.size * local and places.dim() == 1,
        name,
        "ep_send_counts and assist_info_for_combine must come from the exchange, they are "
        f"{shape_of(received)} and {shape_of(places)}",
    )


def _exchange(
    name: str, x: Tensor, ids: Tensor, ranks: Ranks, experts: int, limits: Dispatch
) -> None:
    require(
        x.dim() == 2 and ids.dim() == 2 and len(x) == len(ids),
        name,
        f"rows must be [tokens, dim] and expert_ids [tokens, experts of a token], they are "
        f"{shape_of(x)} and {shape_of(ids)}",
    )
    why = limits.obstacle(len(x), x.shape[1], ids.shape[1], ranks.size, experts)
    require(not why, name, why)
    is_there = 0 <= ranks.rank < ranks.size and bool(ranks.name)
    require(is_there, name, f"rank {ranks.rank} of {ranks.size} in group {ranks.name!r} is nobody")


FUSED_DEEP_MOE = "fused_deep_moe"
_FUSE_MODES = (1, 2)


def fused_deep_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    ranks: Ranks,
    experts: int,
    mode: int,
    limits: FusedDispatch,
) -> None:
    """x: [tokens, dim]; ids, weights: [tokens, per_token]; gate_up: [experts here, dim, inner · 2];
    down: [experts here, dim, inner] by the first operator, [experts here, inner, dim] by the second
    one; scales: [experts here, outputs]; experts: of all ranks."""
    placed(FUSED_DEEP_MOE, x=x, topk_idx=ids, topk_weights=weights)
    placed(FUSED_DEEP_MOE, gmm1_permuted_weight=gate_up, gmm1_permuted_weight_scale=gate_up_scale)
    placed(FUSED_DEEP_MOE, gmm2_weight=down, gmm2_weight_scale=down_scale)
    require(mode in _FUSE_MODES, FUSED_DEEP_MOE, f"fuse_mode is 1 or 2, not {mode}")
    typed(FUSED_DEEP_MOE, (torch.bfloat16,), x=x)
    typed(FUSED_DEEP_MOE, (torch.int64,), topk_idx=ids)
    typed(FUSED_DEEP_MOE, (torch.float32,), topk_weights=weights)
    typed(FUSED_DEEP_MOE, (torch.int8,), gmm1_permuted_weight=gate_up, gmm2_weight=down)
    scale = torch.float32 if mode == 1 else torch.int64
    typed(
        FUSED_DEEP_MOE,
        (scale,),
        gmm1_permuted_weight_scale=gate_up_scale,
        gmm2_weight_scale=down_scale,
    )
    require(
        x.dim() == 2 and ids.dim() == 2 and len(x) == len(ids) and weights.shape == ids.shape,
        FUSED_DEEP_MOE,
        "x must be [tokens, dim], topk_idx and topk_weights [tokens, experts of a token], they are "
        f"{shape_of(x)}, {shape_of(ids)} and {shape_of(weights)}",
    )
    require(
        gate_up.dim() == 3 and gate_up.shape[1] == x.shape[1],
        FUSED_DEEP_MOE,
        f"gmm1_permuted_weight must be [experts, {x.shape[1]}, gates and ups], it is "
        f"{shape_of(gate_up)}",
    )
    count, dim, both = gate_up.shape
    size = (len(x), dim, both, ids.shape[1], ranks.size, experts)
    why = limits.obstacle(*size)
    require(not why, FUSED_DEEP_MOE, why)
    local = experts // ranks.size
    require(
        count == local, FUSED_DEEP_MOE, f"{count} experts are here, {experts} of all make {local}"
    )
    wanted = (count, dim, both // 2) if mode == 1 else (count, both // 2, dim)
    require(
        tuple(down.shape) == wanted,
        FUSED_DEEP_MOE,
        f"gmm2_weight must be {list(wanted)}, it is {shape_of(down)}",
    )
    for name, part, outputs in (
        ("gmm1_permuted_weight_scale", gate_up_scale, both),
        ("gmm2_weight_scale", down_scale, dim),
    ):
        require(
            tuple(part.shape) == (count, outputs),
            FUSED_DEEP_MOE,
            f"{name} must be [{count}, {outputs}], it is {shape_of(part)}",
        )
    is_there = 0 <= ranks.rank < ranks.size and bool(ranks.name)
    require(
        is_there,
        FUSED_DEEP_MOE,
        f"rank {ranks.rank} of {ranks.size} in group {ranks.name!r} is nobody",
    )


_A2_CHIPS = "Ascend910B"
MIB = 1 << 20


def _a2_buffer_bytes(tokens: int, width: int, per_token: int, ranks: int, experts: int) -> int:
    local, row = -(-experts // ranks), 2 * width
    return 2 * (tokens * ranks * min(local, per_token) * row + 2 * MIB)


def _a3_buffer_bytes(tokens: int, width: int, per_token: int, ranks: int, experts: int) -> int:
    local, row = -(-experts // ranks), 2 * width
    sent = _aligned(_aligned(row, 32) + 64, 512)
    return 2 * (local * tokens * ranks * sent + per_token * tokens * _aligned(row, 512))


def _int8_buffer_bytes(tokens: int, width: int, per_token: int, ranks: int, experts: int) -> int:
    return 3 * tokens * per_token * width + 10 * MIB


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step


A2 = Dispatch(
    tokens=256,
    widths=range(32, 7168 + 1, 32),
    per_token=16,
    ranks=(*range(2, 9), 16, 32, 64, 128, 256),
    experts=2048,
    buffer_bytes=_a2_buffer_bytes,
    takes_weights=True,
)
A3 = Dispatch(
    tokens=256,
    widths=range(1024, 8192 + 1),
    per_token=12,
    ranks=range(2, 768 + 1),
    experts=2048,
    buffer_bytes=_a3_buffer_bytes,
)
_FUSED_WIDTHS = range(512, 7168 + 1, 32)
FUSED = (
    FusedDispatch(
        tokens=256,
        widths=_FUSED_WIDTHS,
        inners=range(1024, 6144 + 1, 128),
        per_token=12,
        ranks=A3.ranks,
        experts=512,
        buffer_bytes=_a3_buffer_bytes,
        tile=64,
    ),
    FusedDispatch(
        tokens=1024,
        widths=_FUSED_WIDTHS,
        inners=range(64, 8192 + 1, 64),
        per_token=16,
        ranks=A3.ranks,
        experts=512,
        buffer_bytes=_int8_buffer_bytes,
    ),
)
"""By mode, on A3: 1 = dispatch, products and combine; 2 = routing in the operator too."""


def dispatch_of(chip: str) -> Dispatch:
    """chip: the driver's name of it."""
    return A2 if chip.startswith(_A2_CHIPS) else A3


def fused_dispatch_of(chip: str) -> tuple[FusedDispatch, ...]:
    return () if chip.startswith(_A2_CHIPS) else FUSED
