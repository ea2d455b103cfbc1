"""Experts in Triton: sort the (token, expert) pairs, two products per expert, sum per token.

The products work on blocks of rows of one expert; the gate is part of the first. Nothing waits for
the device, and launches depend only on the number of tokens, so steps can be captured. Weights have
the activations' type, or the numbers of the checkpoint (`expert_weights.py`).

The pairs of a single token need no order, and its second products are summed in one kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cuda import products
from banyan.ops.cuda.expert_weights import PackedProjection, pack_projection, pad_outputs
from banyan.ops.cuda.needs import QUANTIZATIONS, CudaToolkit, declines, power_of_two
from banyan.ops.experts_api import PackedExperts, StoredExperts
from banyan.ops.lora import ExpertSides
from banyan.ops.stored import NVFP4, StoredWeight

_GATES = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_SUM_BLOCK = 1024
_ANY = 1 << 62
"""Larger than the number of any expert."""


@dataclass(frozen=True)
class ExpertTiles:
    """Sizes of a product.

    Attributes:
        rows, columns: of a block of a result; of a gated one half of the columns are gates.
        is_turned: computes outputs times rows instead of rows times outputs.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    is_turned: bool = False


LEAST_ROWS = 16
_IN_FLIGHT = 24 << 10
"""Bytes of weights that a program of few rows loads ahead."""


def tiles_for(rows: int, projection: PackedProjection) -> ExpertTiles:
    """Sizes for blocks of `rows` (`rows_for`)."""
    if rows <= LEAST_ROWS:
        return _of_few_rows(rows, 64, projection)
    if projection.numbers.dtype == torch.float32:
        return ExpertTiles(rows, 64, 4, 2)
    is_large = rows > 64
    if projection.type is not None and not projection.rounds:
        return ExpertTiles(rows, 128, 8, 3, is_turned=True)
    columns = 256 if is_large and not projection.rounds else 128
    return ExpertTiles(rows, columns, 8 if is_large else 4, 4)


def tiles_of_one(projection: PackedProjection) -> ExpertTiles:
    """Sizes for the second products of a single token; a model's outputs should be about as many
    programs as there are multiprocessors."""
    return _of_few_rows(LEAST_ROWS, 16, projection)


