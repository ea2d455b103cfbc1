"""Projections in Triton whose weights stay quantised on the CUDA device.

A packed weight is numbers, and factors in tensors of their own. The inputs are cut into chunks that
share a factor. All outputs of a chunk are adjacent, so a thread block reads contiguous memory. A
byte of 4-bit numbers has two chunks: the even one low, the odd one high.

Up to UNPACK_ABOVE rows one kernel reads the integers and multiplies; above ROUND_ABOVE it
multiplies them by their factors first. With more rows the weight is unpacked for a product of the
vendor's library; the product then costs more than the unpacking. The inputs are cut into parts,
whose sums the last thread block of a tile adds in order. So a result depends on the number of rows,
never on the order of the thread blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from banyan.base.log import logger
from banyan.ops import blocks
from banyan.ops.api import PackedHeadLinear, PackedLinear
from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.blocks import BLOCK
from banyan.ops.cuda.needs import QUANTIZATIONS, TYPES, CudaToolkit, declines
from banyan.ops.reference import DenseLinear
from banyan.ops.rounding import to_blocks
from banyan.ops.stored import STORAGE_TYPES, StoredWeight

OUTPUTS_STEP = 128
"""Outputs are padded to a multiple of this, so that reads of weights need no mask."""
_CHUNKS = (128, 64, 32, 16)
_MOST_PAIRED = 64
"""Most inputs of a chunk of 4-bit numbers; two chunks are read together."""
_UNPACKED_BYTES = 1 << 28
"""Bytes of a weight that are unpacked at once."""


@dataclass(frozen=True)
class Levels:
    """Unpacked blocks: value = number · scale + minimum.

    Attributes:
        numbers: [n, inputs that share a scale] int8; 4-bit ones are 0…15.
        scale: [n] fp16 or fp32.
        minimum: as the scale; None = none.
    """

    numbers: Tensor
    scale: Tensor
    minimum: Tensor | None = None


@dataclass(frozen=True)
class PackedBlockType:
    """
    Attributes:
        bits: bits of a number in memory, 4 or 8.
        base: the number that means zero.
        shared: inputs that share a scale.
        take: [blocks, bytes of one] uint8 -> Levels.
    """

    bits: int
    base: int
    shared: int
    take: Callable[[Tensor], Levels]


def _half(raw: Tensor, start: int) -> Tensor:
    return raw[:, start : start + 2].contiguous().view(torch.float16).view(-1)


def _q8_0(raw: Tensor) -> Levels:
    return Levels(raw[:, 2:].contiguous().view(torch.int8), _half(raw, 0))


def _q4_0(raw: Tensor) -> Levels:
    return Levels(blocks.nibbles(raw[:, 2:]).view(torch.int8), _half(raw, 0))


def _q4_1(raw: Tensor) -> Levels:
    numbers = blocks.nibbles(raw[:, 4:]).view(torch.int8)
    return Levels(numbers, _half(raw, 0), _half(raw, 2))


def _q5_0(raw: Tensor) -> Levels:
    return Levels(blocks.fifths(raw[:, 2:6], raw[:, 6:]).view(torch.int8) - 16, _half(raw, 0))


def _q5_1(raw: Tensor) -> Levels:
    numbers = blocks.fifths(raw[:, 4:8], raw[:, 8:]).view(torch.int8)
    return Levels(numbers, _half(raw, 0), _half(raw, 2))


def _iq4_nl(raw: Tensor) -> Levels:
    levels = torch.tensor(blocks.IQ4_NL_LEVELS, dtype=torch.int8, device=raw.device)
    return Levels(levels[blocks.nibbles(raw[:, 2:]).int()], _half(raw, 0))


def _counted(levels: blocks.Counted) -> Levels:
    numbers, scale, minimum = levels
    low = None if minimum is None else minimum.reshape(-1)
    return Levels(numbers.to(torch.int8).flatten(0, 1), scale.reshape(-1), low)


BLOCK_TYPES = {
    "Q8_0": PackedBlockType(8, 0, 32, _q8_0),
    "Q4_0": PackedBlockType(4, 8, 32, _q4_0),
    "Q4_1": PackedBlockType(4, 0, 32, _q4_1),
    "Q5_0": PackedBlockType(8, 0, 32, _q5_0),
    "Q5_1": PackedBlockType(8, 0, 32, _q5_1),
    "IQ4_NL": PackedBlockType(8, 0, 32, _iq4_nl),
    "Q4_K": PackedBlockType(4, 0, 32, lambda raw: _counted(blocks.counted_q4_k(raw))),
    "Q5_K": PackedBlockType(8, 0, 32, lambda raw: _counted(blocks.counted_q5_k(raw))),
    "Q6_K": PackedBlockType(8, 0, 16, lambda raw: _counted(blocks.counted_q6_k(raw))),
}
"""Storage types that stay quantised."""


@dataclass(frozen=True)
class PackedNumbers:
    """A weight [outputs, inputs] on the device.

    Attributes:
        bits, base: as in `PackedBlockType`.
        group: inputs that share a factor, a multiple of the chunk.
        numbers: [chunks, padded outputs, inputs of a chunk] int8, or [chunks/2, …] uint8 for 4
            bits.
        scales: [groups, padded outputs] fp16.
        minima: as the scales; None = none.
        units: [padded outputs] fp32, powers of two that multiply scales and minima; None = all 1.
    """

    bits: int
    base: int
    outputs: int
    inputs: int
    group: int
    numbers: Tensor
    scales: Tensor
    minima: Tensor | None
    units: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        parts = (self.numbers, self.scales, self.minima, self.units)
        return sum(part.nbytes for part in parts if part is not None)


def pack(weight: StoredWeight, device: torch.device) -> PackedNumbers:
    """Pack a weight [outputs, inputs] of BLOCK_TYPES. Factors that neighbours share are kept once:
    per group of 128, 64 or 32 inputs, or per output. Factors with more than 11 bits are rounded to
    11."""
    kind = BLOCK_TYPES[weight.type]
    outputs, inputs = weight.shape
    step = max(OUTPUTS_STEP, _UNPACKED_BYTES // (inputs * 4) // OUTPUTS_STEP * OUTPUTS_STEP)
    size = STORAGE_TYPES[weight.type].size_bytes
    taken = [
        kind.take(weight.raw[first : first + step].to(device).reshape(-1, size))
        for first in range(0, outputs, step)
    ]
    scale = torch.cat([part.scale for part in taken]).view(outputs, -1)
    lows = [part.minimum for part in taken if part.minimum is not None]
    minimum = torch.cat(lows).view(outputs, -1) if lows else None
    units = None if scale.dtype == torch.float16 else _units(scale, minimum)
    if units is not None:
        scale = (scale / units[:outputs, None]).half()
        minimum = None if minimum is None else (minimum / units[:outputs, None]).half()
    group = _group(inputs, kind.shared, scale, minimum)
    most = _MOST_PAIRED if kind.bits == 4 else _CHUNKS[0]
    chunk = next(size for size in _CHUNKS if size <= most and group % size == 0)
    pieces = [_lay(part.numbers.view(-1, inputs), kind.bits, chunk) for part in taken]
    numbers = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
    scales = _factors(scale, group // kind.shared)
    minima = None if minimum is None else _factors(minimum, group // kind.shared)
    return PackedNumbers(
        kind.bits, kind.base, outputs, inputs, group, numbers, scales, minima, units
    )


def _units(scale: Tensor, minimum: Tensor | None) -> Tensor:
    """Powers of two that bring the largest factor of a row to 2^14 … 2^15. Factors are [outputs,
    groups] fp32; returns [padded outputs]."""
    largest = scale.abs().amax(1)
    if minimum is not None:
        largest = torch.maximum(largest, minimum.abs().amax(1))
    _, exponents = torch.frexp(largest)
    units = torch.ldexp(torch.ones_like(largest), exponents - 15)
    return _filled(torch.where(largest > 0, units, 1.0), 0)


def _group(inputs: int, shared: int, *factors: Tensor | None) -> int:
    """The largest group of inputs with equal factors: all inputs, or one of _CHUNKS. Factors are
    [outputs, blocks of `shared` inputs]."""
    for group in (inputs, *_CHUNKS):
        if inputs % group == 0 and all(
            factor is None or _is_shared(factor, group // shared) for factor in factors
        ):
            return group
    raise AssertionError(f"{inputs} inputs are no blocks of {_CHUNKS[-1]}")


def _is_shared(factor: Tensor, count: int) -> bool:
    pieces = factor.view(len(factor), -1, count)
    return bool((pieces == pieces[..., :1]).all())


def _factors(factor: Tensor, count: int) -> Tensor:
    """Every `count`-th factor: [outputs, blocks] -> [groups, padded outputs]."""
    return _filled(factor[:, ::count].t(), 1).contiguous()


def _lay(numbers: Tensor, bits: int, chunk: int) -> Tensor:
    """[outputs, inputs] int8 -> `PackedNumbers.numbers`."""
    outputs = numbers.shape[0]
    tiles = _filled(numbers.view(outputs, -1, chunk).transpose(0, 1), 1)
    if bits == 8:
        return tiles.contiguous()
    octets = tiles.contiguous().view(torch.uint8)
    if len(octets) % 2:
        octets = functional.pad(octets, (0, 0, 0, 0, 0, 1))
    return octets[::2] | (octets[1::2] << 4)


def _filled(tensor: Tensor, dim: int) -> Tensor:
    """Pad with zeros to the next multiple of OUTPUTS_STEP along `dim`."""
    missing = -tensor.shape[dim] % OUTPUTS_STEP
    pads = [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]
    return functional.pad(tensor, pads) if missing else tensor


UNPACK_ABOVE = 256
"""With more rows than this, the weight is unpacked."""
ROUND_ABOVE = 32
"""With more rows than this, the product rounds the weights to the activations' type."""
LEAST_OUTPUTS = 64
"""Fewest outputs of a block."""
LEAST_INPUTS = 256
"""Fewest inputs of a part that are worth the extra sum."""
_ADD = 1024
_MOST_BYTES = 1 << 28
"""Bytes of float weights that are rounded at once."""

