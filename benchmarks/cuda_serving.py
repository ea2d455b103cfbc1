"""Prompts and a server under load on a CUDA device: python -m benchmarks.cuda_serving

Prompts of 2,048 and 8,192 tokens in the shape of Llama 3 8B with random weights, against the rate
of the vendor's bf16 product of the same run; then 256 requests of 512 tokens in and 128 out
over HTTP. Needs no network. With --device cpu --small it tries the script itself.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import banyan
from benchmarks.cuda_check import LARGE, TINY, sampling
from benchmarks.front import free_port

FACTS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "max_position_embeddings": 16384,
}
REPEATS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--parts", nargs="+", default=["prompts", "serving"])
    parser.add_argument("--quantization", default="")
    options = parser.parse_args()
    shape = {**(TINY if options.small else LARGE), **FACTS}
    shape["torch_dtype"] = "float32" if options.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        if "prompts" in options.parts:
            time_prompts(folder, shape, options)
        if "serving" in options.parts:
            serve(folder, shape, options)
    return 0


def time_prompts(folder: str, shape: dict[str, object], options: argparse.Namespace) -> None:
    lengths = (64, 256) if options.small else (2048, 8192)
    rate = matrix_rate(options.device, 512 if options.small else 8192)
    kind = options.quantization or "bf16"
    print(f"figure: bf16 product of 8192 cubed = {rate / 1e12:.0f} TFLOP/s")
    flags = {"quantization": options.quantization} if options.quantization else {}
    with banyan.Engine(
        folder,
        engine_mode="inprocess",
        load_format="dummy",
        device=options.device,
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        max_total_tokens=20480,
        max_running_requests=8,
        cuda_graph_bs=[1],
        chunked_prefill_size=lengths[-1],
        **flags,
    ) as engine:
        for length in lengths:
            took = []
            for turn in range(REPEATS + 1):
                ids = [(17 * at + turn) % int(str(shape["vocab_size"])) for at in range(length)]
                began = time.perf_counter()
                engine.generate(input_ids=[ids], sampling_params=sampling(1))
                took.append(time.perf_counter() - began)
            best = sorted(took[1:])[REPEATS // 2]
            share = operations(shape, length) / best / rate
            print(f"figure: prompt of {length} tokens, 8B shape, {kind} = {best * 1e3:.1f} ms")
            print(f"figure: prompt of {length} tokens, {kind}, of the product's rate = {share:.3f}")


def operations(shape: dict[str, object], length: int) -> float:
    """Floating-point operations of a prompt: projections, and attention with its causal half."""
    sizes = {name: value for name, value in shape.items() if isinstance(value, int)}
    width, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    kv = sizes["num_key_value_heads"] * width // sizes["num_attention_heads"]
    weights = layers * width * (2 * width + 2 * kv + 3 * sizes["intermediate_size"])
    return 2.0 * weights * length + 2.0 * layers * length * length * width


def matrix_rate(device: str, size: int) -> float:
    """Operations per second of one product of random numbers."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    for _ in range(3):
        left @ right
    wait = torch.cuda.synchronize if device == "cuda" else time.perf_counter
    wait()
    began = time.perf_counter()
    for _ in range(10):
        left @ right
    wait()
    return 20.0 * size**3 / (time.perf_counter() - began)


def serve(folder: str, shape: dict[str, object], options: argparse.Namespace) -> None:
    port, count = free_port(), 4 if options.small else 256
    command = [sys.executable, "-m", "banyan", "serve", "--model-path", folder]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--device", options.device]
    command += ["--port", str(port), "--log-level", "warning"]
    if options.quantization:
        command += ["--quantization", options.quantization]
    result = Path(folder) / "result.jsonl"
    bench = [
        sys.executable,
        "-m",
        "banyan",
        "bench",
        "serving",
        "--backend",
        "sglang",
        "--port",
        str(port),
    ]
    bench += ["--dataset-name", "random-ids", "--vocab-size", str(shape["vocab_size"])]
    bench += ["--random-input-len", "512", "--random-output-len", "128"]
    bench += ["--random-range-ratio", "1", "--num-prompts", str(count)]
    bench += ["--ready-check-timeout-sec", "90", "--output-file", str(result)]
    server = subprocess.Popen(command)
    try:
        for _ in range(1 if options.small else 2):  # the first warms the prompts' kernels
            result.unlink(missing_ok=True)
            subprocess.run(bench, check=True, stdout=subprocess.DEVNULL)
    finally:
        server.terminate()
        server.wait()
    keys = json.loads(result.read_text().splitlines()[-1])
    kind = options.quantization or "bf16"
    for name, key, unit in (
        ("tokens", "total_throughput", "tokens/s"),
        ("output tokens", "output_throughput", "tokens/s"),
        ("first token, median", "median_ttft_ms", "ms"),
        ("between tokens, median", "median_itl_ms", "ms"),
    ):
        print(f"figure: HTTP, {count} at once, {kind}, {name} = {keys[key]:.1f} {unit}")


if __name__ == "__main__":
    raise SystemExit(main())
