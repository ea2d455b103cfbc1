"""PTX that converts 4-bit and 8-bit numbers to halves, two at once.

A code in the lowest bits of 128 (bf16) or 1024 (fp16) adds itself to that number, which is then
subtracted. Compilers take several instructions per number instead.
"""

import torch

LEAST_CAPABILITY = (9, 0)
"""Lowest compute capability that subtracts two bf16 numbers at once."""
_HALVES = {torch.bfloat16: ("bf16x2", 0x4300), torch.float16: ("f16x2", 0x6400)}
"""Type -> PTX name of a pair, and the bits of the number that codes are added to."""


def _both(bits: int) -> str:
    return f"0x{bits:04x}{bits:04x}"


def nibbles(dtype: torch.dtype, base: int) -> str:
    """PTX: the low ($0, $1) and high ($2, $3) nibbles of four bytes ($4), minus `base`, as halves.

    "" for types that are not halves.
    """
    if dtype not in _HALVES:
        return ""
    pair, bits = _HALVES[dtype]
    spread = "prmt.b32 p, $4, 0, 0x4140; prmt.b32 q, $4, 0, 0x4342;"
    take = "lop3.b32 {0}, {1}, 0x000f000f, " + _both(bits) + ", 0xea;"
    less = f"sub.{pair} {{0}}, {{0}}, z;"
    lines = [
        f"mov.b32 z, {_both(bits + base)};",
        spread,
        take.format("$0", "p"),
        take.format("$1", "q"),
        "shr.u32 p, p, 4; shr.u32 q, q, 4;",
        take.format("$2", "p"),
        take.format("$3", "q"),
        *(less.format(f"${at}") for at in range(4)),
    ]
    return "{ .reg .b32 p, q, z; " + " ".join(lines) + " }"


def octets(dtype: torch.dtype) -> str:
    """PTX: four signed bytes ($2) as halves ($0, $1); "" for types that are not halves."""
    if dtype == torch.float16:  # 1024 + 128 + number
        return (
            "{ .reg .b32 p, z; xor.b32 p, $2, 0x80808080; mov.b32 z, 0x64806480; "
            "prmt.b32 $0, p, 0x64646464, 0x5140; prmt.b32 $1, p, 0x64646464, 0x5342; "
            "sub.f16x2 $0, $0, z; sub.f16x2 $1, $1, z; }"
        )
    if dtype != torch.bfloat16:
        return ""
    # The lower seven bits are added to 128; the sign's bit makes 256 of the 128 to be taken away.
    low = "lop3.b32 {0}, {1}, 0x007f007f, 0x43004300, 0xea;"
    sign = "lop3.b32 {0}, {0}, 0x00800080, 0x43004300, 0xea;"
    lines = [
        "prmt.b32 p, $2, 0, 0x4140; prmt.b32 q, $2, 0, 0x4342;",
        low.format("$0", "p"),
        low.format("$1", "q"),
        sign.format("p"),
        sign.format("q"),
        "sub.bf16x2 $0, $0, p; sub.bf16x2 $1, $1, q;",
    ]
    return "{ .reg .b32 p, q; " + " ".join(lines) + " }"
