"""Limits of the operators that exchange expert rows, by chip: `npu_moe_distribute_dispatch_v2` and
`npu_moe_distribute_combine_v2` of torch_npu, and `fused_deep_moe` of deep_ep (sgl-kernel-npu).

Buffer sizes follow the operators' published formulas.
"""

from banyan.platform.expert_exchange import Dispatch, FusedDispatch

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
