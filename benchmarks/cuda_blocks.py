"""Times the Triton kernels of expert blocks and of latent attention on a CUDA device:
python -m benchmarks.cuda_blocks [experts] [latent] [--tiles]

Every line has the error against fp32 where that is cheap, microseconds per call inside a graph, and
the share of the bound that reading the active weights, or the keys,
sets. With --tiles other sizes
of blocks are tried too. Needs no network. TRITON_INTERPRET=1 with --small tries the script itself.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from banyan.ops.cuda import triton_experts, triton_latent
from banyan.ops.cuda.triton_experts import GroupedExperts, Tiles, tiles_for
from banyan.ops.experts_api import StoredExperts
from banyan.ops.stored import StoredWeight

IS_INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
TYPE = torch.float16 if IS_INTERPRETED else torch.bfloat16
CALLS = 16
"""Calls in a graph, each with choices of its own: what one leaves in the L2 is no help."""


@dataclass(frozen=True)
class Shape:
    name: str
    count: int
    per_token: int
    dim: int
    inner: int


SHAPES = (
    Shape("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Shape("Mixtral 8x7B", 8, 2, 4096, 14336),
    Shape("DeepSeek-V2-Lite", 64, 6, 2048, 1408),
)
SMALL = (Shape("small", 8, 2, 64, 96),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["experts"])
    parser.add_argument("--shapes", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--bandwidth", type=float, default=3.0e12)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 4096, 16384])
    options = parser.parse_args()
    if "latent" in options.what:
        _latent(options)
    if "experts" in options.what:
        for shape in SMALL if options.small else [SHAPES[at] for at in options.shapes]:
            _experts(shape, options)


def _latent(options: argparse.Namespace) -> None:
    """DeepSeek's rank and turned width; decode steps, and a chunk of a prompt."""
    sizes = [(1, 1, 40)] if options.small else [(1, 1, 32768), (32, 1, 4096), (1, 4096, 0)]
    for heads in (16, 128):
        for rows, count, context in sizes:
            columns = -(-(context + count) // 16)
            q, turned = (
                torch.randn(rows * count, heads, width, device=DEVICE).to(TYPE)
                for width in (512, 64)
            )
            pages = [
                torch.randn(rows * columns + 1, 16, width, device=DEVICE).to(TYPE)
                for width in (512, 64)
            ]
            tables = torch.arange(rows * columns, device=DEVICE, dtype=torch.int32) + 1
            starts = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32) * count
            contexts = torch.full((rows,), context, device=DEVICE, dtype=torch.int32)
            where = (tables.view(rows, columns), starts, contexts, 0.04)
            attend = triton_latent.latent_attention.run
            assert attend is not None
            args = (q, turned, *pages, *where)
            seconds = _seconds(lambda a=args, f=attend: [f(*a) for _ in range(CALLS)]) / CALLS
            keys = rows * (context + 1) * count + rows * count * count // 2
            held = rows * (context + count) * 576 * 2
            bound = max(held / options.bandwidth, 2 * keys * heads * (576 + 512) / 8e14)
            print(
                f"latent, {heads} heads, {rows} rows of {count} after {context}: "
                f"{seconds * 1e6:9.1f} us, {bound / seconds:6.1%} of the bound",
                flush=True,
            )


