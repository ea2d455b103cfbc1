"""Times products with quantised weights on a CUDA device: python -m benchmarks.cuda_products

For each form of weight, number of rows and shape: the best cuts of a sweep, the cut that
`ops/cuda/products.py` chooses, the product of the unpacked weight, and torch's bf16 product.
Weights are taken in turn, together larger than the device's cache, in a captured graph.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from torch import Tensor
from torch.nn import functional

from banyan.ops.cuda import products
from banyan.ops.cuda.products import PackedNumbers, Shape

SHAPES = ((14336, 4096), (4096, 14336), (6144, 4096))
"""Outputs, inputs."""
ROWS = (1, 8, 32, 128, 512, 2048)
CACHE_BYTES = 160 << 20
BLOCKS = (132, 264, 528, 1056, 1584)
"""Of threads, that parts are made for."""
STEPS = 3
"""Runs of a graph that are timed."""


@dataclass(frozen=True)
class Form:
    """bits, base and group of a weight (group 0: all inputs), and whether it has minima."""

    bits: int
    base: int
    group: int
    has_minima: bool


FORMS = {
    "q8_0": Form(8, 0, 32, False),
    "q4_0": Form(4, 8, 32, False),
    "w4g128": Form(4, 8, 128, False),
    "awq128": Form(4, 0, 128, True),
    "int8": Form(8, 0, 0, False),
    "q4_1": Form(4, 0, 32, True),
}


def weight_of(form: Form, outputs: int, inputs: int) -> PackedNumbers:
    """Random numbers; outputs are a multiple of 128."""
    group = form.group or inputs
    chunk = min(group, 128 if form.bits == 8 else 64)
    chunks = inputs // chunk if form.bits == 8 else inputs // chunk // 2
    numbers = torch.randint(0, 120, (chunks, outputs, chunk), dtype=torch.uint8, device="cuda")
    numbers = numbers.view(torch.int8) if form.bits == 8 else numbers
    scales = torch.rand(inputs // group, outputs, device="cuda").half() * 0.01
    minima = -scales if form.has_minima else None
    return PackedNumbers(form.bits, form.base, outputs, inputs, group, numbers, scales, minima)


def cuts(rows: int) -> list[Shape]:
    """Without parts."""
    if rows <= 16:
        wide = [(64, False, 4), (128, False, 4), (64, True, 4), (128, True, 4), (256, False, 4)]
        wide += [(128, False, 2), (128, False, 8), (256, False, 8)]
        return [Shape(16, n, 1, t, w, s) for (n, t, w), s in itertools.product(wide, (2, 3, 4))]
    if rows <= 32:
        wide = [(64, False, 4), (128, False, 4), (64, True, 4), (128, True, 4), (128, False, 8)]
        return [Shape(32, n, 1, t, w, s) for (n, t, w), s in itertools.product(wide, (2, 3))]
    tall = [(64, 64, True, 4), (64, 128, True, 4), (128, 64, True, 4), (128, 128, True, 8)]
    return [Shape(m, n, 1, t, w, s) for (m, n, t, w), s in itertools.product(tall, (2, 3, 4))]


def with_parts(shape: Shape, rows: int, weight: PackedNumbers) -> list[Shape]:
    tiles = -(-weight.outputs // shape.outputs) * -(-rows // shape.rows)
    most = max(1, len(weight.numbers) // 4)
    counts = {max(1, min(blocks // tiles, most, 32)) for blocks in BLOCKS}
    return [replace(shape, parts=count) for count in sorted(counts)]


def compile_one(form: Form, rows: int, shape: Shape) -> str:
    weight = weight_of(form, 256, 4096)
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    try:
        products.product(x, weight, None, shape, products.assembly_for(weight, x.dtype))
        torch.cuda.synchronize()
    except Exception as error:  # a cut that the device cannot hold is left out, and reported
        return f"{shape}: {str(error)[:90]!r}"
    return ""


def microseconds(work: Callable[[PackedNumbers], Tensor], weights: list[PackedNumbers]) -> float:
    """Of one product, the weights taken in turn."""
    work(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            work(weight)
    graph.replay()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(STEPS):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) * 1e3 / STEPS / len(weights)


def report(name: str, rows: int, weights: list[PackedNumbers], lost: set[Shape]) -> None:
    weight = weights[0]
    x = torch.randn(rows, weight.inputs, device="cuda", dtype=torch.bfloat16)
    flops = 2.0 * rows * weight.outputs * weight.inputs
    fast = products.assembly_for(weight, x.dtype)
    found = []
    for shape in cuts(rows):
        if shape in lost:
            continue
        for cut in with_parts(shape, rows, weight):
            took = microseconds(lambda w, cut=cut: products.product(x, w, None, cut, fast), weights)
            found.append((took, cut))
    found.sort(key=lambda pair: pair[0])
    chosen = products.shape_of(rows, weight)
    mine = microseconds(lambda w: products.product(x, w, None, chosen, fast), weights)

    def unpack(packed: PackedNumbers) -> Tensor:
        return functional.linear(x, products.unpacked(packed, x.dtype))

    plain = microseconds(unpack, weights[:3])
    label = f"{name:<7}{rows:>5} {weight.outputs:>6}x{weight.inputs:<6}"
    best = found[0][0] if found else mine
    print(
        f"{label} best {best:7.1f} us {weight.size_bytes / best / 1e3:6.0f} GB/s "
        f"{flops / best / 1e6:5.0f} TF | chosen {mine:7.1f} | unpacked {plain:7.1f} | "
        + " ".join(
            f"{took:.1f}:{c.rows}/{c.outputs}/{c.parts}{'t' if c.is_turned else ''}w{c.warps}"
            f"s{c.stages}"
            for took, c in found[:4]
        ),
        flush=True,
    )


def report_plain(rows: int, outputs: int, inputs: int) -> None:
    count = max(2, CACHE_BYTES // (outputs * inputs * 2) + 1)
    made = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(count)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    took = microseconds(lambda w: functional.linear(x, w), made)  # type: ignore[arg-type]
    flops = 2.0 * rows * outputs * inputs
    print(
        f"{'bf16':<7}{rows:>5} {outputs:>6}x{inputs:<6} torch {took:6.1f} us "
        f"{made[0].nbytes / took / 1e3:6.0f} GB/s {flops / took / 1e6:5.0f} TF"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=300.0, help="after which it ends")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    options = parser.parse_args()
    began = time.perf_counter()
    classes = {next(top for top in (16, 32, 2048) if rows <= top) for rows in options.rows}
    asked = [
        (FORMS[name], min(rows, 128), shape)
        for name in options.forms
        for rows in sorted(classes)
        for shape in cuts(rows)
    ]
    lost: set[tuple[Form, Shape]] = set()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for (form, _, shape), error in zip(
            asked, pool.map(compile_one, *zip(*asked, strict=True)), strict=True
        ):
            if error:
                lost.add((form, shape))
                print(f"left out: {form} {error}")
    print(f"{len(asked)} cuts compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for outputs, inputs in SHAPES:
        for rows in options.rows:
            report_plain(rows, outputs, inputs)
    for name in options.forms:
        form = FORMS[name]
        for outputs, inputs in SHAPES:
            first = weight_of(form, outputs, inputs)
            count = CACHE_BYTES // first.size_bytes + 1
            weights = [first, *(weight_of(form, outputs, inputs) for _ in range(count))]
            for rows in options.rows:
                if time.perf_counter() - began > options.seconds:
                    print("out of time")
                    return 1
                report(name, rows, weights, {shape for mine, shape in lost if mine == form})
    return 0


if __name__ == "__main__":
    sys.exit(main())