_log = logger(__name__)


@dataclass(frozen=True)
class Shape:
    """Block sizes of a product.

    Attributes:
        rows, outputs: sizes of a block.
        parts: number of parts that the inputs are cut into.
        is_turned: computes outputs times tokens instead of tokens times outputs.
        rounds: factors multiply the integers before the product, which rounds the weights to the
            activations' type; only if `is_turned`.
    """

    rows: int
    outputs: int
    parts: int
    is_turned: bool
    warps: int = 4
    stages: int = 3
    rounds: bool = False


def shape_of(rows: int, weight: PackedNumbers, dtype: torch.dtype = torch.bfloat16) -> Shape:
    """The block sizes for some rows of activations: the fastest ones in
    `benchmarks/cuda_products.py` on a device with 132 multiprocessors, which needs at least that
    many thread blocks."""
    is_wide, is_coarse = weight.bits == 8, weight.numbers.shape[2] >= 64
    may_overflow = dtype == torch.float16 and weight.units is not None
    if rows <= 16:
        shape, blocks = Shape(16, 128, 1, is_turned=False), 1056 if is_wide else 528
        if not is_wide and not is_coarse:
            shape, blocks = Shape(16, 64, 1, is_turned=False), 1056
    elif rows <= 32 or dtype == torch.float32:
        width = 64 if is_coarse and not is_wide else 128
        shape, blocks = Shape(32, width, 1, is_turned=not is_wide), 528
    elif rows <= ROUND_ABOVE or may_overflow:
        shape, blocks = Shape(64 if rows <= 64 else 128, 64, 1, is_turned=True, stages=4), 264
    elif rows <= 64:
        shape, blocks = Shape(64, 128, 1, is_turned=True, stages=4, rounds=True), 132
    else:
        warps = 8 if rows <= 128 else 4
        shape = Shape(128, 128, 1, is_turned=True, warps=warps, rounds=True)
        blocks = 132
    return with_parts(shape, blocks, rows, weight.outputs, weight.inputs)