def _experts(shape: Shape, options: argparse.Namespace) -> None:
    packed = _random_experts(shape)
    for tokens in [3, 40] if options.small else options.tokens:
        x = torch.randn(tokens, shape.dim, device=DEVICE).to(TYPE)
        choices = [
            torch.rand(tokens, shape.count, device=DEVICE).topk(shape.per_token).indices
            for _ in range(CALLS)
        ]
        weights = torch.rand(tokens, shape.per_token, device=DEVICE)
        active = sum(len(ids.unique()) for ids in choices) / len(choices)
        held = active * 3 * shape.dim * shape.inner * x.element_size()
        work = 6 * tokens * shape.per_token * shape.dim * shape.inner
        bound = max(held / options.bandwidth, work / 8e14)
        usual = tiles_for(tokens * shape.per_token, shape.count, TYPE)
        tried = _others(usual, tokens * shape.per_token / shape.count) if options.tiles else []
        for tiles in [usual, *tried]:
            head = f"{shape.name:<18} {tokens:>6} tokens {active:5.0f} experts"
            try:
                told = _timed(packed, x, choices, weights, tiles, bound)
            except Exception as failure:  # tiles that do not fit a processor are no news
                told = f"{type(failure).__name__} {str(failure)[:90]}"
            print(f"{head}: {told}  {_told(tiles)}", flush=True)


def _timed(
    packed: GroupedExperts,
    x: torch.Tensor,
    choices: list[torch.Tensor],
    weights: torch.Tensor,
    tiles: Tiles,
    bound: float,
) -> str:
    triton_experts.tiles_for = lambda *_: tiles
    try:
        error = _error(packed, x, choices[0], weights)
        seconds = _seconds(lambda: [packed(x, ids, weights) for ids in choices]) / CALLS
    finally:
        triton_experts.tiles_for = tiles_for
    return f"{seconds * 1e6:9.1f} us, {bound / seconds:6.1%} of the bound, error {error:.1e}"


def _others(usual: Tiles, mean: float) -> list[Tiles]:
    if mean <= 16:
        sizes = [(16, 16, 32, 128, 4, 4), (16, 32, 32, 256, 4, 3), (16, 64, 64, 64, 4, 5)]
        sizes += [(16, 32, 64, 64, 4, 6), (16, 64, 128, 128, 4, 3), (32, 32, 64, 128, 4, 4)]
        return [Tiles(*size) for size in sizes]
    if mean <= 64:
        sizes = [(32, 64, 128, 64, 4, 4), (64, 64, 128, 64, 8, 3), (64, 128, 256, 64, 8, 3)]
        return [Tiles(*size) for size in sizes]
    more = [replace(usual, stages=4), replace(usual, columns=64, outer=128)]
    return [*more, replace(usual, outer=128), Tiles(64, 128, 256, 64, 8, 3)]


def _told(tiles: Tiles) -> str:
    return (
        f"{tiles.rows} x {tiles.columns}/{tiles.outer} x {tiles.step}, "
        f"{tiles.warps} warps, {tiles.stages} stages"
    )


def _random_experts(shape: Shape) -> GroupedExperts:
    """Random weights, made on the device: none come through the host."""
    line = StoredWeight.from_tensor(torch.zeros(1, 1, dtype=TYPE))
    packed = GroupedExperts(
        StoredExperts(0, (line,), (line,), (line,), "silu"), TYPE, torch.device(DEVICE)
    )
    packed.count = shape.count
    sizes = (shape.count, 2 * shape.inner, shape.dim), (shape.count, shape.dim, shape.inner)
    packed.gate_up, packed.down = (
        torch.randn(size, device=DEVICE, dtype=TYPE) * size[-1] ** -0.5 for size in sizes
    )
    return packed


def _error(packed: GroupedExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
    """The largest error of some tokens, in units of the largest value."""
    got, worst, largest = packed(x, ids, weights), 0.0, 0.0
    for token in range(0, len(x), max(1, len(x) // 4)):
        want = torch.zeros(x.shape[1], device=DEVICE)
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            gate, up = (packed.gate_up[expert].float() @ x[token].float()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            want += weight * (packed.down[expert].float() @ inner)
        worst = max(worst, float((got[token].float() - want).abs().max()))
        largest = max(largest, float(want.abs().max()))
    return worst / largest


def _seconds(work: Callable[[], object]) -> float:
    """Of `work` inside a graph, the median of some replays."""
    if IS_INTERPRETED:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    took = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) / 1e3)
    del graph
    return sorted(took)[2]


if __name__ == "__main__":
    main()
