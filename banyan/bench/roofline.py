"""Roofline: the share of each op in a step, and its speed relative to the bounds of the machine.

The bound of an op is the larger of its memory time and its arithmetic time. (Williams,
Waterman, Patterson: Roofline, CACM 2009.) `probe` measures the peak rates of this machine.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from banyan.base.os import num_cores
from banyan.formats.mapped import TensorInfo
from banyan.model_config.model_config import STATE, ModelConfig

FP32, INT8, BF16 = "fp32", "int8", "bf16"

_ON_INT8 = frozenset(("linear", "experts_in", "experts_out"))

_ON_BF16 = "linear_bf16"

_WIDE = 28

_ARRAY_BYTES = 256 << 20
"""Larger than any cache, so that reads go to memory."""

_MATRIX = 1536

_RUNS = 5


@dataclass(frozen=True)
class MachinePeaks:
    """Upper bounds.

    Attributes:
        read_bytes_s: memory read by all cores at once.
        fp32_ops_s: multiplications and additions in float32.
        int8_ops_s, bf16_ops_s: the same in int8 and bf16; None if not measured.
        passing_s: latency of a write from one core to another; None if not measured.
    """

    cores: int
    read_bytes_s: float
    fp32_ops_s: float
    int8_ops_s: float | None = None
    bf16_ops_s: float | None = None
    passing_s: float | None = None

    def keys(self) -> dict[str, object]:
        return {
            "cores": self.cores,
            "read_gb_s": self.read_bytes_s / 1e9,
            "fp32_gflop_s": self.fp32_ops_s / 1e9,
            "int8_gop_s": None if self.int8_ops_s is None else self.int8_ops_s / 1e9,
            "bf16_gflop_s": None if self.bf16_ops_s is None else self.bf16_ops_s / 1e9,
            "passing_ns": None if self.passing_s is None else self.passing_s * 1e9,
        }

    def __str__(self) -> str:
        int8 = "int8 not measured"
        if self.int8_ops_s is not None:
            int8 = f"int8 {self.int8_ops_s / 1e9:.0f} GOP/s"
        bf16 = f", bf16 {self.bf16_ops_s / 1e9:.0f} GFLOP/s" if self.bf16_ops_s else ""
        passing = f", {self.passing_s * 1e9:.0f} ns from core to core" if self.passing_s else ""
        return (
            f"{self.cores} cores, read {self.read_bytes_s / 1e9:.1f} GB/s, "
            f"fp32 {self.fp32_ops_s / 1e9:.0f} GFLOP/s, {int8}{bf16}{passing}"
        )


def probe() -> MachinePeaks:
    """Measure this machine, in about half a second; the best of five runs counts."""
    cores = num_cores()
    parts = np.array_split(np.ones(_ARRAY_BYTES // 8, dtype=np.int64), cores)
    with ThreadPoolExecutor(cores) as pool:
        read_s = _best_of(lambda: list(pool.map(np.bitwise_or.reduce, parts)))
    square = np.ones((_MATRIX, _MATRIX), dtype=np.float32)
    multiply_s = _best_of(lambda: square @ square)
    return MachinePeaks(cores, _ARRAY_BYTES / read_s, 2 * _MATRIX**3 / multiply_s)


def _best_of(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_RUNS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


@dataclass(frozen=True)
class OpCost:
    """One op over one step.

    Attributes:
        seconds: measured time.
        bytes: bytes it must read from memory.
        operations: multiplications plus additions it must do.
        arithmetic: FP32, INT8 or BF16, the peak that bounds the operations.
    """

    name: str
    seconds: float
    bytes: float
    operations: float
    arithmetic: str = FP32


class StageTime(Protocol):
    """An engine's measurement of one stage of a step; fields as in OpCost."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def bytes(self) -> float: ...
    @property
    def operations(self) -> float: ...


@dataclass(frozen=True)
class OpRow:
    """An op with its bound; `fraction` 1 = as fast as the bound allows."""

    cost: OpCost
    share: float
    bound_s: float
    fraction: float
    limited_by: str


def bound(cost: OpCost, machine: MachinePeaks) -> tuple[float, str]:
    """(seconds, what limits it). An unknown peak leaves the memory as the only bound."""
    memory_s = cost.bytes / machine.read_bytes_s
    peaks = {FP32: machine.fp32_ops_s, INT8: machine.int8_ops_s, BF16: machine.bf16_ops_s}
    peak = peaks[cost.arithmetic]
    compute_s = cost.operations / peak if peak else 0.0
    return max((memory_s, "memory"), (compute_s, cost.arithmetic))


