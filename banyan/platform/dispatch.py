"""What the operators take by which rows travel to the ranks of their experts in an exchange of a
fixed size, by chip (`npu_moe_distribute_dispatch_v2` and `npu_moe_distribute_combine_v2`), and what
those take that run the experts too (`deep_ep`'s `fused_deep_moe`, docs of sgl-kernel-npu)."""

from banyan.platform.base import Dispatch, Fusing

_WITH_RDMA = "Ascend910B"
MIB = 1 << 20
A2 = Dispatch(
    tokens=256,
    widths=range(32, 7168 + 1, 32),
    per_token=16,
    ranks=(*range(2, 9), 16, 32, 64, 128, 256),
    takes_weights=True,
)
A3 = Dispatch(tokens=256, widths=range(1024, 8192 + 1), per_token=12, ranks=range(2, 768 + 1))
_FUSED_WIDTHS = range(512, 7168 + 1, 32)
FUSED = (
    Fusing(256, _FUSED_WIDTHS, range(1024, 6144 + 1, 128), per_token=12, experts=512, tile=64),
    Fusing(1024, _FUSED_WIDTHS, range(64, 8192 + 1, 64), per_token=16, experts=512),
)
"""Of an A3, by mode: dispatch, products and combine (1), or routing in the operator too (2)."""
_ROWS_OF_RANKS = 2048
"""Experts over all ranks."""


def dispatch_of(chip: str) -> Dispatch:
    """chip: as the driver names it."""
    return A2 if chip.startswith(_WITH_RDMA) else A3


def fusing_of(chip: str) -> tuple[Fusing, ...]:
    return () if chip.startswith(_WITH_RDMA) else FUSED


def fusing_obstacle(
    limits: Fusing, tokens: int, width: int, inner: int, per_token: int, ranks: int, experts: int
) -> str:
    """Why rows cannot be sent and computed in one; "" when they can. inner: of gate and up
    together; the others as for `obstacle`."""
    if not 0 < tokens <= limits.tokens:
        return f"a rank gives 1 to {limits.tokens} tokens at once, not {tokens}"
    for name, there, size in (
        ("rows", limits.widths, width),
        ("gates and ups together", limits.inners, inner),
    ):
        if size not in there:
            most = f"{there[0]} to {there[-1]} wide, a multiple of {there.step}"
            return f"{name} are {most}, not {size}"
    if not 0 < per_token <= min(limits.per_token, experts):
        most = min(limits.per_token, experts)
        return f"a token goes through 1 to {most} experts, not {per_token}"
    if ranks not in A3.ranks:
        return f"{ranks} ranks cannot exchange rows at once"
    if experts % ranks or experts > limits.experts:
        return (
            f"{experts} experts are not the same number on each of {ranks} ranks, and "
            f"{limits.experts} at most"
        )
    return ""


def fused_buffer_bytes(
    mode: int, tokens: int, width: int, per_token: int, ranks: int, experts: int
) -> int:
    """What such a call needs of HCCL's buffer: that of the exchange in it, or by the second
    operator's own formula, which counts rows of 8 bits."""
    if mode == 1:
        return buffer_bytes(A3, tokens, width, per_token, ranks, experts)
    return 3 * tokens * per_token * width + 10 * MIB


def obstacle(
    limits: Dispatch, tokens: int, width: int, per_token: int, ranks: int, experts: int
) -> str:
    """Why an exchange cannot be; "" when it can. tokens: of each rank; experts: of all ranks."""
    if not 0 < tokens <= limits.tokens:
        return f"a rank sends 1 to {limits.tokens} tokens at once, not {tokens}"
    if width not in limits.widths:
        first, last, step = limits.widths[0], limits.widths[-1], limits.widths.step
        each = f", a multiple of {step}" if step > 1 else ""
        return f"rows are {first} to {last} wide{each}, not {width}"
    if not 0 < per_token <= min(limits.per_token, experts):
        most = min(limits.per_token, experts)
        return f"a token goes through 1 to {most} experts, not {per_token}"
    if ranks not in limits.ranks:
        return f"{ranks} ranks cannot exchange rows at once"
    if experts % ranks or experts > _ROWS_OF_RANKS:
        return (
            f"{experts} experts are not the same number on each of {ranks} ranks, and "
            f"{_ROWS_OF_RANKS} at most"
        )
    return ""


def buffer_bytes(
    limits: Dispatch, tokens: int, width: int, per_token: int, ranks: int, experts: int
) -> int:
    """What an exchange needs of HCCL's buffer, by the operators' published formulas."""
    local, row = -(-experts // ranks), 2 * width
    if limits == A2:
        return 2 * (tokens * ranks * min(local, per_token) * row + 2 * MIB)
    sent = _aligned(_aligned(row, 32) + 64, 512)
    return 2 * (local * tokens * ranks * sent + per_token * tokens * _aligned(row, 512))


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step
