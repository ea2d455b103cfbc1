"""Measures graphs and the kernels of states on a CUDA device:
python -m benchmarks.cuda_graphs [--parts NAME …]

Kernels of states and of an indexer against the reference in float64, then their speed; decode steps
of a few layers of the shape of Qwen3-Next, captured and op by op; prompts of the shape of Llama 3
8B, as graphs and op by op; and how long the device is idle between two decode steps. Random
weights, no network. With --device cpu --small it tries the script itself.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

import banyan
from banyan.ops import reference
from banyan.ops.state_api import StateRows
from banyan.runner.captured_forward import CapturedForward
from banyan.runner.forward import EagerForward
from benchmarks.cuda_check import (
    LARGE,
    TINY,
    generate,
    greedy,
    prompts_of,
    random_engine,
    sampling,
    started,
    step_seconds,
    tiny_llama,
)

PARTS = ("tokens", "states", "indexer", "memory", "hybrid", "prompts")
HEADS, KEY_HEADS, WIDTH, TAPS = 32, 16, 128, 4
"""Of a linear attention layer of Qwen3-Next."""
HYBRID = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": WIDTH,
    "linear_value_head_dim": WIDTH,
    "linear_conv_kernel_dim": TAPS,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}
SMALL_HYBRID = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
INDEX_HEADS, INDEX_WIDTH, INDEX_TOP, PAGE = 64, 64, 2048, 64
"""Of DeepSeek-V3.2; the width of either part of a head."""
PROMPTS = (64, 256, 1024)
REPEATS = 9
NEAR = 4
"""Events of the device around the copy that begins a decode step."""

Found = TypeVar("Found")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--layers", type=int, default=32, help="of the shape of Llama 3 8B")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    if "tokens" in options.parts:
        _tokens(options.device)
    if "states" in options.parts:
        _states(options)
    if "indexer" in options.parts:
        _indexer(options)
    if "memory" in options.parts:
        _memory(options.device)
    if "hybrid" in options.parts:
        _hybrid(options)
    if "prompts" in options.parts:
        _prompts(options)
    print("verdict: all checks passed")
    return 0


def figure(name: str, number: float, unit: str) -> None:
    print(f"figure: {name} = {number:.4g} {unit}", flush=True)


def median_us(work: Callable[[], object], device: str) -> float:
    """Microseconds of a call on the device, the median of many."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began) * 1e6
    from triton.testing import do_bench

    return do_bench(work, warmup=10, rep=60, return_mode="median") * 1e3


def kernel(op: str, device: str) -> Callable[..., Tensor]:
    if device == "cpu":
        return getattr(reference, op)
    from banyan.ops.cuda import triton_latent, triton_state

    return getattr(triton_latent if op == "choose_positions" else triton_state, op).run


