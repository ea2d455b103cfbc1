"""Checks and times products with low-bit weights on a CUDA device: python -m
benchmarks.cuda_products

For each form of weight and number of rows: the cuts of a sweep against float64, the fastest of
them, the one that `ops/cuda` chooses, and torch's bf16 product. Weights are taken in turn, together
larger than the device's cache, in a captured graph. A fraction is relative to the bound: the bytes
at the speed of a copy, or the operations at the speed of torch's largest product of that type. With
--device cpu --small the script tries itself in Triton's interpreter.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from banyan.ops.cuda import fp8, products
from banyan.ops.cuda.fp8 import PackedFloats
from banyan.ops.cuda.products import PackedNumbers, Shape

SHAPES = ((14336, 4096), (4096, 14336))
"""Outputs, inputs; the first one is swept."""
ROWS = (1, 16, 64, 128, 256, 2048)
CACHE_BYTES = 160 << 20
BLOCKS = (132, 264, 528, 1056)
"""Of threads, that parts are made for."""
REPLAYS, SHOWN = 5, 3
"""Runs of a graph that are timed; candidates that are printed."""
TOLERANCE, ROUNDED_TOLERANCE = 5e-3, 4e-2
"""Most RMS error relative to the results: of bf16, and of activations rounded to e4m3."""
SIDE = 8192
"""Of the products whose rate is the bound."""

Weight = PackedNumbers | PackedFloats | Tensor
Run = Callable[[Tensor, Weight], Tensor]


@dataclass(frozen=True)
class Form:
    """
    Attributes:
        make: (outputs, inputs, device) -> a random weight.
        plain: a weight as fp32 [outputs, inputs].
        chosen: the product that the engine runs.
        candidates: number of rows -> products by name, without their parts.
        is_fp8: products have 8-bit floats on both sides.
    """

    make: Callable[[int, int, torch.device], Weight]
    plain: Callable[[Weight], Tensor]
    chosen: Run
    candidates: Callable[[int], "Iterator[Candidate]"]
    is_fp8: bool = False


@dataclass(frozen=True)
class Candidate:
    """A product and its cut; None = it has none."""

    name: str
    run: Callable[[Tensor, Weight, Shape], Tensor]
    shape: Shape | None = None

    def with_cut(self, cut: Shape) -> Run:
        return lambda x, weight: self.run(x, weight, cut)

    def cuts(self, rows: int, outputs: int, inputs: int) -> list[Shape]:
        if self.shape is None:
            return [Shape(0, 0, 1, is_turned=True)]
        counts = {
            products.with_parts(self.shape, blocks, rows, outputs, inputs).parts
            for blocks in BLOCKS
        }
        return [replace(self.shape, parts=count) for count in sorted(counts) if count <= 16]


def integers(bits: int, base: int, group: int, has_minima: bool) -> Callable[..., PackedNumbers]:
    def make(outputs: int, inputs: int, device: torch.device) -> PackedNumbers:
        chunk = min(group, 128 if bits == 8 else 64)
        chunks = inputs // chunk if bits == 8 else inputs // chunk // 2
        numbers = torch.randint(0, 120, (chunks, outputs, chunk), dtype=torch.uint8, device=device)
        numbers = numbers.view(torch.int8) if bits == 8 else numbers
        scales = torch.rand(inputs // group, outputs, device=device).half() * 0.01
        minima = -4 * scales if has_minima else None
        return PackedNumbers(bits, base, outputs, inputs, group, numbers, scales, minima)

    return make


def floats(is_grouped: bool) -> Callable[..., PackedFloats]:
    def make(outputs: int, inputs: int, device: torch.device) -> PackedFloats:
        numbers = torch.randn(outputs, inputs, device=device).to(torch.float8_e4m3fn)
        group, shared = (128, 128) if is_grouped else (inputs, 1)
        scales = torch.rand(inputs // group, outputs // shared, device=device) * 0.01 + 0.001
        return PackedFloats(outputs, inputs, group, shared, numbers, scales)

    return make


@cache
def _counters(device: torch.device) -> Tensor:
    return products.counters_for(1 << 16, device)


def _numbers(x: Tensor, weight: Weight, shape: Shape) -> Tensor:
    assert isinstance(weight, PackedNumbers)
    fast = products.assembly_for(weight, x.dtype)
    return products.product(x, weight, None, shape, fast, _counters(x.device))


def _exact(x: Tensor, weight: Weight, shape: Shape) -> Tensor:
    assert isinstance(weight, PackedFloats)
    fast = fp8.assembly_for(weight, x.dtype)
    return fp8.product(x, weight, None, shape, x.dtype, False, None, fast, _counters(x.device))


def _rounding(x: Tensor, weight: Weight, shape: Shape) -> Tensor:
    assert isinstance(weight, PackedFloats)
    return fp8.product(x, weight, None, shape, x.dtype, True, None, "", _counters(x.device))


def _rounded(x: Tensor, weight: Weight, shape: Shape) -> Tensor:
    assert isinstance(weight, PackedFloats)
    numbers, scales = fp8.round_rows(x, 128 if weight.is_grouped else 0)
    counters = _counters(x.device)
    return fp8.product(numbers, weight, None, shape, x.dtype, True, scales, "", counters)


def _vendor(x: Tensor, weight: Weight, shape: Shape, fast: bool = False) -> Tensor:
    assert isinstance(weight, PackedFloats)
    numbers, scales = fp8.round_rows(x, 128 if weight.is_grouped else 0, 16)
    wide = fp8.vendor_scales(weight)
    return fp8.vendor_product(numbers, scales, weight, wide, None, fast)[: len(x)]


def _unpacked(x: Tensor, weight: Weight, shape: Shape) -> Tensor:
    assert not isinstance(weight, Tensor)
    plain = products.unpacked if isinstance(weight, PackedNumbers) else fp8.unpacked
    return functional.linear(x, plain(weight, x.dtype))  # type: ignore[arg-type]


def _cut(rows: int, outputs: int, warps: int, stages: int, rounds: bool = False) -> Shape:
    return Shape(rows, outputs, 1, True, warps, stages, rounds)


def _of_integers(rows: int) -> Iterator[Candidate]:
    yield Candidate("unpacked", _unpacked)
    if rows > 256:
        return
    if rows <= 16:
        for cut in (Shape(16, 128, 1, False), Shape(16, 128, 1, True), _cut(16, 128, 4, 4, True)):
            yield Candidate("product", _numbers, cut)
        return
    yield Candidate("product", _numbers, _cut(64 if rows <= 64 else 128, 128, 8, 3))
    few = [(64, 128, 4, 4), (64, 128, 8, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3)]
    many = [(128, 128, 4, 3), (128, 128, 4, 2), (128, 128, 8, 3), (256, 64, 4, 2)]
    for cut in many if rows > 128 else few[:3] if rows <= 64 else [*few[3:], many[0]]:
        yield Candidate("product", _numbers, _cut(*cut, rounds=True))


def _of_floats(rows: int, is_grouped: bool) -> Iterator[Candidate]:
    if rows <= 16:
        for cut in ((16, 128, 4, 4), (16, 128, 4, 6), (16, 64, 4, 5), (16, 128, 8, 4)):
            yield Candidate("rounding", _rounding, _cut(*cut))
    elif rows <= 64:
        yield Candidate("rounding", _rounding, _cut(64, 128, 4, 4))
    cuts = [(64, 128, 4, 4), (64, 64, 4, 5), (128, 128, 8, 3), (128, 64, 4, 4), (128, 128, 8, 4)]
    few = [(16, 128, 4, 5)] if rows <= 16 else cuts[:2] if rows <= 64 else cuts
    for cut in few:
        yield Candidate("rounded", _rounded, _cut(*cut))
    yield Candidate("vendor", _vendor)
    if not is_grouped:
        yield Candidate("vendor, fast sums", partial(_vendor, fast=True))


def _of_exact(rows: int) -> Iterator[Candidate]:
    yield Candidate("unpacked", _unpacked)
    cuts = [(16, 128, 4, 4), (16, 64, 4, 5)] if rows <= 16 else [(64, 128, 8, 3), (64, 64, 4, 4)]
    for cut in cuts if rows <= 64 else [(128, 128, 8, 3)] if rows <= 256 else []:
        yield Candidate("exact", _exact, _cut(*cut))


def _linear(rounds: bool) -> Run:
    def run(x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, PackedFloats)
        return fp8.FloatLinear(weight, x.dtype, rounds)(x)

    return run


def _quantised(x: Tensor, weight: Weight) -> Tensor:
    assert isinstance(weight, PackedNumbers)
    return products.QuantisedLinear(weight, x.dtype)(x)


def _plain_floats(weight: Weight) -> Tensor:
    assert isinstance(weight, PackedFloats)
    return fp8.unpacked(weight, torch.float32)


def _plain_numbers(weight: Weight) -> Tensor:
    assert isinstance(weight, PackedNumbers)
    return products.unpacked(weight, torch.float32)


FORMS = {
    "fp8 channel": Form(
        floats(False), _plain_floats, _linear(True), partial(_of_floats, is_grouped=False), True
    ),
    "fp8 block": Form(
        floats(True), _plain_floats, _linear(True), partial(_of_floats, is_grouped=True), True
    ),
    "q4 128": Form(integers(4, 8, 128, False), _plain_numbers, _quantised, _of_integers),
    "fp8 exact": Form(floats(False), _plain_floats, _linear(False), _of_exact),
    "awq 128": Form(integers(4, 0, 128, True), _plain_numbers, _quantised, _of_integers),
    "q4_0": Form(integers(4, 8, 32, False), _plain_numbers, _quantised, _of_integers),
    "q8_0": Form(integers(8, 0, 32, False), _plain_numbers, _quantised, _of_integers),
}
DEFAULT_FORMS = ("fp8 channel", "fp8 block", "q4 128", "fp8 exact")


def _error(form: Form, x: Tensor, weight: Weight, got: Tensor) -> str:
    """Why a product is wrong; "" = it is right."""
    want = x.double() @ form.plain(weight).double().T
    off = ((got.double() - want).norm() / want.norm()).item()
    most = ROUNDED_TOLERANCE if form.is_fp8 else TOLERANCE
    return "" if off <= most else f"differs by {off:.3g}, more than {most}"


def try_one(name: str, rows: int, at: int, device: str) -> str:
    """Compile a candidate and compare it with float64, in a process of its own."""
    form, outputs, inputs = FORMS[name], 256, 2048
    candidate = list(form.candidates(rows))[at]
    torch.manual_seed(at)
    x = torch.randn(rows, inputs, device=device).bfloat16()
    x = x.half() if device == "cpu" else x
    weight = form.make(outputs, inputs, torch.device(device))
    try:
        for parts in (1, 3) if candidate.shape is not None else (1,):
            shape = replace(candidate.cuts(rows, outputs, inputs)[0], parts=parts)
            error = _error(form, x, weight, candidate.run(x, weight, shape))
            if error:
                return f"wrong: {error}"
    except Exception as error:  # what the device cannot hold or lacks is left out, and reported
        return f"cannot run: {str(error)[:200]!r}"
    return ""


def microseconds(run: Run, x: Tensor, weights: Sequence[Weight]) -> float:
    """Of one product, the weights taken in turn."""
    run(x, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(x, weight)
    graph.replay()
    took = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        took.append(began.elapsed_time(ended) * 1e3 / len(weights))
    return sorted(took)[REPLAYS // 2]


@dataclass(frozen=True)
class Peaks:
    """Bytes per second of a copy; operations per second of bf16 and of 8-bit floats."""

    bytes_s: float
    bf16_s: float
    fp8_s: float

    @staticmethod
    def measure() -> "Peaks":
        some = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        other = torch.empty_like(some)
        copied = microseconds(lambda x, w: other.copy_(some), some, [some])
        a = torch.randn(SIDE, SIDE, device="cuda").bfloat16()
        plain = microseconds(lambda x, w: functional.linear(x, w), a, [a])  # type: ignore[arg-type]
        weight = floats(False)(SIDE, SIDE, torch.device("cuda"))
        numbers, scales = fp8.round_rows(a)
        wide = fp8.vendor_scales(weight)
        eight = microseconds(
            lambda x, w: fp8.vendor_product(numbers, scales, weight, wide, None, True), a, [a]
        )
        operations = 2e6 * SIDE**3
        return Peaks(2 * some.nbytes * 1e6 / copied, operations / plain, operations / eight)


def bound_of(peaks: Peaks, rows: int, outputs: int, inputs: int, size: int, is_fp8: bool) -> float:
    """Microseconds that a product takes at least."""
    moved = size + 2 * rows * (inputs + outputs)
    rate = peaks.fp8_s if is_fp8 else peaks.bf16_s
    return 1e6 * max(moved / peaks.bytes_s, 2.0 * rows * outputs * inputs / rate)


def _bf16(outputs: int, inputs: int, device: torch.device) -> Tensor:
    return torch.randn(outputs, inputs, device=device).bfloat16()


def several(make: Callable[[], Weight]) -> list[Weight]:
    """Weights that are larger than the cache together."""
    first = make()
    size = first.nbytes if isinstance(first, Tensor) else first.size_bytes
    return [first, *(make() for _ in range(CACHE_BYTES // size))]


def time_all(options: argparse.Namespace, lost: set[tuple[str, int, int]]) -> int:
    device, failed = torch.device("cuda"), 0
    peaks = Peaks.measure()
    print(f"figure: copy = {peaks.bytes_s / 1e12:.2f} TB/s")
    print(f"figure: torch bf16 {SIDE} = {peaks.bf16_s / 1e12:.0f} TFLOP/s")
    print(f"figure: torch fp8 {SIDE} = {peaks.fp8_s / 1e12:.0f} TFLOP/s", flush=True)
    for at, (outputs, inputs) in enumerate(SHAPES):
        label = f"{outputs}x{inputs}"
        plain = several(partial(_bf16, outputs, inputs, device))
        of_torch = dict[int, float]()
        for rows in options.rows:
            x = torch.randn(rows, inputs, device=device).bfloat16()
            of_torch[rows] = microseconds(lambda x, w: functional.linear(x, w), x, plain)  # type: ignore[arg-type]
            print(f"figure: {label} rows {rows} bf16 = {of_torch[rows]:.1f} us", flush=True)
        del plain
        for name in options.forms:
            form = FORMS[name]
            weights = several(partial(form.make, outputs, inputs, device))
            assert not isinstance(weights[0], Tensor)
            size = weights[0].size_bytes
            for rows in options.rows:
                x = torch.randn(rows, inputs, device=device).bfloat16()
                try:
                    error = _error(form, x, weights[0], form.chosen(x, weights[0]))
                except RuntimeError as raised:
                    print(f"{label}, {rows} rows, {name}: {raised}", flush=True)
                    failed += 1
                    continue
                failed += bool(error)
                took = microseconds(form.chosen, x, weights)
                bound = bound_of(peaks, rows, outputs, inputs, size, form.is_fp8)
                speed = f"{of_torch[rows] / took:.2f} of bf16's speed"
                shown = f"{took:.1f} us, {speed}, {bound / took:.2f} of the bound"
                print(f"figure: {label} rows {rows} {name} = {shown} {error}", flush=True)
                if at == 0 and not options.chosen:
                    found = sweep(name, x, weights, lost)
                    for each, cut in found[:SHOWN]:
                        print(
                            f"figure: {label} rows {rows} {name}: {cut} = {each:.1f} us", flush=True
                        )
            del weights
    return failed


def sweep(
    name: str, x: Tensor, weights: list[Weight], lost: set[tuple[str, int, int]]
) -> list[tuple[float, str]]:
    """Microseconds of the candidates and their cuts, the fastest first."""
    rows, first, found = len(x), weights[0], list[tuple[float, str]]()
    assert not isinstance(first, Tensor)
    for at, candidate in enumerate(FORMS[name].candidates(rows)):
        if (name, rows, at) in lost:
            continue
        for cut in candidate.cuts(rows, first.outputs, first.inputs):
            took = microseconds(candidate.with_cut(cut), x, weights)
            text = f"{cut.rows}/{cut.outputs} warps {cut.warps} stages {cut.stages}"
            kind = " weights rounded" if cut.rounds else "" if cut.is_turned else " not turned"
            parts = f" {text} parts {cut.parts}{kind}" if candidate.shape is not None else ""
            found.append((took, candidate.name + parts))
    return sorted(found)


MODEL_SETTINGS = {
    "8-bit floats": {},
    "8-bit floats, rounded activations": {"activation_scheme": "dynamic"},
}
MODEL_SIDES = {"channel": (1, 0), "block": (128, 128)}
"""Outputs and inputs that share a scale; 0 = all."""
LEAST_SAME = 0.5
"""Of the first greedy tokens, with rounded activations."""


def check_model(device: str) -> int:
    """How many FP8 checkpoints of a tiny model do not give the tokens of transformers in float32:
    all of them without rounded activations, else most of the first ones."""
    from benchmarks.cuda_check import generate, greedy, prompts_of, tiny_llama

    failed, prompts = 0, prompts_of([5 + 11 * i for i in range(9)])
    for kind, sides in MODEL_SIDES.items():
        model, state = tiny_llama(), dict[str, Tensor]()
        for name, weight in model.state_dict().items():
            if not name.endswith("_proj.weight"):
                state[name] = weight.clone()
                continue
            numbers, scale, plain = _in_fp8(weight, sides)
            state[name], state[f"{name}_scale_inv"] = numbers, scale
            weight.copy_(plain)
        wanted = [greedy(model, prompt, 32) for prompt in prompts]
        for title, more in MODEL_SETTINGS.items():
            settings = {"quant_method": "fp8", **more}
            settings |= {"weight_block_size": list(sides)} if all(sides) else {}
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                save_file(state, Path(folder) / "model.safetensors")
                path = Path(folder) / "config.json"
                facts = json.loads(path.read_text()) | {"quantization_config": settings}
                path.write_text(json.dumps(facts))
                dtype = "bfloat16" if more and device == "cuda" else "float32"
                flags = {"cpu_activations": "auto"} if more else {}
                got, summary = generate(folder, prompts, 32, device, dtype, **flags)
            pairs = list(zip(got, 2 * wanted, strict=True))
            same = sum(a == b for a, b in pairs)
            first = sum(a[0] == b[0] for a, b in pairs)
            failed += first < LEAST_SAME * len(pairs) if more else same < len(pairs)
            print(f"{title}, {kind}: {same}/{len(pairs)} answers and {first} first tokens equal")
            print(f"  {summary}", flush=True)
    return failed


def _in_fp8(weight: Tensor, sides: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, their scales, and their values. weight: [outputs, inputs]"""
    outputs, inputs = weight.shape
    height, width = min(sides[0], outputs), sides[1] or inputs
    blocks = weight.view(outputs // height, height, inputs // width, width)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    spread = scale[:, None, :, None]
    numbers = (blocks / spread).to(torch.float8_e4m3fn)
    plain = (numbers.float() * spread).view(outputs, inputs)
    return numbers.view(outputs, inputs), scale, plain


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--forms", nargs="+", default=list(DEFAULT_FORMS), choices=list(FORMS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--model", action="store_true", help="check models only")
    parser.add_argument("--chosen", action="store_true", help="time no candidates")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    options = parser.parse_args()
    if options.model:
        return min(check_model(options.device), 1)
    began = time.perf_counter()
    is_cpu = options.device == "cpu"
    if is_cpu:
        os.environ["TRITON_INTERPRET"] = "1"
        options.rows = [1, 40] if options.small else options.rows
    asked = [
        (name, rows, at, options.device)
        for name in options.forms
        for rows in options.rows
        for at in range(len(list(FORMS[name].candidates(rows))))
        if not options.chosen
    ]
    lost, failed = set[tuple[str, int, int]](), 0
    with ProcessPoolExecutor(
        1 if is_cpu else options.processes, mp_context=get_context("spawn")
    ) as pool:
        for one, error in zip(asked, pool.map(try_one, *zip(*asked, strict=True)), strict=True):
            if error:
                lost.add(one[:3])
                is_wrong = error.startswith("wrong")
                failed += is_wrong
                candidate = list(FORMS[one[0]].candidates(one[1]))[one[2]]
                print(f"{one[0]}, {one[1]} rows, {candidate.name} {candidate.shape}: {error}")
    print(f"{len(asked)} candidates tried in {time.perf_counter() - began:.0f} s", flush=True)
    if not is_cpu:
        failed += time_all(options, lost)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