def _of_few_rows(rows: int, columns: int, projection: PackedProjection) -> ExpertTiles:
    step = columns * projection.chunk * projection.numbers.itemsize
    return ExpertTiles(rows, columns, 4, max(3, min(10, 1 + _IN_FLIGHT // step)))


def rows_for(pairs: int, experts: int, dtype: torch.dtype) -> int:
    """Rows of a block by the average number of rows per expert."""
    mean = pairs / experts
    if mean <= LEAST_ROWS:
        return LEAST_ROWS
    return 64 if mean <= 64 or dtype == torch.float32 else 128


@dataclass(frozen=True)
class Ordered:
    """Pairs sorted by expert, in the kernels' form; sized for every possible routing.

    Attributes:
        parts: order [pairs], expert, first row and end of each block [blocks], their number [1].
        blocks: the largest possible number of blocks.
        per_token: experts of a token.
        is_alone: pair, block and row have the same number.
    """

    parts: tuple[Tensor, ...]
    blocks: int
    per_token: int
    is_alone: bool


class GroupedExperts:
    """gate_up: gates and ups in turns, or without gates the ups. Biases are fp32.

    tiles, tiles_of_one, rows: choose the sizes of the products.

    Args:
        rounding: as for `pack_projection`.
    """

    tiles: Callable[[int, PackedProjection], ExpertTiles] = staticmethod(tiles_for)
    tiles_of_one: Callable[[PackedProjection], ExpertTiles] = staticmethod(tiles_of_one)
    rows: Callable[[int, int, torch.dtype], int] = staticmethod(rows_for)

    def __init__(
        self,
        experts: StoredExperts,
        dtype: torch.dtype,
        device: torch.device,
        rounding: str = "",
    ) -> None:
        self.first, self.count = experts.first, len(experts.down)
        self.is_whole = experts.first == 0 and self.count == (experts.total or self.count)
        self.gate = _GATES.get(experts.activation, "relu2")
        if experts.clamp is not None:
            self.gate = "clamped" if experts.clamp.alpha else "limited"
        self.clamp = experts.clamp
        sides = 2 if experts.gate else 1
        inner = experts.up
        if experts.gate:
            inner = [_in_turns(*pair) for pair in zip(experts.gate, experts.up, strict=True)]
        self.gate_up = pack_projection(inner, dtype, device, sides, rounding)
        self.down = pack_projection(experts.down, dtype, device, rounding=rounding)
        self.biases: tuple[Tensor, Tensor] | None = None
        if experts.biases is not None:
            gate, up, down = (part.to(device, torch.float32) for part in experts.biases)
            both = torch.stack([gate, up], dim=2).flatten(1) if experts.gate else up
            self.biases = (pad_outputs(both).contiguous(), pad_outputs(down).contiguous())

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, sides: ExpertSides | None = None
    ) -> Tensor:
        if sides is not None:
            raise NotImplementedError("these experts take no adapters: they are refused at start")
        ids, (tokens, per_token) = ids.contiguous(), ids.shape
        out = x.new_empty(tokens, x.shape[1])
        if tokens == 1:
            middle = self._inner(
                x, ids, Ordered((ids,) * 5, ids.numel(), per_token, True), LEAST_ROWS
            )
            self._outer_of_one(middle, ids, weights.contiguous(), out)
            return out
        pairs = x.new_empty(tokens * per_token, x.shape[1])
        self._outputs(x, ids, pairs)
        _add_up(pairs, ids, weights, out, self.first, self.first + self.count, _ANY)
        return out

    def apart(self, x: Tensor, ids: Tensor) -> Tensor:
        pairs = x.new_zeros(ids.numel(), x.shape[1])
        self._outputs(x, ids.contiguous(), pairs)
        return pairs.view(ids.shape[0], -1)

    def parts(self, at: int) -> list[Tensor]:
        tensors = [*self.gate_up.tensors, *self.down.tensors, *(self.biases or ())]
        return [tensor[at] for tensor in tensors]

    def put(self, at: int, parts: list[Tensor]) -> None:
        for mine, other in zip(self.parts(at), parts, strict=True):
            mine.copy_(other)

    def _outputs(self, x: Tensor, ids: Tensor, out: Tensor) -> None:
        """Write the expert's output of each pair to out [pairs, dim]; pairs of experts on other
        ranks are not written."""
        if not ids.numel():
            return
        rows = self.rows(ids.numel(), self.count, x.dtype)
        if len(ids) == 1:  # its experts are different ones: nothing to sort
            rows, ordered = LEAST_ROWS, Ordered((ids,) * 5, ids.numel(), ids.shape[1], True)
        else:
            ordered = self._ordered(ids, rows)
        middle = self._inner(x, ids, ordered, rows)
        bias = None if self.biases is None else self.biases[1]
        self._product(middle, ids, self.down, bias, "", ordered, rows, out)

    def _inner(self, x: Tensor, ids: Tensor, ordered: Ordered, rows: int) -> Tensor:
        """The inputs of the second projection [pairs, inner], in the order of the rows."""
        assert x.stride(1) == 1 and ids.is_contiguous(), f"{x.stride()} {ids.stride()}"
        middle = x.new_empty(ids.numel(), self.down.inputs)
        bias = None if self.biases is None else self.biases[0]
        self._product(x, ids, self.gate_up, bias, self.gate, ordered, rows, middle)
        return middle

    def _product(
        self,
        x: Tensor,
        ids: Tensor,
        projection: PackedProjection,
        bias: Tensor | None,
        gate: str,
        ordered: Ordered,
        rows: int,
        out: Tensor,
    ) -> None:
        from banyan.ops.cuda.expert_kernels import expert_product

        tiles = self.tiles(rows, projection)
        limit, alpha = (self.clamp.limit, self.clamp.alpha) if self.clamp else (0.0, 0.0)
        rounds, units = "", x
        if projection.rounds:
            is_late = rows <= LEAST_ROWS or x.shape[1] % projection.chunk
            rounds = "here" if is_late else "before"
            if not is_late:
                x, units = _rounded(x, projection.chunk)
        blocks = -(-projection.outputs // tiles.columns) * ordered.blocks
        expert_product[(blocks,)](
            x,
            units,
            *_weights(projection, bias, out),
            *ordered.parts,
            out,
            ids,
            self.first,
            self.count,
            x.stride(0),
            *_sizes(projection),
            ordered.per_token,
            limit,
            alpha,
            ALONE=ordered.is_alone,
            GATE=gate,
            ROUNDS=rounds,
            IS_TURNED=tiles.is_turned,
            ROWS=rows,
            COLUMNS=tiles.columns,
            **_constants(projection, bias, out.dtype),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def _outer_of_one(self, middle: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        from banyan.ops.cuda.expert_kernels import outer_of_one

        projection, tiles = self.down, self.tiles_of_one(self.down)
        bias = None if self.biases is None else self.biases[1]
        outer_of_one[(-(-projection.outputs // tiles.columns),)](
            middle,
            *_weights(projection, bias, out),
            weights,
            out,
            ids,
            self.first,
            self.count,
            *_sizes(projection),
            PER_TOKEN=ids.shape[1],
            CHOICES=power_of_two(ids.shape[1]),
            ROUNDS="here" if projection.rounds else "",
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            **_constants(projection, bias, out.dtype),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )

    def _ordered(self, ids: Tensor, rows: int) -> Ordered:
        from banyan.ops.cuda.expert_kernels import order_pairs

        pairs = ids.numel()
        blocks = (pairs + min(self.count, pairs) * (rows - 1)) // rows
        room = torch.empty(pairs + 3 * blocks + 1, dtype=torch.int32, device=ids.device)
        parts = room.split([pairs, blocks, blocks, blocks, 1])
        chunk = min(4096, power_of_two(pairs, 128))
        order_pairs[(self.count,)](
            ids,
            *parts,
            pairs,
            self.first,
            self.count,
            BINS=max(32, 1 << self.count.bit_length()),  # one more for those that are elsewhere
            CHUNK=chunk,
            BLOCK=rows,
            num_warps=max(1, min(8, chunk // 256)),
        )
        return Ordered(parts, blocks, ids.shape[1], False)


def _in_turns(gate: StoredWeight, up: StoredWeight) -> StoredWeight:
    """Rows of gates and ups, a gate first."""
    if gate.type != up.type:
        both = torch.stack([gate.dense.float(), up.dense.float()], dim=1)
        return StoredWeight.from_tensor(both.flatten(0, 1))
    raw = torch.stack([gate.raw, up.raw], dim=1).flatten(0, 1)
    return StoredWeight(gate.type, (2 * gate.shape[0], gate.shape[1]), raw)


def _weights(
    projection: PackedProjection, bias: Tensor | None, unused: Tensor
) -> tuple[Tensor, ...]:
    parts = (projection.scales, projection.minima, projection.units, bias)
    return (projection.numbers, *(unused if part is None else part for part in parts))


def _sizes(projection: PackedProjection) -> tuple[int, ...]:
    """inputs, outputs, filled, steps, groups, per_group, wide of the kernels."""
    _, steps, filled, _ = projection.numbers.shape
    groups, wide = (1, 1) if projection.scales is None else projection.scales.shape[1:]
    return (
        projection.inputs,
        projection.outputs,
        filled,
        steps,
        groups,
        projection.per_group,
        wide,
    )


def _constants(
    projection: PackedProjection, bias: Tensor | None, dtype: torch.dtype
) -> dict[str, object]:
    kind = projection.type
    steps, chunk = projection.numbers.shape[1], projection.chunk
    reach = steps * chunk * (2 if kind is not None and kind.is_paired else 1)
    return {
        "NUMBER": "float" if kind is None else kind.name,
        "BASE": 0 if kind is None else kind.base,
        "SHARED": projection.shared,
        "IS_ONCE": projection.has_one_scale,
        "HAS_SCALES": projection.scales is not None,
        "HAS_MINIMA": projection.minima is not None,
        "HAS_UNITS": projection.units is not None,
        "HAS_BIAS": bias is not None,
        "WHOLE": projection.inputs == reach,
        "CHUNK": chunk,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "ASSEMBLY": _assembly_for(projection, dtype),
    }


def _assembly_for(projection: PackedProjection, dtype: torch.dtype) -> str:
    """PTX that opens numbers; "" = the compiler generates it."""
    device, kind = projection.numbers.device, projection.type
    if kind is None or kind.name == "e4m3" or device.type != "cuda":
        return ""
    if torch.cuda.get_device_capability(device) < products.LEAST_CAPABILITY:
        return ""
    return assembly_of(kind.name, kind.base, dtype)


def assembly_of(number: str, base: int, dtype: torch.dtype) -> str:
    """For numbers of a kind (`NumberType.name`); "" for types that are no halves."""
    if number == "int4":
        return products.nibbles(dtype, base)
    return products.octets(dtype) if number == "int8" else four_bit_floats(dtype)


_FLOAT_BITS = {
    torch.bfloat16: ("bf16x2", 6, 0x01C0, 0x7E80),
    torch.float16: ("f16x2", 9, 0x0E00, 0x7400),
}
"""Type -> PTX name of a pair, where exponent and mantissa go, their mask, and the power of two by
which the number is then too small."""


def four_bit_floats(dtype: torch.dtype) -> str:
    """PTX: the low ($0, $1) and high ($2, $3) nibbles of four bytes ($4), 4-bit floats, as
    halves."""
    if dtype not in _FLOAT_BITS:
        return ""
    pair, place, mask, power = _FLOAT_BITS[dtype]
    lines = [
        f"mov.b32 z, 0x{power:04x}{power:04x};",
        "prmt.b32 p, $4, 0, 0x4140; prmt.b32 q, $4, 0, 0x4342;",
    ]
    for out, source, low in (("$0", "p", 0), ("$1", "q", 0), ("$2", "p", 4), ("$3", "q", 4)):
        left = place - low
        shift = f"shl.b32 t, {source}, {left};" if left >= 0 else f"shr.u32 t, {source}, {-left};"
        lines += [
            f"shl.b32 s, {source}, {12 - low}; and.b32 s, s, 0x80008000;",
            shift,
            f"lop3.b32 t, t, 0x{mask:04x}{mask:04x}, s, 0xea;",
            f"mul.{pair} {out}, t, z;",
        ]
    return "{ .reg .b32 p, q, s, t, z; " + " ".join(lines) + " }"


def _rounded(x: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """x [rows, inputs] as 8-bit floats, and their factors [rows, inputs / chunk]."""
    from banyan.ops.cuda.expert_kernels import round_rows

    rows, inputs = x.shape
    out = torch.empty((rows, inputs), dtype=torch.float8_e4m3fn, device=x.device)
    units = torch.empty((rows, inputs // chunk), dtype=torch.float32, device=x.device)
    at_once = min(8, power_of_two(inputs // chunk))
    grid = (rows, -(-inputs // chunk // at_once))
    round_rows[grid](x, out, units, x.stride(0), inputs, CHUNK=chunk, CHUNKS=at_once, num_warps=4)
    return out, units


def _add_up(
    x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, first: int, last: int, home: int
) -> None:
    from banyan.ops.cuda.expert_kernels import add_up

    tokens, per_token = ids.shape
    if not tokens:
        return
    width = out.shape[1]
    block = min(_SUM_BLOCK, power_of_two(width, 32))
    add_up[(tokens, -(-width // block))](
        x,
        ids.contiguous(),
        weights.contiguous(),
        out,
        first,
        last,
        home,
        width,
        PER_TOKEN=per_token,
        CHOICES=power_of_two(per_token),
        BLOCK=block,
        num_warps=max(1, block // 256),
    )


def _combine_experts(x: Tensor, ids: Tensor, weights: Tensor, home: int) -> Tensor:
    out = x.new_empty(ids.shape[0], x.shape[1] // ids.shape[1])
    _add_up(x.contiguous(), ids, weights, out, 0, _ANY, home)
    return out


def packer(toolkit: object) -> Callable[..., PackedExperts]:
    """Function that packs experts, and rounds float experts if the toolkit says so."""
    wanted = toolkit.quantization if isinstance(toolkit, CudaToolkit) else ""
    rounding = QUANTIZATIONS.get(wanted, wanted)

    def pack(experts: StoredExperts, dtype: torch.dtype, device: torch.device) -> PackedExperts:
        return GroupedExperts(experts, dtype, device, rounding)

    return pack


experts = Kernel(supports=declines, make=packer, keeps=(NVFP4,))
combine_experts = Kernel(supports=declines, run=_combine_experts)
