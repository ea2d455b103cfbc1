"""What adapters cost: decode steps of one model without them, with room for them, and with them.

Two engines are alive, one that knows of no adapters and one that has them, and one batch is asked
at a time, in turn, so that what else the machine does falls on both alike. Each round gives one
ratio of the medians of its steps, and the median over the rounds counts; beside it stands that of
the quickest steps of all, which a busy machine changes least. With `--llama` `llama-batched-bench`
of llama.cpp runs the same model without and with one adapter, as GGUF, on as many threads.

    python -m benchmarks.lora_cost [--model demo] [--types BF16 F32] [--rounds 9] [--llama PROGRAM]
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import BanyanError
from banyan.bench.batch import run_batch, wait_ready
from banyan.bench.probe import probe
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.prepare import prepare
from banyan.messages.transport import FrontLink, local_pair
from banyan.model_config.model_config import ModelConfig
from banyan.server.processes import start_engine_thread

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of the adapters' matrices."""
CONTEXT = 128
MOST = 8
"""Adapters of one type that are loaded."""
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Case:
    """One batch: its first `adapters` sequences have one each, of `type`."""

    batch_size: int
    adapters: int = 0
    type: str = "-"

    @property
    def names(self) -> list[str]:
        mine = [f"{self.type}-{i}" for i in range(self.adapters)]
        return mine + [""] * (self.batch_size - self.adapters) if mine else []


def cases_of(types: Sequence[str]) -> list[Case]:
    found = [Case(size) for size in (1, 8)]
    for kind in types:
        found += [Case(1, 1, kind), Case(8, 1, kind), Case(8, 8, kind)]
    return found


