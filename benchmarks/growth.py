"""What a longer context costs: time of a decode step and memory of a request behind 1k … 32k
tokens, for a model of states alone, for hybrids, and for one of attention alone.

Weights are random: time depends on shapes only. All lengths of a model run on one engine, in turn,
so that what else the machine does falls on all of them; prompts are beginnings of one another, so
that only the first round computes them. Beside the median of a length's steps stands the one that
one step in twenty is quicker than, which a busy machine changes least; ratios are of these.

    python -m benchmarks.growth [--models mamba2 minimax] [--contexts 1024 32768] [--rounds 5]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from random import Random

import torch

from banyan.bench.batch import run_batch
from banyan.bench.probe import probe
from banyan.layers.build import Build
from banyan.layers.cache_spec import PageGroup, group_caches
from banyan.model_config.from_hf import read_hub_folder
from banyan.model_config.model_config import STATE, ModelConfig
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from benchmarks.lora_cost import engine, quick

WIDTH, LAYERS, VOCAB = 512, 4, 4096
_COMMON: dict[str, object] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1 << 17,
    "tie_word_embeddings": True,
}
_EXPERTS: dict[str, object] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, object]] = {
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "num_heads": 16,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 64,
    },
    "minimax": {
        "architectures": ["MiniMaxForCausalLM"],
        "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
        **_EXPERTS,
    },
    "zamba2": {
        "architectures": ["Zamba2ForCausalLM"],
        "layers_block_type": ["linear_attention"] * (LAYERS - 1) + ["hybrid"],
        "n_mamba_heads": 16,
    },
    "llama": {"architectures": ["LlamaForCausalLM"]},
}


def made(name: str, folder: Path) -> ModelConfig:
    """A folder with the configuration of one of the models."""
    (folder / "config.json").write_text(json.dumps(_COMMON | MODELS[name]))
    return read_hub_folder(str(folder))


def groups_of(model_config: ModelConfig) -> tuple[PageGroup, ...]:
    """What the layers of a model keep."""
    device = torch.device("cpu")
    ops = bind("cpu", device, torch.float32, frozenset(), model_config.head_dim)
    return group_caches(load_model(model_config, Build(ops), "dummy").caches)


def kept(groups: tuple[PageGroup, ...], context: int) -> tuple[int, int]:
    """Bytes of states, and of keys and values, that a request of so many tokens keeps."""
    states = sum(group.page_bytes(1) for group in groups if group.kind == STATE)
    per_token = sum(group.page_bytes(1) for group in groups if group.kind != STATE)
    return states, context * per_token


async def measure(
    folder: Path, contexts: list[int], rounds: int, new: int
) -> dict[int, list[float]]:
    """Seconds of the decode steps behind each number of tokens."""
    most = max(contexts) + new + 1
    words = ["--model-path", str(folder), "--load-format", "dummy", "--log-level", "error"]
    words += ["--skip-tokenizer-init", "--max-total-tokens", str(2 * most)]
    words += ["--max-running-requests", "2"]
    prompt = Random(1).choices(range(VOCAB), k=max(contexts))
    found: dict[int, list[float]] = {context: [] for context in contexts}
    async with engine(words) as link:
        for number in range(rounds + 1):
            for context in contexts:
                name = f"{context} {number}"
                times = await run_batch(link, [prompt[:context]], new, name)
                if number:  # the first round computes the prompts
                    found[context] += times.decode
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096, 16384, 32768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    options = parser.parse_args()
    print(f"{probe()}; {LAYERS} layers of width {WIDTH}, random weights, one request")
    print(
        "| model | context | ms a token, median | quickest | of the shortest | states, KB | "
        "keys and values, KB |\n|---|---|---|---|---|---|---|"
    )
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            groups = groups_of(made(name, Path(folder)))
            times = asyncio.run(
                measure(Path(folder), options.contexts, options.rounds, options.new)
            )
        first = quick(times[options.contexts[0]])
        for context, steps in times.items():
            step = statistics.median(steps)
            least = quick(steps)
            states, per_token = kept(groups, context)
            print(
                f"| {name} | {context:,} | {1000 * step:.2f} | {1000 * least:.2f} | "
                f"{least / first:.2f} | "
                f"{states / 1000:,.0f} | {per_token / 1000:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