def merged(times: Iterable[StageTime]) -> list[OpCost]:
    """Stages of one name, such as the same op of every layer, as one op: "linear × 30".

    The ops of `_ON_INT8` multiply 8-bit activations, `_ON_BF16` those in bf16; all others compute
    in fp32.
    """
    stages: dict[str, list[StageTime]] = {}
    for stage in times:
        stages.setdefault(stage.name, []).append(stage)
    return [
        OpCost(
            name if len(same) == 1 else f"{name} × {len(same)}",
            sum(each.seconds for each in same),
            sum(each.bytes for each in same),
            sum(each.operations for each in same),
            _arithmetic(name.split(" + ")),
        )
        for name, same in stages.items()
    ]


def _arithmetic(ops: list[str]) -> str:
    if _ON_BF16 in ops:
        return BF16
    return FP32 if _ON_INT8.isdisjoint(ops) else INT8


def op_rows(costs: Sequence[OpCost], step_s: float, machine: MachinePeaks) -> list[OpRow]:
    """Rows by share, largest first; the remaining time is the row "outside of ops"."""
    rows = []
    for cost in costs:
        bound_s, limited_by = bound(cost, machine)
        fraction = bound_s / cost.seconds if cost.seconds > 0 else 0.0
        rows.append(OpRow(cost, cost.seconds / step_s, bound_s, fraction, limited_by))
    rows.sort(key=lambda row: -row.share)
    rest_s = step_s - sum(cost.seconds for cost in costs)
    if costs and rest_s > 0:
        rest = OpCost("outside of ops", rest_s, 0.0, 0.0)
        rows.append(OpRow(rest, rest_s / step_s, 0.0, 0.0, "-"))
    return rows


def table(title: str, rows: Sequence[OpRow], step_s: float) -> str:
    """The report as text; times in microseconds."""
    lines = [
        f"{title}: {step_s * 1e6:.0f} us",
        f"{'op':<{_WIDE}} {'us':>10} {'share':>7} {'GB/s':>7} {'GOP/s':>8} {'bound us':>9} "
        f"{'of bound':>8}  limit",
    ]
    for row in rows:
        seconds = max(row.cost.seconds, 1e-9)  # shorter times are below the resolution of the clock
        lines.append(
            f"{row.cost.name:<{_WIDE}} {seconds * 1e6:>10.1f} {row.share:>7.1%} "
            f"{row.cost.bytes / seconds / 1e9:>7.1f} {row.cost.operations / seconds / 1e9:>8.1f} "
            f"{row.bound_s * 1e6:>9.1f} {row.fraction:>8.1%}  {row.limited_by}"
        )
    total_s = sum(row.bound_s for row in rows)
    lines.append(f"the bounds together: {total_s * 1e6:.0f} us, {total_s / step_s:.1%} of the step")
    return "\n".join(lines)


def whole_step(
    model_config: ModelConfig,
    tensors: Sequence[TensorInfo],
    seconds: float,
    rows: int,
    tokens: int,
    context: int,
    cache_bytes: int,
    arithmetic: str = FP32,
) -> OpCost:
    """A step as one op: every weight once, every row's cache once.

    Args:
        tensors: tensors of the checkpoint. The embedding table of a model with an untied output
            is looked up, not read completely.
        rows, tokens: sequences in the step, and tokens over all of them.
        context: positions that each row attends to.
        cache_bytes: bytes of one number in the KV cache.
        arithmetic: the peak that bounds the operations.
    """
    names = {t.name for t in tensors}
    is_untied = bool(names & {"output.weight", "lm_head.weight"})
    tables = ("token_embd.weight", "model.embed_tokens.weight")
    read = [t for t in tensors if not (is_untied and t.name in tables)]
    numbers = sum(_count(t) for t in read)
    head = sum(_count(t) for t in read if t.name in (*tables, "output.weight", "lm_head.weight"))
    attending = sum(
        any(kind != STATE for kind in model_config.kept_by(layer))
        for layer in range(model_config.num_layers)
    )
    kv_numbers = attending * model_config.kept_per_token
    heads = (
        sum(map(model_config.heads_of, range(model_config.num_layers))) / model_config.num_layers
    )
    attention = 4 * attending * heads * model_config.head_dim * context * tokens
    return OpCost(
        "whole step",
        seconds,
        bytes=sum(t.size_bytes for t in read) + rows * context * kv_numbers * cache_bytes,
        # Logits are computed for the last token of each row only.
        operations=2 * ((numbers - head) * tokens + head * rows) + attention,
        arithmetic=arithmetic,
    )


def _count(tensor: TensorInfo) -> int:
    count = 1
    for length in tensor.shape:
        count *= length
    return count