def sizes_of(model_config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Projection of a plain decoder -> its inputs and outputs."""
    dim, inner = model_config.hidden_size, model_config.intermediate_size
    width, kv_width = (
        model_config.num_heads * model_config.head_dim,
        model_config.num_kv_heads * model_config.head_dim,
    )
    return {
        "self_attn.q_proj": (dim, width),
        "self_attn.k_proj": (dim, kv_width),
        "self_attn.v_proj": (dim, kv_width),
        "self_attn.o_proj": (width, dim),
        "mlp.gate_proj": (dim, inner),
        "mlp.up_proj": (dim, inner),
        "mlp.down_proj": (inner, dim),
    }


def write_adapter(
    folder: Path, model_config: ModelConfig, rank: int, dtype: torch.dtype, seed: int
) -> Path:
    """A random adapter over all projections, as PEFT saves it."""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(model_config.num_layers):
        for target, (inputs, outputs) in sizes_of(model_config).items():
            stem = f"base_model.model.model.layers.{layer}.{target}"
            down = torch.randn((rank, inputs), generator=draw) / inputs**0.5
            up = torch.randn((outputs, rank), generator=draw) / rank**0.5
            tensors[f"{stem}.lora_A.weight"] = down.to(dtype)
            tensors[f"{stem}.lora_B.weight"] = (0.02 * up).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = [target.rpartition(".")[2] for target in sizes_of(model_config)]
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


def write_gguf(adapter: Path, target: Path, rank: int, dtype: torch.dtype) -> Path:
    """The same adapter as llama.cpp reads it, for the Llama family, whose rows of
    q and k lie in another order there, which costs nothing."""
    import gguf

    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        layer, _, rest = name.removeprefix("base_model.model.model.layers.").partition(".")
        projection, _, which = rest.removesuffix(".weight").rpartition(".")
        short = f"blk.{layer}.{GGUF_NAMES[projection]}.weight.{which.lower()}"
        if dtype == torch.bfloat16:
            bits = tensor.to(dtype).view(torch.uint8).numpy()
            writer.add_tensor(short, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(short, tensor.to(dtype).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@contextlib.asynccontextmanager
async def engine(words: Sequence[str]) -> AsyncIterator[FrontLink]:
    """An engine that is ready, in a thread; stopped at the end of the block."""
    environment = read_environment()
    config, model_config = prepare(parse(list(words), environment), environment)
    front, back = local_pair()
    handle = start_engine_thread(config, model_config, back, lambda text: print(f"engine: {text}"))
    try:
        await asyncio.wait_for(wait_ready(front), 300)
        yield front
    finally:
        await asyncio.to_thread(handle.stop)
        front.close()


@dataclass(frozen=True)
class Pair:
    """Seconds of decode steps of one round, without and with adapters."""

    base: list[float]
    adapted: list[float]


def quick(steps: Sequence[float]) -> float:
    """What one step in twenty is quicker than: tokens of two steps may come at once."""
    return sorted(steps)[len(steps) // 20]


def row_of(engine: str, case: Case, pairs: Sequence[Pair]) -> dict[str, object]:
    """The figures of one case."""
    middle = statistics.median
    ratios = [middle(pair.base) / middle(pair.adapted) for pair in pairs]
    bases = [took for pair in pairs for took in pair.base]
    mine = [took for pair in pairs for took in pair.adapted]
    return {
        "engine": engine,
        "batch_size": case.batch_size,
        "adapters": case.adapters,
        "type": case.type,
        "base_tokens_s": case.batch_size / middle(bases),
        "tokens_s": case.batch_size / middle(mine),
        "ratio": middle(ratios),
        "quickest_ratio": quick(bases) / quick(mine),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


async def measure(
    options: argparse.Namespace, model_config: ModelConfig, adapters: dict[str, Path]
) -> list[dict[str, object]]:
    plain = ["--model-path", options.model, "--log-level", "error", "--max-total-tokens", "8192"]
    paths = [f"{name}={path}" for name, path in adapters.items()]
    adapted = [*plain, "--lora-paths", *paths, "--max-loras-per-batch", str(MOST)]
    cases = cases_of(options.types)
    pairs: dict[Case, list[Pair]] = {case: [] for case in cases}
    async with engine(plain) as base, engine(adapted) as served:
        random = Random(1)

        async def steps(link: FrontLink, case: Case, names: list[str], name: str) -> list[float]:
            ids = range(model_config.vocab_size)
            prompts = [random.choices(ids, k=CONTEXT) for _ in range(case.batch_size)]
            return (await run_batch(link, prompts, options.new, name, adapters=names)).decode

        for number in range(options.rounds + 1):
            for case in cases:
                name = f"{case} {number}"
                if number % 2:
                    first = await steps(base, case, [], name)
                    second = await steps(served, case, case.names, name)
                else:
                    second = await steps(served, case, case.names, name)
                    first = await steps(base, case, [], name)
                if number:  # the first round only warms up
                    pairs[case].append(Pair(first, second))
    return [row_of("banyan", case, found) for case, found in pairs.items()]


def measure_llama(
    options: argparse.Namespace, source: str, adapters: dict[str, Path], folder: Path
) -> list[dict[str, object]]:
    """The same with llama.cpp; it takes one adapter for all rows."""
    threads = str(len(os.sched_getaffinity(0)))
    words = [options.llama, "-m", source, "-t", threads, "-tb", threads, "-c", "4096"]
    words += ["-npp", str(CONTEXT), "-ntg", str(options.new), "--output-format", "jsonl"]

    def seconds(size: int, *more: str) -> list[float]:
        done = subprocess.run([*words, "-npl", str(size), *more], capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            last = done.stderr.strip().splitlines()[-1:]
            raise BanyanError(f"{options.llama} ended with {done.returncode}: {' '.join(last)}")
        return [json.loads(lines[-1])["t_tg"] / options.new]

    found = []
    for kind in options.types:
        file = write_gguf(adapters[f"{kind}-0"], folder / f"{kind}.gguf", options.rank, TYPES[kind])
        for size in (1, 8):
            case, pairs = Case(size, 1, kind), []
            for number in range(options.rounds):
                runs: list[Callable[[], list[float]]] = [
                    lambda size=size: seconds(size),
                    lambda size=size, file=file: seconds(size, "--lora", str(file)),
                ]
                order = (0, 1) if number % 2 else (1, 0)
                took = {which: runs[which]() for which in order}
                pairs.append(Pair(took[0], took[1]))
            found.append(row_of("llama.cpp, one for all rows", case, pairs))
    return found


def line(row: dict[str, object]) -> str:
    return (
        f"| {row['engine']} | {row['batch_size']} | {row['adapters']} | {row['type']} | "
        f"{row['base_tokens_s']:.0f} | {row['tokens_s']:.0f} | {row['ratio']:.2f} | "
        f"{row['lowest']:.2f} … {row['highest']:.2f} | {row['quickest_ratio']:.2f} |"
    )


def _processor() -> str:
    """What the system calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((text.partition(": ")[2] for text in lines if text.startswith("model name")), "?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=["BF16", "F32"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--llama", default="", help="llama-batched-bench of llama.cpp")
    parser.add_argument("--out", default="", help="write the figures to this file as JSON")
    options = parser.parse_args()
    environment = read_environment()
    _, model_config = prepare(parse(["--model-path", options.model], environment), environment)
    print(f"{_processor()}, {probe()}; {options.model}, rank {options.rank}, all projections")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = {
            f"{kind}-{i}": write_adapter(
                folder / f"{kind}-{i}", model_config, options.rank, dtype, i
            )
            for kind, dtype in TYPES.items()
            if kind in options.types
            for i in range(MOST)
        }
        rows = asyncio.run(measure(options, model_config, adapters))
        if options.llama:
            rows += measure_llama(options, model_config.path, adapters, folder)
    print(
        "| engine | rows | adapters | type | base, tokens/s | with them | ratio | of the rounds | "
        "of the quickest steps |\n|---|---|---|---|---|---|---|---|---|"
    )
    print("\n".join(line(row) for row in rows))
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
