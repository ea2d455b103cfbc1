"""How a CPU step grows with cores: make bench-cores, or python -m benchmarks.cores [--small]

One static batch of the shape of a Llama of 1.2B parameters in 4 bits (random weights), with 1, 2,
4 … threads. The efficiency of n threads is their rate over n times the rate of one thread.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FACTS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
RATES = {"prompts": "prefill_throughput", "decode": "median_decode_throughput"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--quantization", default="q4_0")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    facts = {**FACTS, "num_hidden_layers": 2} if options.small else FACTS
    first: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(facts))
        for threads in (1 << n for n in range(cores.bit_length())):
            for found in measure(folder, threads, options):
                rows = int(found["batch_size"])
                for name, key in RATES.items():
                    rate = found[key]
                    one = first.setdefault((name, rows), rate)
                    label = f"{name}, {rows} rows, {threads} threads"
                    print(f"figure: {label} = {rate:.0f} tokens/s")
                    print(f"figure: {label}, efficiency = {rate / one / threads:.2f}", flush=True)
    return 0


def measure(folder: str, threads: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """The results of one batch size after another."""
    result = Path(folder) / f"{threads}.jsonl"
    command = [sys.executable, "-m", "banyan", "bench", "batch", "--model-path", folder]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--device", "cpu"]
    command += ["--quantization", options.quantization, "--threads", str(threads)]
    command += ["--input-len", "256", "--output-len", "24", "--result-filename", str(result)]
    command += ["--batch-size", *map(str, options.batch_size)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in result.read_text().splitlines()]


if __name__ == "__main__":
    raise SystemExit(main())
