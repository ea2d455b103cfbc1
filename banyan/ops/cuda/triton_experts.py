"""Experts in Triton: sort the (token, expert) pairs, two products per expert, sum per token.

The products work on blocks of rows of one expert; the gate is part of the first. Nothing waits for
the device, and launches depend only on the number of tokens, so steps can be captured. Weights have
the activations' type.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from banyan.ops.bind import Kernel
from banyan.ops.cuda.needs import declines, power_of_two
from banyan.ops.experts_api import PackedExperts, StoredExperts
from banyan.ops.lora import ExpertSides
from banyan.ops.stored import StoredWeight, stack

_GATES = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_SUM_BLOCK = 1024
_ANY = 1 << 62
"""Larger than the number of any expert."""


@dataclass(frozen=True)
class ExpertTiles:
    """Block sizes of the products: rows and columns of a result, and inputs per step.

    Attributes:
        columns: columns of the first projection, the same number for gate and up.
        outer: columns of the second projection.
    """

    rows: int
    columns: int
    outer: int
    step: int
    warps: int
    stages: int


def tiles_for(pairs: int, experts: int, dtype: torch.dtype) -> ExpertTiles:
    """ExpertTiles by the average number of rows per expert."""
    mean = pairs / experts
    if dtype == torch.float32:
        return (
            ExpertTiles(16, 32, 32, 32, 4, 2) if mean <= 16 else ExpertTiles(64, 32, 64, 32, 4, 2)
        )
    if mean <= 16:
        return ExpertTiles(16, 32, 64, 128, 4, 4)
    if mean <= 64:
        return ExpertTiles(64, 128, 256, 64, 8, 3)
    return ExpertTiles(128, 128, 256, 64, 8, 4)


@dataclass(frozen=True)
class Ordered:
    """Pairs sorted by expert, in the kernels' form; sized for every possible routing.

    Attributes:
        parts: order [pairs], expert, first row and end of each block [blocks], their number [1].
        blocks: the largest possible number of blocks.
    """

    parts: tuple[Tensor, ...]
    blocks: int


class GroupedExperts:
    """gate_up: [experts, 2·inner, dim], the gates first, or without gates [experts, inner, dim];
    down: [experts, dim, inner]; both of the activations' type. Biases are fp32."""

    def __init__(self, experts: StoredExperts, dtype: torch.dtype, device: torch.device) -> None:
        self.first, self.count = experts.first, len(experts.down)
        self.is_whole = experts.first == 0 and self.count == (experts.total or self.count)
        self.gate = _GATES.get(experts.activation, "relu2")
        if experts.clamp is not None:
            self.gate = "clamped" if experts.clamp.alpha else "limited"
        self.clamp = experts.clamp
        pairs = zip(experts.gate, experts.up, strict=True) if experts.gate else zip(experts.up)
        self.gate_up = _laid([stack(pair) for pair in pairs], dtype, device)
        self.down = _laid(experts.down, dtype, device)
        self.biases: tuple[Tensor, Tensor] | None = None
        if experts.biases is not None:
            gate, up, down = (part.to(device, torch.float32) for part in experts.biases)
            self.biases = (torch.cat([gate, up], dim=1) if experts.gate else up, down.contiguous())

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, sides: ExpertSides | None = None
    ) -> Tensor:
        if sides is not None:
            raise NotImplementedError("these experts take no adapters: they are refused at start")
        ids, (tokens, per_token) = ids.contiguous(), ids.shape
        out = x.new_empty(tokens, x.shape[1])
        pairs = x.new_empty(tokens * per_token, x.shape[1])
        self._outputs(x, ids, pairs)
        _add_up(pairs, ids, weights, out, self.first, self.first + self.count, _ANY)
        return out

    def apart(self, x: Tensor, ids: Tensor) -> Tensor:
        pairs = x.new_zeros(ids.numel(), x.shape[1])
        self._outputs(x, ids.contiguous(), pairs)
        return pairs.view(ids.shape[0], -1)

    def parts(self, at: int) -> list[Tensor]:
        return [self.gate_up[at], self.down[at], *(bias[at] for bias in self.biases or ())]

    def put(self, at: int, parts: list[Tensor]) -> None:
        for mine, other in zip(self.parts(at), parts, strict=True):
            mine.copy_(other)

    def _outputs(self, x: Tensor, ids: Tensor, out: Tensor) -> None:
        """Write the expert's output of each pair to out [pairs, dim]; pairs of experts on other
        ranks are not written."""
        from banyan.ops.cuda.expert_kernels import expert_inner, expert_outer

        if not ids.numel():
            return
        assert x.stride(1) == 1 and ids.is_contiguous(), f"{x.stride()} {ids.stride()}"
        dim, inner, pairs = x.shape[1], self.down.shape[2], ids.numel()
        tiles = tiles_for(pairs, self.count, x.dtype)
        is_alone = len(ids) == 1  # its experts are different ones: nothing to sort
        ordered = Ordered((ids,) * 5, pairs) if is_alone else self._ordered(ids, tiles.rows)
        which = (ids, self.first, self.count)
        middle = x.new_empty(pairs, inner)
        in_bias, out_bias = self.biases or (x, x)
        limit, alpha = (self.clamp.limit, self.clamp.alpha) if self.clamp else (0.0, 0.0)
        common = {
            "ALONE": is_alone,
            "HAS_BIAS": self.biases is not None,
            "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
            "BLOCK": tiles.rows,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }
        step = _step(tiles.step, dim)
        expert_inner[(ordered.blocks * -(-inner // tiles.columns),)](
            x,
            self.gate_up,
            in_bias,
            *ordered.parts,
            middle,
            *which,
            x.stride(0),
            dim,
            inner,
            ids.shape[1],
            limit,
            alpha,
            GATE=self.gate,
            WHOLE=dim % step == 0,
            COLUMNS=tiles.columns,
            STEP=step,
            **common,
        )
        step = _step(tiles.step, inner)
        expert_outer[(ordered.blocks * -(-dim // tiles.outer),)](
            middle,
            self.down,
            out_bias,
            *ordered.parts,
            out,
            *which,
            dim,
            inner,
            WHOLE=inner % step == 0,
            COLUMNS=tiles.outer,
            STEP=step,
            **common,
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
        return Ordered(parts, blocks)


def _laid(weights: Sequence[StoredWeight], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[experts, out, in], copied one by one so that there is never a second copy of all."""
    laid = torch.empty((len(weights), *weights[0].shape), dtype=dtype, device=device)
    for at, weight in enumerate(weights):
        laid[at].copy_(weight.dense)
    return laid


def _step(most: int, width: int) -> int:
    """Inputs per step: the largest divisor up to `most`, unless that is tiny."""
    step = most
    while step > 32 and width % step:
        step //= 2
    return step if width % step == 0 else most


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


def _pack(experts: StoredExperts, dtype: torch.dtype, device: torch.device) -> PackedExperts:
    return GroupedExperts(experts, dtype, device)


experts = Kernel(supports=declines, run=_pack)
combine_experts = Kernel(supports=declines, run=_combine_experts)
