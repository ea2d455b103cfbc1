"""Checks a CUDA device end to end, and times it: python -m benchmarks.cuda_check

Kernels against the reference; greedy tokens of a tiny model against transformers, captured against
eager steps, depth 1 against depth 2, with pages that come back and with adapters; then tokens per
second of a model of the shape of Llama 3 8B with random weights, beside plain transformers. Needs
no network. With --device cpu --small it tries the script itself.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import banyan
from benchmarks.cuda_adapters import blank_adapters, check_adapters
from benchmarks.cuda_pages import check_pages
from benchmarks.cuda_tokens import TINY, generate, greedy, prompts_of, sampling, tiny_llama

LARGE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
KERNELS = ("kernels", "adapters", "experts", "latent", "products")
PARTS = ("kernels", "tokens", "pages", "adapters", "speed")
INPUT, OUTPUT = 128, 128
BITS = {"q4_0": 4.5, "q4_1": 5, "q8_0": 8.5, "int8": 8.5}
"""Of a weight with its share of a block's scale."""
READ_BYTES_PER_S = 4.3e12
"""What a copy on an H200 has moved; --bandwidth gives another."""


def main() -> int:
    options = _options()
    parts, failed = options.parts, 0
    if "kernels" in parts and options.device == "cuda":
        kernels = [f"tests/ops/test_cuda_{name}.py" for name in KERNELS]
        failed += subprocess.run([sys.executable, "-m", "pytest", "-q", *kernels]).returncode
    if "tokens" in parts:
        failed += _same_tokens(options.device)
    if "pages" in parts:
        failed += check_pages(options.device)
    if "adapters" in parts:
        failed += check_adapters(options.device)
    if "speed" in parts:
        _speed(_shape(options), options)
    print(f"verdict: {'FAILED' if failed else 'all checks passed'}")
    return failed


def _shape(options: argparse.Namespace) -> dict[str, int]:
    return {**(TINY if options.small else LARGE), "num_hidden_layers": options.layers}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--bandwidth", type=float, default=READ_BYTES_PER_S)
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--quantization", default="", help="of the model that is timed")
    parser.add_argument(
        "--adapters", type=int, default=0, help="beside the model that is timed, of rank 16"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    return parser.parse_args()


def _same_tokens(device: str) -> int:
    """Greedy tokens of a tiny float32 model, in every way to run it; how many ways differ."""
    model = tiny_llama()
    prompts = prompts_of([5 + 11 * i for i in range(9)])
    wanted = [greedy(model, prompt, 32) for prompt in prompts]
    failed = 0
    ways = {
        "captured, depth 2": {},
        "captured, depth 1": {"disable_overlap_schedule": True},
        "eager, depth 2": {"disable_cuda_graph": True},
        "eager, depth 1, torch attention": {
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "attention_backend": "torch_native",
        },
        "drafts verified": {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": 6,
        },
        "pages that went to the host and came back": {
            "enable_hierarchical_cache": True,
            "max_total_tokens": 512,
        },
        "weights from the host, captured": {"offload_group_size": 1, "offload_prefetch_step": 0},
        "weights from the host, eager": {
            "cpu_offload_gb": 0.0001,
            "disable_cuda_graph": True,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for name, flags in ways.items():
            got, told = generate(folder, prompts, 32, device, **flags)
            same = sum(a == b for a, b in zip(got, 2 * wanted, strict=True))
            failed += same < len(got)
            print(f"tokens equal transformers: {same}/{len(got)}  {name} ({told})")
    return failed


def _speed(shape: dict[str, int], options: argparse.Namespace) -> None:
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": dtype}
    facts |= {"rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0}
    flags = {"quantization": options.quantization} if options.quantization else {}
    with (
        blank_adapters(shape, options.adapters) as named,
        random_engine({**facts, **shape}, options.device, options.rows, **flags, **named) as engine,
    ):
        info = engine.get_server_info()["facts"]
        print(info["kernels"])
        for rows in options.rows:
            took = step_seconds(engine, rows, shape["vocab_size"])
            _report("banyan", rows, took, shape, options.quantization, options)
            if options.adapters:
                asked = [f"a{row % options.adapters}" for row in range(rows)]
                took = step_seconds(engine, rows, shape["vocab_size"], asked)
                _report("with adapters", rows, took, shape, options.quantization, options)
    if options.without_transformers:
        return
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    _transformers(shape, options, dtype)


@contextmanager
def random_engine(
    facts: dict[str, object], device: str, rows: list[int], **flags: object
) -> Iterator[banyan.Engine]:
    """An engine with random weights, for so many requests at once; facts: its config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(facts))
        began = time.perf_counter()
        with banyan.Engine(
            folder,
            engine_mode="inprocess",
            load_format="dummy",
            device=device,
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            max_total_tokens=max(rows) * (INPUT + OUTPUT + 64),
            max_running_requests=max(rows),
            **flags,
        ) as engine:
            phases = engine.get_server_info()["facts"]["phases"]
            print(f"start-up {time.perf_counter() - began:.1f} s, {json.dumps(phases)}")
            yield engine


def step_seconds(
    engine: banyan.Engine, rows: int, vocab: int, adapters: list[str] | None = None
) -> float:
    """Seconds of one decode step: the difference of a long and a short answer.

    Args:
        adapters: of each row; None = they have none.
    """
    took = []
    for count in (8, 8, OUTPUT):
        began = time.perf_counter()
        asked = {"input_ids": _prompts(rows, vocab), "lora_path": adapters}
        engine.generate(sampling_params=sampling(count), **asked)
        took.append(time.perf_counter() - began)
    return (took[2] - took[1]) / (OUTPUT - 8)


def _prompts(rows: int, vocab: int) -> list[list[int]]:
    return [[(131 * row + 17 * at) % vocab for at in range(INPUT)] for row in range(rows)]


def _transformers(shape: dict[str, int], options: argparse.Namespace, dtype: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device(options.device):
        config = LlamaConfig(**shape, eos_token_id=None, bos_token_id=None)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    for rows in options.rows:
        ids = torch.tensor(_prompts(rows, shape["vocab_size"]), device=options.device)
        took = []
        for count in (8, 8, 40):
            began = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
            )
            took.append(time.perf_counter() - began)
        _report("transformers", rows, (took[2] - took[1]) / 32, shape, "", options)


def _report(
    who: str,
    rows: int,
    step_s: float,
    shape: dict[str, int],
    quantization: str,
    options: argparse.Namespace,
) -> None:
    layers, width = shape["num_hidden_layers"], shape["hidden_size"]
    kv = shape["num_key_value_heads"] * (width // shape["num_attention_heads"])
    projections = layers * width * (2 * width + 2 * kv + 3 * shape["intermediate_size"])
    bits, head_bits = (BITS[quantization], BITS["q8_0"]) if quantization else (16, 16)
    weights = (projections * bits + shape["vocab_size"] * width * head_bits) / 8
    read = weights + rows * (INPUT + OUTPUT // 2) * 4 * layers * kv
    bound = read / options.bandwidth / step_s
    print(
        f"{who:<13} {rows:>4} rows: {step_s * 1e3:8.3f} ms a step, {rows / step_s:9.0f} tokens/s, "
        f"{bound:6.1%} of the bandwidth bound"
    )


if __name__ == "__main__":
    raise SystemExit(main())
