"""Checks and times attention over pages on a CUDA device: python -m benchmarks.cuda_attention

`--parts check` compares the kernels with float64 over odd lengths, windows, caps, sinks, groups,
sizes of heads and pages, and pages of 8 bits. `--parts speed` times candidates of block sizes for
prompts and for decoding. `--parts hopper` does both for the kernel of `hopper_kernels.py`, in a
process of its own. With --device cpu --small it tries the script itself.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from banyan.ops import reference
from banyan.ops.cuda import triton_attention
from banyan.ops.cuda.triton_attention import LOG2_E, MANY, MANY_APART, PROGRAMS, PagedCall, Tiles
from banyan.ops.pages import to_stored

PARTS = ("check", "speed", "hopper")
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PROMPTS = (2048, 8192, 32768)
CANDIDATES = {
    "pages of 64, 64 keys, 8 warps": (64, Tiles(128, 64, 8, 2)),
    "pages of 64, 64 keys, 8 warps, 5 stages": (64, Tiles(128, 64, 8, 5)),
    "pages of 64, 64 keys, 4 warps": (64, Tiles(128, 64, 4, 2)),
    "pages of 64, pointers": (64, Tiles(128, 128, 8, 2)),
    "pages of 128, 128 keys, 8 warps": (128, Tiles(128, 128, 8, 2)),
}
HOPPER = {
    "hopper, 4 stages": (64, Tiles(128, 64, 4, 4, is_apart=True)),
    "hopper, 3 stages": (64, Tiles(128, 64, 4, 3, is_apart=True)),
    "hopper, 6 stages": (64, Tiles(128, 64, 4, 6, is_apart=True)),
    "hopper, pages of 128, 128 keys": (128, Tiles(128, 128, 4, 2, is_apart=True)),
}
DECODING = {"64 rows of 1k": (64, 1024), "1 row of 8k": (1, 8192), "1 row of 32k": (1, 32768)}
ONES = {
    "stages 3": Tiles(16, 64, 4, 3),
    "stages 7": Tiles(16, 64, 4, 7),
    "128 keys": Tiles(16, 128, 4, 3),
    "2 warps": Tiles(16, 64, 2, 5),
    "tiles": Tiles(16, 64, 4, 5, is_apart=True),
}
"""Candidates for rows of one token."""
KEPT = (torch.float8_e4m3fn, torch.int8)
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
HOPPER_S = 60


@dataclass(frozen=True)
class Shape:
    """
    Attributes:
        rows: context and count of each row.
        kept: type of the pages; None = as the activations.
        has_ends: some tokens see later ones.
    """

    rows: tuple[tuple[int, int], ...]
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    page: int = 64
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    has_ends: bool = False
    kept: torch.dtype | None = None
    unit: float = 1.0


PROMPT, MIXED = ((0, 300), (515, 77)), ((0, 131), (333, 1), (64, 64), (190, 259), (7, 3))
LATE = ((40, 131), (333, 1), (190, 259))
ONE_EACH = ((700, 1), (0, 1), (63, 1), (64, 1), (1300, 1))
SHAPES = (
    Shape(PROMPT),
    Shape(MIXED, heads=8, kv_heads=8, head_dim=64, has_sinks=True),
    Shape(MIXED, heads=16, kv_heads=2, page=128, window=100),
    Shape(MIXED, heads=8, kv_heads=4, head_dim=256, page=64, soft_cap=20.0),
    Shape(LATE, heads=12, kv_heads=4, head_dim=80, page=16, window=-40),
    Shape(PROMPT, page=16, has_ends=True),
    Shape(MIXED, kept=torch.float8_e4m3fn, unit=0.37),
    Shape(MIXED, kept=torch.int8),
    Shape(MIXED, heads=16, kv_heads=2, head_dim=64, kept=torch.int8, window=200, page=128),
    Shape(ONE_EACH),
    Shape(ONE_EACH, heads=16, kv_heads=2, head_dim=64, window=100, has_sinks=True),
    Shape(ONE_EACH, heads=4, kv_heads=4, head_dim=256, page=128, soft_cap=20.0),
    Shape(ONE_EACH, kept=torch.float8_e4m3fn, unit=0.37, page=16),
    Shape(ONE_EACH, kept=torch.int8),
)
ON_HOPPER = (
    Shape(PROMPT),
    Shape(MIXED, heads=8, kv_heads=8, has_sinks=True, page=128),
    Shape(MIXED, heads=16, kv_heads=2, window=100),
    Shape(LATE, heads=12, kv_heads=4, window=-40, head_dim=64),
)


def case(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[PagedCall, Tensor]:
    """A call and its row_starts. What no row may see is no number."""
    torch.manual_seed(seed)
    counts = torch.tensor([count for _, count in shape.rows])
    contexts = torch.tensor([context for context, _ in shape.rows], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    rows, columns = len(shape.rows), max(sum(row) for row in shape.rows) // shape.page + 1
    tables = (torch.randperm(rows * columns) + 1).view(rows, columns).int().to(device)
    places = (rows * columns + 1, shape.page, shape.kv_heads, shape.head_dim)
    pages = [torch.randn(places, device=device, dtype=dtype) for _ in range(2)]
    at = torch.arange(columns * shape.page, device=device)
    for row, (context, count) in enumerate(shape.rows):
        first = max(0, context - shape.window + 1) if shape.window > 0 else -shape.window
        dead = at[(at < first) | (at >= context + count)]
        for each in pages:
            each[tables[row, dead // shape.page].long(), dead % shape.page] = float("nan")
    k_pages, v_pages = (to_stored(each, shape.kept or dtype, shape.unit) for each in pages)
    tokens = int(counts.sum())
    q = torch.randn(tokens, 2 * shape.heads, shape.head_dim, device=device, dtype=dtype)[:, ::2]
    scale = shape.head_dim**-0.5 * shape.unit * (1.0 if shape.soft_cap else LOG2_E)
    sinks = torch.linspace(-3, 4, shape.heads, device=device) if shape.has_sinks else None
    ends = None
    if shape.has_ends:
        ends = torch.zeros(tokens, dtype=torch.int32, device=device)
        ends[10:90] = shape.rows[0][0] + 95
    call = PagedCall(
        q, k_pages, v_pages, tables, contexts.to(device), torch.empty_like(q.contiguous()), sinks,
        (scale, shape.soft_cap, shape.unit), shape.window, ends,
    )  # fmt: skip
    return call, starts.to(device)


def error_of(shape: Shape, call: PagedCall, starts: Tensor) -> float:
    """The largest difference from float64; infinite where a result is no number."""
    k_pages, v_pages = (p if shape.kept else p.double() for p in (call.k_pages, call.v_pages))
    want = reference.paged_attention(
        call.q.double(), k_pages, v_pages, call.page_tables, starts, call.context_lengths,
        shape.head_dim**-0.5, shape.window, shape.soft_cap, call.sinks, shape.unit, ends=call.ends,
    )  # fmt: skip
    error = (call.out.double() - want).abs().max().item()
    return error if error == error else float("inf")


def check(dtype: torch.dtype, device: str) -> int:
    """How many shapes differ from float64."""
    failed, worst = 0, 0.0
    for seed, shape in enumerate(SHAPES):
        call, starts = case(shape, dtype, device, seed)
        one_each = len(call.q) == len(shape.rows)
        if one_each:
            triton_attention.attend_one(call)
        else:
            triton_attention.attend_many(call, starts)
        error = error_of(shape, call, starts)
        worst = max(worst, error)
        if error > TOLERANCE[dtype]:
            failed += 1
            print(f"WRONG by {error:g}: {shape}")
    print(f"figure: attention, largest error of {len(SHAPES)} shapes = {worst:.2g}")
    return failed


def seconds_of(work: Callable[[], object], device: str, runs: int = 10) -> float:
    """The median."""
    if device == "cpu":
        work()
        return 1.0
    for _ in range(3):
        work()
    times = []
    for _ in range(runs):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return sorted(times)[len(times) // 2]


def captured(work: Callable[[], object], device: str) -> Callable[[], object]:
    if device == "cpu":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def time_prompt(
    name: str, tokens: int, page: int, tiles: Tiles | None, device: str, kept: torch.dtype | None
) -> None:
    shape = Shape(((0, tokens),), page=page, kept=kept)
    call, starts = case(shape, torch.bfloat16, device)
    work = captured(partial(triton_attention.attend_many, call, starts, tiles), device)
    took = seconds_of(work, device)
    rate = 2.0 * HEADS * HEAD_DIM * tokens * tokens / took / 1e12
    print(f"figure: attention, prompt of {tokens}, {name} = {rate:.0f} TFLOP/s", flush=True)


def time_layers(
    name: str, layers: list[PagedCall], size: int, tiles: Tiles | None, busy: int, device: str
) -> None:
    """Decoding in layers with pages of their own, which no cache keeps. size: bytes of K and V."""

    def work() -> None:
        for call in layers:
            triton_attention.attend_one(call, tiles, busy)

    took = seconds_of(captured(work, device), device)
    print(f"figure: decoding, {name} = {size / took / 1e9:.0f} GB/s", flush=True)


def guarded(work: Callable[..., None], name: str, *rest: object) -> None:
    """A candidate that the device cannot run is reported and left out."""
    try:
        work(name, *rest)
    except Exception as error:  # whatever the compiler says
        print(f"left out: {name}: {str(error)[:200]!r}", flush=True)


def compile_ahead(device: str) -> None:
    """Compile the candidates next to each other: most of the time would go there."""
    asked = [(page, tiles, None) for page, tiles in CANDIDATES.values()]
    asked += [(64, MANY[128], kept) for kept in KEPT]

    def many(page: int, tiles: Tiles, kept: torch.dtype | None) -> None:
        call, starts = case(Shape(((0, 200),), page=page, kept=kept), torch.bfloat16, device)
        triton_attention.attend_many(call, starts, tiles)

    def one(rows: int, tiles: Tiles, kept: torch.dtype | None) -> None:
        call, _ = case(Shape(((600, 1),) * rows, kept=kept), torch.bfloat16, device)
        triton_attention.attend_one(call, tiles)

    ones = [
        (rows, tiles, kept) for rows in (1, 64) for tiles in ONES.values() for kept in (None, *KEPT)
    ]
    with ThreadPoolExecutor(12) as pool:
        jobs = [pool.submit(many, *each) for each in asked]
        jobs += [pool.submit(one, *each) for each in ones]
        for job in jobs:
            if error := job.exception():
                print(f"not compiled: {str(error)[:200]!r}")


def time_prompts(sizes: tuple[int, ...], device: str) -> None:
    for tokens in sizes:
        guarded(time_prompt, "default", tokens, 64, None, device, None)
    middle = sizes[len(sizes) // 2]
    for name, (page, tiles) in CANDIDATES.items():
        guarded(time_prompt, name, middle, page, tiles, device, None)
    for kept in KEPT:
        guarded(time_prompt, f"{kept}", middle, 64, None, device, kept)
    for way, tiles in {"4 warps": Tiles(128, 64, 4, 2), "5 stages": Tiles(128, 64, 8, 5)}.items():
        guarded(time_prompt, f"{KEPT[0]}, {way}", middle, 64, tiles, device, KEPT[0])


def time_decoding(cases: dict[str, tuple[int, int]], device: str) -> None:
    for name, (rows, context) in cases.items():
        for kept in (None, *KEPT):
            shape = Shape(((context - 1, 1),) * rows, kept=kept)
            layers = [case(shape, torch.bfloat16, device, seed)[0] for seed in range(4)]
            pages = layers[0].k_pages
            size = 8 * rows * context * pages.stride(1) * pages.element_size()
            of = f"{name}, {kept or 'bf16'}"
            guarded(time_layers, of, layers, size, None, PROGRAMS, device)
            guarded(time_layers, f"{of}, more programs", layers, size, None, 2 * PROGRAMS, device)
            for way, tiles in ONES.items():
                guarded(time_layers, f"{of}, {way}", layers, size, tiles, PROGRAMS, device)


def copy_rate(device: str) -> None:
    """What the device moves: the bound of decoding."""
    size = 1 << (30 if device == "cuda" else 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = seconds_of(lambda: target.copy_(source), device)
    print(f"figure: copies, read and written = {2 * size / took / 1e9:.0f} GB/s")


def on_hopper(device: str) -> int:
    """Check the kernel of warps apart, then time it."""
    failed = 0
    for seed, shape in enumerate(ON_HOPPER):
        tiles = (
            MANY_APART[128]
            if device == "cpu"
            else next(tiles for page, tiles in HOPPER.values() if page == shape.page)
        )
        for dtype in (torch.bfloat16, torch.float16):
            call, starts = case(shape, dtype, device, seed)
            triton_attention.attend_many(call, starts, tiles)
            error = error_of(shape, call, starts)
            failed += error > TOLERANCE[dtype]
            print(
                f"hopper: error {error:.2g} {'WRONG ' * (error > TOLERANCE[dtype])}{shape}",
                flush=True,
            )
    print(f"figure: hopper, wrong shapes of {2 * len(ON_HOPPER)} = {failed}", flush=True)
    for name, (page, tiles) in HOPPER.items() if device == "cuda" else ():
        guarded(time_prompt, name, 8192, page, tiles, device, None)
    if device == "cuda":
        name, (page, tiles) = next(iter(HOPPER.items()))
        for tokens in (2048, 32768):
            guarded(time_prompt, name, tokens, page, tiles, device, None)
    return failed


def without_triton() -> None:
    """Let the reference attend, to try this script where Triton is missing."""

    def attend(call: PagedCall, starts: Tensor) -> None:
        scale, cap, unit = call.numbers
        call.out.copy_(
            reference.paged_attention(
                call.q, call.k_pages, call.v_pages, call.page_tables, starts, call.context_lengths,
                scale / unit / (1.0 if cap else LOG2_E), call.window, cap, call.sinks, unit,
                ends=call.ends,
            )
        )  # fmt: skip

    triton_attention.attend_many = lambda call, starts, tiles=None: attend(call, starts)
    triton_attention.attend_one = lambda call, tiles=None, busy=0: attend(
        call, torch.arange(len(call.q) + 1, dtype=torch.int32)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    device, parts, failed = options.device, options.parts, 0
    if device == "cpu":
        without_triton()
    if "hopper" in parts and len(parts) > 1:  # what hangs must not hold the rest
        command = [sys.executable, "-m", "benchmarks.cuda_attention", "--device", device]
        try:
            subprocess.run([*command, "--parts", "hopper"], timeout=HOPPER_S)
        except subprocess.TimeoutExpired:
            print(f"figure: hopper, ended after = {HOPPER_S} s")
    elif "hopper" in parts:
        failed += on_hopper(device)
    if "check" in parts:
        failed += check(torch.bfloat16, device)
    if "speed" in parts:
        copy_rate(device)
        if device == "cuda":
            compile_ahead(device)
        time_prompts((64, 128) if options.small else PROMPTS, device)
        time_decoding({"2 rows": (2, 100)} if options.small else DECODING, device)
    print(f"verdict: {'FAILED' if failed else 'all checks passed'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