def rows_of(counts: Sequence[int], contexts: Sequence[int], device: str) -> StateRows:
    """Row r has page r + 1."""
    pages = torch.arange(1, len(counts) + 1, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    return StateRows(pages, starts, torch.tensor(contexts, dtype=torch.int32, device=device))


def scan_inputs(tokens: int, heads: int, device: str) -> list[Tensor]:
    """q, k, v, kept, strength of a gated delta rule."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    draw = partial(torch.randn, device=device)
    q, k = (draw(tokens, heads // 2, WIDTH).div(WIDTH**0.5).to(dtype) for _ in range(2))
    kept = (draw(tokens, heads) + 3).sigmoid()
    return [q, k, draw(tokens, heads, WIDTH).to(dtype), kept, draw(tokens, heads).to(dtype)]


def _same_as_exact(op: str, run: Callable[..., Tensor], given: Sequence[Tensor], shape: tuple,
                   rows: StateRows, device: str, more: tuple = ()) -> None:  # fmt: skip
    """Outputs and states are near the ones of the reference in float64."""
    kept = torch.randn(len(rows.pages) + 1, *shape, device=device)
    exact = kept.double()
    got = run(*given, *more, kept, rows)
    want = getattr(reference, op)(*(x.double() for x in given), *more, exact, rows)
    for mine, theirs in ((got.double(), want), (kept.double(), exact)):
        worst = float((mine - theirs).abs().max() / theirs.abs().max())
        assert worst < 2e-2, f"{op}: {worst:.2g} of the largest number from the exact result"
        print(f"{op}: {worst:.2g} of the largest number from the exact result")


def _states(options: argparse.Namespace) -> None:
    device, small = options.device, options.small
    scan, conv = kernel("scan", device), kernel("short_conv", device)
    mixed = rows_of([3, 1, 40, 1], [7, 0, 0, 9], device)
    heads = 4
    more = (None, True)
    given = scan_inputs(45, heads, device)
    _same_as_exact("scan", scan, given, (heads, WIDTH, WIDTH), mixed, device, more)
    channels = 300
    given = [torch.randn(45, channels, device=device), torch.randn(TAPS, channels, device=device)]
    more = (None, True)
    _same_as_exact("short_conv", conv, given, (TAPS - 1, channels), mixed, device, more)
    steps = [(1, 1), (64, 1), (1, 64 if small else 2048)]
    heads = 4 if small else HEADS
    state = heads * WIDTH * WIDTH * 4
    for rows, count in steps:
        given = scan_inputs(rows * count, heads, device)
        kept = torch.zeros(rows + 1, heads, WIDTH, WIDTH, device=device)
        where = rows_of([count] * rows, [5] * rows, device)
        name = f"delta rule, {rows} rows of {count} tokens"
        for label in _tilings(device):
            took = median_us(lambda: scan(*given, None, True, kept, where), device)  # noqa: B023
            figure(f"{name}{label}", took, "us")
            if count == 1:
                figure(f"{name}{label}, states", 2 * rows * state / took / 1e3, "GB/s")
        channels = heads * WIDTH * 2
        dtype = given[0].dtype
        x = torch.randn(rows * count, channels, device=device).to(dtype)
        weight = torch.randn(TAPS, channels, device=device)
        inputs = torch.zeros(rows + 1, TAPS - 1, channels, device=device)
        took = median_us(lambda: conv(x, weight, None, True, inputs, where), device)  # noqa: B023
        figure(f"convolution, {rows} rows of {count} tokens", took, "us")


def _tilings(device: str) -> Iterator[str]:
    """Sizes of a program's part of a state; the default first and last."""
    yield ""
    if device == "cpu":
        return
    from banyan.ops.cuda import triton_state

    usual = (triton_state._STATE, triton_state._MOST_VALUES, triton_state._WARPS)
    for values, warps in ((4, 1), (16, 1), (16, 2), (32, 4)):
        triton_state._STATE, triton_state._MOST_VALUES = values * WIDTH, values
        triton_state._WARPS = warps
        yield f", {values} values, {warps} warps"
    triton_state._STATE, triton_state._MOST_VALUES, triton_state._WARPS = usual


def _indexer(options: argparse.Namespace) -> None:
    device, small = options.device, options.small
    choose = kernel("choose_positions", device)
    given = _index_inputs([3, 1, 1], [90, 140, 20], 8, device, is_coarse=True)
    got = choose(*given, 32)
    exact = [part.double() if part.is_floating_point() else part for part in given]
    assert torch.equal(got, reference.choose_positions(*exact, 32)), "other positions are chosen"
    print("choose_positions: the positions of the reference")
    for counts, contexts in (([1], [32000]), ([1] * 32, [8000] * 32), ([512], [7000])):
        if small:
            counts, contexts = (
                [min(counts[0], 16)] * min(2, len(counts)),
                [200] * min(2, len(counts)),
            )
        given = _index_inputs(counts, contexts, INDEX_HEADS, device)
        took = median_us(lambda: choose(*given, 32 if small else INDEX_TOP), device)  # noqa: B023
        rows = f"{len(counts)} rows of {counts[0]} tokens after {contexts[0]}"
        figure(f"choice of an indexer, {rows}", took, "us")


def _index_inputs(
    counts: Sequence[int],
    contexts: Sequence[int],
    heads: int,
    device: str,
    is_coarse: bool = False,
) -> list[Tensor]:
    """Arguments of choose_positions; coarse ones have exact scores, many of them equal."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tokens, rows = sum(counts), len(counts)
    columns = -(-max(a + b for a, b in zip(counts, contexts, strict=True)) // PAGE)

    def draw(*shape: int) -> Tensor:
        made = torch.randn(shape, device=device).to(dtype)
        return made.round() if is_coarse else made

    queries = [draw(tokens, heads, INDEX_WIDTH) for _ in range(2)]
    pages = [draw(rows * columns + 1, PAGE, INDEX_WIDTH) for _ in range(2)]
    table = torch.arange(1, rows * columns + 1, dtype=torch.int32, device=device)
    where = rows_of(counts, contexts, device)
    lengths = (where.row_starts, where.context_lengths)
    return [*queries, draw(tokens, heads), *pages, table.view(rows, columns), *lengths]


def _tokens(device: str) -> None:
    """Greedy tokens of tiny float32 models are the ones of transformers, however steps run."""
    import transformers

    torch.manual_seed(7)
    shape = {**HYBRID, **SMALL_HYBRID, "eos_token_id": None, "bos_token_id": None}
    config = transformers.Qwen3NextConfig(**shape, initializer_range=0.2)
    hybrid = transformers.Qwen3NextForCausalLM(config).eval()
    prompts = prompts_of([5 + 11 * i for i in range(5)])
    few: dict[str, object] = {"cuda_graph_bs": [1, 8]}  # each takes a while to capture
    graphs = {"enable_piecewise_cuda_graph": True, "piecewise_cuda_graph_tokens": [16, 64, 256]}
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}
    ways: dict[str, dict[str, object]] = {
        "prompts in graphs": {**few, **graphs},
        "drafts": {**few, **drafts},
        "draft trees": {**few, **drafts, "speculative_ngram_min_bfs_breadth": 2},
    }
    for model in (tiny_llama(), hybrid):
        name = type(model).__name__
        wanted = [greedy(model, prompt, 24) for prompt in prompts]
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            for way, flags in ways.items():
                if way == ("draft trees" if model is hybrid else "drafts"):
                    continue  # a state cannot branch, and chains are another part's
                got, summary = generate(folder, prompts, 24, device, **flags)
                same = sum(a == b for a, b in zip(got, 2 * wanted, strict=True))
                print(f"{name}: {same}/{len(got)} as transformers, {way} ({summary})", flush=True)
                assert same == len(got), f"{name}, {way}: other tokens than transformers"


def _memory(device: str) -> None:
    """Answers are the same after weights, pages and graphs were released."""
    flags = {"enable_memory_saver": True, "max_total_tokens": 4096, "cuda_graph_bs": [1, 4]}
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama().save_pretrained(folder)
        with started(folder, device, enable_weights_cpu_backup=device != "cpu", **flags) as engine:
            asked = {"input_ids": prompts_of([9, 70]), "sampling_params": sampling(24)}
            first = [answer["output_ids"] for answer in engine.generate(**asked)]
            for tags in (["weights"], ["kv_cache"], ["cuda_graph"], None):
                before = 0 if device == "cpu" else torch.cuda.memory_reserved()
                engine.release_memory_occupation(tags)
                if device != "cpu":
                    freed = (before - torch.cuda.memory_reserved()) / 1024
                    figure(f"released, {', '.join(tags or ['all'])}", freed, "KiB")
                    assert freed > 0 or tags in (["weights"], ["cuda_graph"]), f"{tags}: kept"
                engine.resume_memory_occupation(tags)
                assert engine.flush_cache()
                again = [answer["output_ids"] for answer in engine.generate(**asked)]
                assert again == first, f"{tags}: other answers after they came back"
    print("memory: the same answers after each release")


def _hybrid(options: argparse.Namespace) -> None:
    device, small = options.device, options.small
    shape = {**HYBRID, **(SMALL_HYBRID if small else {})}
    facts = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    facts |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e7, **shape}
    facts["torch_dtype"] = "float32" if device == "cpu" else "bfloat16"
    rows = [1, 32]
    with random_engine(facts, device, rows, cuda_graph_bs=rows) as engine:
        print(engine.get_server_info()["facts"]["steps"])
        for count in rows:
            name = f"step of {shape['num_hidden_layers']} layers of Qwen3-Next, {count} rows"
            figure(name, step_seconds(engine, count, shape["vocab_size"]) * 1e3, "ms")
            if device == "cpu":
                continue
            forward = found(CapturedForward)
            shapes, forward._shapes = forward._shapes, ()
            took = step_seconds(engine, count, shape["vocab_size"]) * 1e3
            figure(f"{name}, op by op", took, "ms")
            forward._shapes = shapes


def found(kind: type[Found]) -> Found:
    """The object of a class that the engine of this process has."""
    return next(each for each in gc.get_objects() if type(each) is kind)


def _prompts(options: argparse.Namespace) -> None:
    device, small = options.device, options.small
    shape = {**(TINY if small else LARGE)}
    shape["num_hidden_layers"] = 2 if small else options.layers
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape}
    facts |= {"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0}
    facts["torch_dtype"] = "float32" if device == "cpu" else "bfloat16"
    flags: dict[str, object] = {"cuda_graph_bs": [1, 64], "enable_piecewise_cuda_graph": True}
    flags["piecewise_cuda_graph_tokens"] = list(PROMPTS)
    with random_engine(facts, device, [1, 64], **flags) as engine:
        print(engine.get_server_info()["facts"]["steps"])
        vocab = shape["vocab_size"]
        for tokens in PROMPTS[: 1 if small else None]:
            took = _prompt_ms(engine, tokens, vocab)
            figure(f"prompt of {tokens} tokens", took, "ms")
            if device != "cpu":
                with _op_by_op():
                    took = _prompt_ms(engine, tokens, vocab)
                figure(f"prompt of {tokens} tokens, op by op", took, "ms")
        for rows in (1, 64):
            if device == "cpu":
                engine.generate(input_ids=_asked(rows, 8, vocab), sampling_params=sampling(4))
            else:
                _gaps(engine, rows, vocab)


@contextmanager
def _op_by_op() -> Iterator[None]:
    """Prompts are launched op by op inside."""
    forward = found(EagerForward)
    prompts, forward.prompts = forward.prompts, None
    try:
        yield
    finally:
        forward.prompts = prompts


def _asked(rows: int, tokens: int, vocab: int) -> list[list[int]]:
    return [[(131 * row + 17 * at) % vocab for at in range(tokens)] for row in range(rows)]


def _prompt_ms(engine: banyan.Engine, tokens: int, vocab: int) -> float:
    """From the call to the first token, the median of a few."""
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        engine.generate(input_ids=_asked(1, tokens, vocab)[0], sampling_params=sampling(1))
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


def _gaps(engine: banyan.Engine, rows: int, vocab: int) -> None:
    """How long the device is idle between two decode steps: around the copy that begins one."""
    asked = {"input_ids": _asked(rows, 32, vocab), "sampling_params": sampling(40)}
    engine.generate(**asked)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.generate(**asked)
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or []
        if event.device_type.name == "CUDA"
    )
    holes, busy_until = [], events[0][0]
    for start, end, _ in events:
        holes.append(max(0.0, start - busy_until))
        busy_until = max(busy_until, end)
    begins = [at for at, (_, _, name) in enumerate(events) if "HtoD" in name]
    steps = begins[len(begins) // 4 : -4]  # the prompts are over, and no row has ended
    gaps = [sum(holes[at - NEAR : at + NEAR + 1]) for at in steps]
    assert len(gaps) > 8, f"{len(events)} events of the device, {len(begins)} steps"
    figure(f"gap between decode steps, {rows} rows, p50", statistics.median(gaps), "us")
    figure(
        f"gap between decode steps, {rows} rows, p90", statistics.quantiles(gaps, n=10)[-1], "us"
    )
    spans = [events[b][0] - events[a][0] for a, b in zip(steps, steps[1:], strict=False)]
    figure(f"decode step, {rows} rows", statistics.median(spans) / 1e3, "ms")


if __name__ == "__main__":
    raise SystemExit(main())