def with_parts(shape: Shape, blocks: int, rows: int, outputs: int, inputs: int) -> Shape:
    """The shape, with so many parts that there are up to `blocks` thread blocks."""
    tiles = -(-outputs // shape.outputs) * max(1, -(-rows // shape.rows))
    most = max(1, inputs // LEAST_INPUTS)
    return replace(shape, parts=max(1, min(blocks // tiles, most)))


MOST_SHARED = 160 << 10
"""Bytes of shared memory for which the shapes are made; consumer GPUs have 99 KiB."""


@cache
def _is_small(device: torch.device) -> bool:
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin < MOST_SHARED


def fitted(shape: Shape, device: torch.device) -> Shape:
    """The shape, or a smaller one on a device with little shared memory."""
    if device.type != "cuda" or not _is_small(device):
        return shape
    return replace(shape, rows=min(shape.rows, 128), stages=2)


class QuantisedLinear:
    """A packed weight (`PackedNumbers`) and its kernels."""

    def __init__(self, weight: PackedNumbers, dtype: torch.dtype) -> None:
        self.weight = weight
        self._assembly = assembly_for(weight, dtype)
        self._counters = counters_for(weight.outputs, weight.numbers.device)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(x) > UNPACK_ABOVE:
            return functional.linear(x, unpacked(self.weight, x.dtype), bias)
        shape = fitted(shape_of(len(x), self.weight, x.dtype), x.device)
        return product(x, self.weight, bias, shape, self._assembly, self._counters)


def assembly_for(weight: PackedNumbers, dtype: torch.dtype) -> str:
    """PTX that unpacks a weight's numbers on its device; "" = the compiler generates it."""
    device = weight.numbers.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return ""
    return nibbles(dtype, weight.base) if weight.bits == 4 else octets(dtype)


def counters_for(outputs: int, device: torch.device) -> Tensor:
    """Zeros for products that add their parts themselves, one for each block of outputs and rows.
    Products that run at the same time need their own."""
    return torch.zeros(4 * -(-outputs // LEAST_OUTPUTS), dtype=torch.int32, device=device)


def product(
    x: Tensor,
    weight: PackedNumbers,
    bias: Tensor | None,
    shape: Shape,
    assembly: str = "",
    counters: Tensor | None = None,
) -> Tensor:
    """x·Wᵀ + bias.

    Args:
        x: [tokens, in] T, tokens may lie apart.
        bias: [out] T or None.
        assembly: from `assembly_for`.
        counters: from `counters_for`, to add the parts in the same kernel; None = in another one.

    Returns:
        [tokens, out] T.
    """
    from banyan.ops.cuda import product_kernels

    assert x.shape[1] == weight.inputs and x.stride(1) == 1
    rows, outputs = len(x), weight.outputs
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    steps = len(weight.numbers)
    per_part = -(-steps // shape.parts)
    parts = -(-steps // per_part)
    made = out
    if parts > 1:
        made = torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device)
    chunk = weight.numbers.shape[2]
    tiles = (-(-outputs // shape.outputs), -(-rows // shape.rows))
    adds = parts > 1 and counters is not None and tiles[0] * tiles[1] <= len(counters)
    constants: dict[str, object] = {
        "BITS": weight.bits,
        "BASE": weight.base,
        "HAS_MINIMA": weight.minima is not None,
        "HAS_UNITS": weight.units is not None,
        "HAS_BIAS": bias is not None and (parts == 1 or adds),
        "ADDS": adds,
        "CHUNK": chunk,
        "ROWS": shape.rows,
        "OUTPUTS": shape.outputs,
        "ASSEMBLY": assembly,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }
    if shape.rounds:
        is_paired = assembly and x.dtype == torch.bfloat16
        constants["SCALING"] = scaling(weight.minima is not None) if is_paired else ""
        launch = product_kernels.multiply_many[(*tiles[::-1], parts)]
    else:
        constants["IS_TURNED"] = shape.is_turned
        launch = product_kernels.multiply[(*tiles, parts)]
    launch(
        x,
        weight.numbers,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        weight.scales if weight.units is None else weight.units,
        x if bias is None else bias,
        made,
        out,
        counters if adds else out,
        rows,
        weight.inputs,
        outputs,
        weight.numbers.shape[1],
        x.stride(0),
        steps,
        per_part,
        weight.group // chunk,
        **constants,
    )
    if parts > 1 and not adds:
        add_up(made, bias, out)
    return out


def add_up(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the sum of parts [count, rows, outputs] fp32, in order, plus the bias [outputs]."""
    from banyan.ops.cuda.product_kernels import add_parts

    add_parts[(-(-out.numel() // _ADD),)](
        parts,
        out if bias is None else bias,
        out,
        len(parts),
        out.numel(),
        out.shape[1],
        HAS_BIAS=bias is not None,
        BLOCK=_ADD,
    )


def unpacked(weight: PackedNumbers, dtype: torch.dtype) -> Tensor:
    """The unpacked weight [out, in]."""
    from banyan.ops.cuda.product_kernels import unpack

    size = (weight.outputs, weight.inputs)
    out = torch.empty(size, dtype=dtype, device=weight.numbers.device)
    filled, chunk = weight.numbers.shape[1:]
    block = 64
    grid = (weight.inputs // chunk, -(-weight.outputs // block))
    unpack[grid](
        weight.numbers,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        weight.scales if weight.units is None else weight.units,
        out,
        weight.inputs,
        weight.outputs,
        filled,
        weight.group // chunk,
        BITS=weight.bits,
        BASE=weight.base,
        HAS_MINIMA=weight.minima is not None,
        HAS_UNITS=weight.units is not None,
        CHUNK=chunk,
        OUTPUTS=block,
    )
    return out


def _declines(spec: OpSpec) -> str | None:
    if STORAGE_TYPES[spec.weight_type].is_float and not _rounding(spec.toolkit):
        return "for quantised weights"
    reason = declines(spec)
    is_kept = spec.weight_type in BLOCK_TYPES or STORAGE_TYPES[spec.weight_type].is_float
    if reason is None and not is_kept:
        reason = "its numbers are not kept on this device"
    return reason


def _rounding(toolkit: object) -> str:
    """The storage type that float weights are rounded to; "" = not rounded."""
    wanted = toolkit.quantization if isinstance(toolkit, CudaToolkit) else ""
    return QUANTIZATIONS.get(wanted, "")


def packer(toolkit: object) -> Callable[..., PackedLinear]:
    """Function that packs a projection of BLOCK_TYPES, or of floats, which it rounds."""
    type = _rounding(toolkit)

    def pack_linear(
        weight: StoredWeight, dtype: torch.dtype, device: torch.device, is_head: bool = False
    ) -> PackedLinear:
        if STORAGE_TYPES[weight.type].is_float:
            if weight.shape[1] % BLOCK:
                _log.warning(
                    "a weight %s stays as it is: its inputs are no whole blocks of %d",
                    list(weight.shape),
                    BLOCK,
                )
                return DenseLinear(weight.dense.to(device, dtype))
            weight = _rounded(weight, "Q8_0" if is_head else type, device)
        return QuantisedLinear(pack(weight, device), dtype)

    return pack_linear


def _rounded(weight: StoredWeight, type: str, device: torch.device) -> StoredWeight:
    """Float weights [out, in] in blocks of `type`, on the device."""
    outputs, inputs = weight.shape
    step = max(1, _MOST_BYTES // (inputs * 4))
    raw = [
        to_blocks(weight.cut(0, first, min(first + step, outputs)).dense.to(device).float(), type)
        for first in range(0, outputs, step)
    ]
    return StoredWeight(type, weight.shape, torch.cat(raw))


linear = Kernel(supports=_declines, make=packer)


# PTX that converts 4-bit and 8-bit numbers to halves, two at once. A code in the lowest bits of 128
# (bf16) or 1024 (fp16) adds itself to that number, which is then subtracted. Compilers take several
# instructions per number instead.

LEAST_CAPABILITY = (9, 0)
"""Lowest compute capability that subtracts two bf16 numbers at once."""
_HALVES = {torch.bfloat16: ("bf16x2", 0x4300), torch.float16: ("f16x2", 0x6400)}
"""Type -> PTX name of a pair, and the bits of the number that codes are added to."""


def scaling(has_minima: bool) -> str:
    """PTX: two bf16 numbers ($1) times the sum of two others ($2, $3), plus $4 if it has minima."""
    more = "mov.b32 p, 0x3f803f80; fma.rn.bf16x2 $0, $0, p, $4; " if has_minima else ""
    return (
        "{ .reg .b32 p, z; mov.b32 z, 0x80008000; fma.rn.bf16x2 p, $1, $3, z; "
        f"fma.rn.bf16x2 $0, $1, $2, p; {more}}}"
    )


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


class BatchedHeadLinear:
    """Weights [heads, in, out] in the activations' type; sums are fp32."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.transpose(1, 2).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], *self.weight.shape[::2])
        torch.bmm(x.transpose(0, 1), self.weight, out=out.transpose(0, 1))
        return out


def _pack_head_linear(
    weight: StoredWeight, dtype: torch.dtype, device: torch.device, may_round: bool
) -> PackedHeadLinear:
    return BatchedHeadLinear(weight.dense.to(device, dtype))


head_linear = Kernel(
    supports=lambda spec: None if spec.dtype in TYPES else f"activations are {spec.dtype}",
    run=_pack_head_linear,
)
