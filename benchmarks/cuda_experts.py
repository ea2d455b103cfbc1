"""Checks and times blocks of experts on a CUDA device: python -m benchmarks.cuda_experts

Kernels of all forms of weights against float64, with fresh inputs; then microseconds of one layer
of the shape of Qwen3-30B-A3B, in a captured graph over the weights of several layers, and their
share of the bound: the bytes of the active experts by the bandwidth of a copy, or the products by
the rate of the vendor's library. Sizes of products are compared, the best ones last. Needs no
network. With --device cpu --small it tries the script itself, in Triton's interpreter.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from torch import Tensor

from banyan.models.weights.quant.fp4 import from_mxfp4
from banyan.models.weights.quant.fp8 import Fp8
from banyan.ops import blocks, reference, rounding
from banyan.ops.cuda.expert_weights import PackedProjection
from banyan.ops.cuda.triton_experts import (
    ExpertTiles,
    GroupedExperts,
    rows_for,
    tiles_for,
    tiles_of_one,
)
from banyan.ops.experts_api import StoredExperts
from banyan.ops.stored import NVFP4, StoredWeight

Variant = tuple[str, int, ExpertTiles | None, ExpertTiles | None]
"""Form, rows, and sizes; None = the layer chooses."""
LAYERS = 4
REPEATS = 7
COMPILED_S = 45.0
"""Sizes that are not compiled so long after the start are not tried."""
MOST_ERROR = {torch.bfloat16: 1.5e-2, torch.float16: 3e-3}
"""Relative error of all outputs together."""
ROUNDED_ERROR = {torch.bfloat16: 6e-2, torch.float16: 1.2e-1}
"""Of activations that are rounded; the interpreter rounds 8-bit floats wrongly."""


@dataclass(frozen=True)
class Shape:
    dim: int
    inner: int
    experts: int
    per_token: int


QWEN = Shape(2048, 768, 128, 8)
SMALL = Shape(256, 128, 4, 2)
CHECKED = Shape(2048, 768, 16, 8)
"""The checks so compile the kernels that are timed."""


def fp8(values: Tensor) -> StoredWeight:
    return Fp8((128, 128)).of_numbers(*rounding.to_fp8_blocks(values, 128, torch.float32)).weight


def integers(type: str) -> Callable[[Tensor], StoredWeight]:
    return lambda values: StoredWeight(type, tuple(values.shape), rounding.to_blocks(values, type))


def in_groups(values: Tensor) -> StoredWeight:
    """4-bit integers in groups of 128."""
    weight = integers("Q4_0")(values)
    raw = weight.raw.view(len(values), -1, 18).clone()
    raw[:, :, :2] = raw[:, ::4, :2].repeat_interleave(4, 1)
    return replace(weight, raw=raw.flatten(1))


def mxfp4(values: Tensor) -> StoredWeight:
    octets = torch.randint(0, 256, (len(values), values.shape[1] // 2), dtype=torch.uint8)
    exponents = torch.randint(119, 122, (len(values), values.shape[1] // 32), dtype=torch.uint8)
    return from_mxfp4(octets, exponents).weight


def nvfp4(values: Tensor) -> StoredWeight:
    codes = torch.randint(0, 16, (values.numel() // 16, 16), dtype=torch.uint8)
    scale = (torch.rand(len(codes), 1) * 50 + 1).to(torch.float8_e4m3fn)
    raw = blocks.lay_nvfp4(codes, scale, 5e-4)
    return StoredWeight(NVFP4, tuple(values.shape), raw.view(len(values), -1))


FORMS: dict[str, Callable[[Tensor], StoredWeight]] = {
    "bf16": lambda values: StoredWeight.from_tensor(values.bfloat16()),
    "fp8 rounded": fp8,
    "fp8": fp8,
    "q4 g128": in_groups,
    "mxfp4": mxfp4,
    "q4_0": integers("Q4_0"),
    "q8_0": integers("Q8_0"),
    "nvfp4": nvfp4,
}
"""Those that are timed come first."""
SWEPT = ("fp8 rounded", "mxfp4", "bf16")
"""Forms whose sizes are compared."""
TIMED = ("bf16", "fp8 rounded", "fp8", "q4 g128", "mxfp4")


def stored(form: str, shape: Shape, kinds: int, device: torch.device) -> StoredExperts:
    """Random experts on the device, `kinds` different ones."""

    def made_of(size: tuple[int, int]) -> StoredWeight:
        weight = FORMS[form](torch.randn(size) * size[1] ** -0.5)
        return replace(weight, raw=weight.raw.to(device))

    sizes = ((shape.inner, shape.dim), (shape.inner, shape.dim), (shape.dim, shape.inner))
    made = [[made_of(size) for _ in range(kinds)] for size in sizes]
    gate, up, down = (tuple((part * shape.experts)[: shape.experts]) for part in made)
    return StoredExperts(0, gate, up, down, "silu")


def packed(experts: StoredExperts, form: str, device: torch.device) -> GroupedExperts:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    layer = GroupedExperts(experts, dtype, device)
    if form == "fp8 rounded":
        layer.gate_up, layer.down = _rounding(layer.gate_up), _rounding(layer.down)
    return layer


def _rounding(projection: PackedProjection) -> PackedProjection:
    assert projection.type is not None
    return replace(projection, type=replace(projection.type, rounds=True))


def routed(rows: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.rand(rows, shape.experts, device=device).topk(shape.per_token).indices
    return ids, torch.rand(rows, shape.per_token, device=device) + 0.1


def check(form: str, device: torch.device, is_small: bool) -> tuple[int, str]:
    """How many sizes of batches are wrong, and lines for a reader."""
    torch.manual_seed(time.time_ns())
    torch.set_num_threads(1)  # there are many processes
    shape, lines, failed = SMALL if is_small else CHECKED, [], 0
    experts = stored(form, shape, shape.experts if is_small else 3, device)
    layer = packed(experts, form, device)
    exact = reference.pack_experts(experts, torch.float64, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    for rows in (1, 9) if is_small else (1, 9, 300):
        x = torch.randn(rows, shape.dim, device=device).to(dtype)
        ids, weights = routed(rows, shape, device)
        want = exact(x.double(), ids, weights.double())
        got = layer(x, ids, weights)
        error = float((got.double() - want).norm() / want.norm())
        is_same = torch.equal(got, layer(x, ids, weights))
        most = (ROUNDED_ERROR if form == "fp8 rounded" else MOST_ERROR)[dtype]
        is_right = error <= most and is_same
        failed += not is_right
        state = "ok" if is_right else "WRONG"
        lines.append(f"{form}, {rows} rows: error {error:.1e}, bits again {is_same}: {state}")
    return failed, "\n".join(lines)


def candidates(rows: int, projection: PackedProjection) -> Iterator[ExpertTiles]:
    """Sizes to be tried for blocks of `rows`; the chosen ones first."""
    mine = tiles_for(rows, projection)
    yield mine
    if rows <= 16:
        yield replace(mine, columns=32, stages=min(10, mine.stages + 2))
        yield replace(mine, columns=128, stages=4, is_turned=True)
        return
    yield replace(mine, columns=128, stages=3, warps=8, is_turned=False)
    yield replace(mine, rows=64, columns=128, stages=4, warps=4)


def of_one(projection: PackedProjection) -> Iterator[ExpertTiles]:
    mine = tiles_of_one(projection)
    yield mine
    yield replace(mine, columns=32)
    yield replace(mine, warps=1)


class Timer:
    """Microseconds of one layer, from a captured graph over all of them."""

    def __init__(self, layers: Sequence[GroupedExperts], rows: int, shape: Shape) -> None:
        device = layers[0].down.numbers.device
        self.layers = layers
        self.x = torch.randn(rows, shape.dim, device=device, dtype=torch.bfloat16)
        self.routes = [routed(rows, shape, device) for _ in layers]

    def active_bytes(self) -> float:
        """Of the experts that one layer's rows choose, on average."""
        layer = self.layers[0]
        size = (layer.gate_up.size_bytes + layer.down.size_bytes) / layer.count
        return size * statistics.mean(len(ids.unique()) for ids, _ in self.routes)

    def run(self) -> None:
        for layer, (ids, weights) in zip(self.layers, self.routes, strict=True):
            layer(self.x, ids, weights)

    def microseconds(self) -> float:
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
            self.run()
        took = []
        for _ in range(REPEATS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            graph.replay()
            ended.record()
            torch.cuda.synchronize()
            took.append(began.elapsed_time(ended) * 1e3 / 2 / len(self.layers))
        return statistics.median(took)


def copied_bytes_per_second() -> float:
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def flops_per_second() -> float:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / _seconds(lambda: torch.mm(x, x))


def _seconds(work: Callable[[], object]) -> float:
    took = []
    for _ in range(6):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        took.append(began.elapsed_time(ended) / 1e3)
    return statistics.median(took[1:])


def with_tiles(layer: GroupedExperts, tiles: ExpertTiles | None, one: ExpertTiles | None) -> None:
    """Set the sizes of a layer; None = those that it chooses itself."""
    layer.tiles = tiles_for if tiles is None else lambda rows, projection: tiles
    layer.tiles_of_one = tiles_of_one if one is None else lambda projection: one
    layer.rows = rows_for if tiles is None else lambda *_: tiles.rows


def compile_one(form: str, rows: int, tiles: ExpertTiles | None, one: ExpertTiles | None) -> str:
    """Compile what a timing launches, into the cache on disk. Returns what failed."""
    shape, device = CHECKED, torch.device("cuda")
    torch.set_num_threads(1)
    try:
        layer = packed(stored(form, shape, 1, device), form, device)
        with_tiles(layer, tiles, one)
        x = torch.randn(rows, shape.dim, device=device, dtype=torch.bfloat16)
        layer(x, *routed(rows, shape, device))
        torch.cuda.synchronize()
    except Exception as error:  # sizes that the device cannot hold are left out, and reported
        return f"{form} {rows} {tiles} {one}: {str(error)[:90]!r}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 2048])
    parser.add_argument("--forms", nargs="+", default=list(TIMED), choices=list(FORMS))
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    options = parser.parse_args()
    device = torch.device(options.device)
    began = time.perf_counter()
    torch.manual_seed(time.time_ns())
    if device.type != "cuda":
        return _sum_up(check(form, device, options.small) for form in FORMS)
    pool = ProcessPoolExecutor(options.processes, mp_context=get_context("spawn"))
    checks = [pool.submit(check, form, device, options.small) for form in FORMS]
    tried = {pool.submit(compile_one, *one): one for one in _tried(options)}
    failed = _sum_up(each.result() for each in checks)
    print(f"checked after {time.perf_counter() - began:.0f} s", flush=True)
    wait(tried, timeout=max(0.0, began + COMPILED_S - time.perf_counter()))
    ready = {one for each, one in tried.items() if each.done() and not each.result()}
    pool.shutdown(wait=True, cancel_futures=True)
    print(f"{len(ready)} of {len(tried)} variants after {time.perf_counter() - began:.0f} s")
    bandwidth, rate = copied_bytes_per_second(), flops_per_second()
    print(f"figure: copy = {bandwidth / 1e12:.2f} TB/s")
    print(f"figure: bf16 products = {rate / 1e12:.0f} TFLOP/s")
    for form in options.forms:
        layer = stored(form, QWEN, 2, device)
        layers = [packed(layer, form, device) for _ in range(LAYERS)]
        for rows in options.rows:
            _report(form, rows, layers, bandwidth, rate, ready)
        del layers
        torch.cuda.empty_cache()
    return failed


def _sum_up(checks: Iterable[tuple[int, str]]) -> int:
    failed = 0
    for count, lines in checks:
        failed += count
        print(lines, flush=True)
    print(f"verdict: {'FAILED' if failed else 'all forms are right'}", flush=True)
    return failed


def _projection(form: str) -> PackedProjection:
    cpu = torch.device("cpu")
    layer = packed(stored(form, SMALL, 1, cpu), form, cpu)
    bf16 = torch.empty(0, dtype=torch.bfloat16)
    return replace(layer.down, numbers=bf16) if form == "bf16" else layer.down


def _tried(options: argparse.Namespace) -> Iterator[Variant]:
    """What is compared with the sizes that are chosen, which the checks compile."""
    for form in (form for form in SWEPT if form in options.forms):
        projection = _chunked(form)
        for rows in (1, 2, 40):
            for tiles in list(candidates(128 if rows == 40 else 16, projection))[1:]:
                yield form, rows, tiles, None
        for one in list(of_one(projection))[1:]:
            yield form, 1, None, one


def _launch(rows: int) -> int:
    """Rows of the trial that compiles what so many rows launch."""
    return 1 if rows == 1 else 2 if rows <= 128 else 40


def _chunked(form: str) -> PackedProjection:
    """The form of the large shape's weights, without them."""
    projection = _projection(form)
    chunk = {"bf16": 64, "q4 g128": 64}.get(form, projection.chunk)
    return replace(projection, chunk=chunk)


def _report(
    form: str,
    rows: int,
    layers: Sequence[GroupedExperts],
    bandwidth: float,
    rate: float,
    ready: set[Variant],
) -> None:
    timer = Timer(layers, rows, QWEN)
    flops = 2.0 * rows * QWEN.per_token * 3 * QWEN.dim * QWEN.inner
    matrix = rate * (2 if form == "fp8 rounded" else 1)
    bound = max(timer.active_bytes() / bandwidth, flops / matrix) * 1e6
    took = timer.microseconds()
    name = f"experts {form}, {rows} rows"
    print(f"figure: {name} = {took:.1f} us")
    print(f"figure: {name}, of the bound = {100 * bound / took:.1f} %", flush=True)
    projection = layers[0].down
    block = rows_for(rows * QWEN.per_token, QWEN.experts, torch.bfloat16)
    if rows not in (1, 32, 2048):
        return
    found = [(took, "chosen")]
    ways: list[tuple[ExpertTiles | None, ExpertTiles | None]] = [
        (t, None) for t in candidates(block, projection)
    ]
    if rows == 1:
        ways += [(None, one) for one in of_one(projection)]
    for tiles, one in ways[1:]:
        if (form, _launch(rows), tiles, one) not in ready:
            continue
        for layer in layers:
            with_tiles(layer, tiles, one)
        shown = tiles or one
        assert shown is not None
        label = f"{'one ' if one else ''}{shown.columns}/w{shown.warps}/s{shown.stages}"
        found.append((timer.microseconds(), label + ("t" if shown.is_turned else "")))
    for layer in layers:
        with_tiles(layer, None, None)
    print(f"  {name}: " + ", ".join(f"{t:.1f} {label}" for t, label in sorted(found)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
