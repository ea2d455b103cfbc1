"""Checks a CUDA device end to end, and times it: python -m benchmarks.cuda_check

Kernels against the reference; greedy tokens of a tiny model against transformers, captured against
eager steps, depth 1 against depth 2, with pages that come back and with adapters; then tokens per
second of a model of the shape of Llama 3 8B with random weights, next to plain transformers. Needs
no network. With --device cpu --small it tries the script itself.
"""

import argparse
import copy
import gc
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

import banyan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
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
PAGE, COUNT, WAIT_S = 64, 24, 60.0
COPIED_S = 0.5
"""Pages are copied to the host in the background; this is more than enough."""
ADAPTER_SCALE = 2.0
ROW_ADAPTERS = ["a", None, "b", "a", None, "b", "b", "a", None]
ADAPTERS = {
    "a": (8, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "b": (3, ("v_proj", "gate_proj", "down_proj")),
}
"""Name -> rank and projections."""
ADAPTER_RANK = 16
"""Rank of the adapters that are timed."""
ADAPTER_POOL = {"enable_lora": True, "max_lora_rank": 8}
ADAPTER_WAYS = {
    "captured": {},
    "captured, depth 1": {"disable_overlap_schedule": True},
    "eager": {"disable_cuda_graph": True},
    "drafts verified": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6},
    "weights from the host": {"offload_group_size": 1, "offload_prefetch_step": 0},
}
INPUT, OUTPUT = 128, 128
BITS = {"q4_0": 4.5, "q4_1": 5, "q8_0": 8.5, "int8": 8.5, "fp8": 8}
"""Of a weight with its share of a block's scale."""


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
    parser.add_argument("--bandwidth", type=float, help="bytes per second; default: a copy's")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--quantization", default="", help="of the model that is timed")
    parser.add_argument(
        "--adapters", type=int, default=0, help="in addition to the model that is timed, of rank 16"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    return parser.parse_args()


def tiny_llama() -> "PreTrainedModel":
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(**TINY, initializer_range=0.2, eos_token_id=None, bos_token_id=None)
    return LlamaForCausalLM(config).eval()


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [[(7 * i + j * j) % 512 for j in range(length)] for i, length in enumerate(lengths)]


def greedy(model: "PreTrainedModel", prompt: list[int], count: int) -> list[int]:
    """The tokens with which transformers goes on."""
    ids = torch.tensor([prompt])
    more = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    return model.generate(ids, max_new_tokens=count, **more)[0, len(prompt) :].tolist()


def sampling(count: int) -> dict[str, object]:
    """Parameters of just so many greedy tokens."""
    return {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}


@contextmanager
def started(
    folder: str, device: str, dtype: str = "float32", **flags: object
) -> Iterator[banyan.Engine]:
    """An engine that computes in this type and keeps it in pages."""
    with banyan.Engine(
        folder,
        device=device,
        dtype=dtype,
        kv_cache_dtype="fp32" if dtype == "float32" else "auto",
        skip_tokenizer_init=True,
        **{
            "cpu_activations": "fp32",  # exact ones, on GPUs too
            "engine_mode": "inprocess",
            "max_total_tokens": 32768,
            **flags,
        },
    ) as engine:
        yield engine


def generate(
    folder: str,
    prompts: list[list[int]],
    count: int,
    device: str,
    dtype: str = "float32",
    **flags: object,
) -> tuple[list[list[int]], str]:
    """The answers to all prompts, asked twice, and how they came about."""
    with started(folder, device, dtype, **flags) as engine:
        answers = [
            answer
            for _ in range(2)  # the second time from the cache
            for answer in engine.generate(input_ids=prompts, sampling_params=sampling(count))
        ]
        steps = engine.get_server_info()["facts"]["steps"]
    metas = [answer["meta_info"] for answer in answers]
    cached = sum(meta["cached_tokens"] for meta in metas)
    checks = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    summary = f"{steps}, {cached} tokens cached, {checks} verifications"
    return [answer["output_ids"] for answer in answers], summary


def check_pages(device: str) -> int:
    """How many of the two checks fail."""
    model = tiny_llama()
    prompts = prompts_of([299, 300, 301, 302])  # the tier looks for 256 tokens or more
    wanted = [greedy(model, prompt, COUNT) for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        checks = (_from_the_host, _from_another_server)
        return sum(not check(folder, device, prompts, wanted) for check in checks)


def _from_the_host(
    folder: str, device: str, prompts: list[list[int]], wanted: list[list[int]]
) -> bool:
    """With room for eight pages here, the others take the place of the first prompt's."""
    found, places = [], []
    tier = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,  # room for all of them there
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    with started(folder, device, page_size=PAGE, max_total_tokens=8 * PAGE, **tier) as engine:
        for prompt in (*prompts, *prompts):
            answer = engine.generate(input_ids=prompt, sampling_params=sampling(COUNT))
            found.append(answer["output_ids"])
            places.append(answer["meta_info"].get("cached_tokens_details", {}).get("host", 0))
            time.sleep(COPIED_S)
    same = sum(a == b for a, b in zip(found, 2 * wanted, strict=True))
    on_host = device == "cpu"  # its cache lies there already, and there is no tier
    whole = [0 if on_host else len(prompt) // PAGE * PAGE for prompt in prompts]
    print(f"tokens equal transformers: {same}/8  tokens from the host's tier: {places}")
    return same == 8 and places[4:] == whole


def _from_another_server(
    folder: str, device: str, prompts: list[list[int]], wanted: list[list[int]]
) -> bool:
    """Each server is a process of its own, and the device belongs to both."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    flags = {"engine_mode": "normal", "page_size": PAGE, "max_total_tokens": 4096}
    giving = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port}
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port}
    found = []
    with (
        started(folder, device, **flags, **giving) as prefill,
        started(folder, device, **flags, disaggregation_mode="decode") as decode,
        ThreadPoolExecutor(2) as pool,
    ):
        for room, prompt in enumerate(prompts, 1000):
            asked = {"input_ids": prompt, "sampling_params": sampling(COUNT)}
            sides = [
                pool.submit(side.generate, **asked, **place, bootstrap_room=room)
                for side in (prefill, decode)
            ]
            found.append(sides[1].result(WAIT_S)["output_ids"])
            sides[0].result(WAIT_S)
        computed = [_computed(engine) for engine in (prefill, decode)]
    same = sum(a == b for a, b in zip(found, wanted, strict=True))
    most = sum(len(prompt) % PAGE + PAGE + COUNT for prompt in prompts)
    print(f"tokens equal transformers: {same}/4  prefill and decode computed {computed} tokens")
    return same == 4 and computed[1] <= most


def _computed(engine: banyan.Engine) -> int:
    (state,) = engine.get_server_info()["internal_states"]
    return state["stats"]["computed_tokens"]


def check_adapters(device: str) -> int:
    """In how many ways to run them a row has other tokens."""
    model, failed = tiny_llama(), 0
    prompts = prompts_of([5 + 11 * i for i in range(len(ROW_ADAPTERS))])
    with tempfile.TemporaryDirectory() as folder:
        base, paths = f"{folder}/base", {name: Path(folder) / name for name in ADAPTERS}
        model.save_pretrained(base)
        models = {None: model} | {n: _with_adapter(model, n, path) for n, path in paths.items()}
        wanted = [
            greedy(models[n], prompt, COUNT)
            for n, prompt in zip(ROW_ADAPTERS, prompts, strict=True)
        ]
        changed = sum(
            tokens != greedy(model, prompt, COUNT)
            for tokens, prompt in zip(wanted, prompts, strict=True)
        )
        assert changed == sum(name is not None for name in ROW_ADAPTERS), (
            "adapters must make a difference"
        )
        named = {"lora_paths": [f"{name}={path}" for name, path in paths.items()]}
        for way, flags in ADAPTER_WAYS.items():
            with started(base, device, **named, **flags) as engine:
                failed += _adapters_differ(engine, prompts, wanted, way)
        with started(
            base, device, **ADAPTER_POOL, max_loaded_loras=2, max_loras_per_batch=2
        ) as engine:
            for name in ("b", "a"):  # each in the other's place of the first time
                engine.load_lora_adapter(name, str(paths[name]))
            failed += _adapters_differ(engine, prompts, wanted, "loaded while it runs")
            for name in ("b", "a"):
                engine.unload_lora_adapter(name)
            for name in ("a", "b"):
                engine.load_lora_adapter(name, str(paths[name]))
            failed += _adapters_differ(engine, prompts, wanted, "loaded again, in other places")
    return failed


def _adapters_differ(
    engine: banyan.Engine, prompts: list[list[int]], wanted: list[list[int]], way: str
) -> bool:
    """Asked twice: the second time the prompts are in the cache."""
    found = [
        answer["output_ids"]
        for _ in range(2)
        for answer in engine.generate(
            input_ids=prompts, sampling_params=sampling(COUNT), lora_path=ROW_ADAPTERS
        )
    ]
    same = sum(a == b for a, b in zip(found, 2 * wanted, strict=True))
    steps = engine.get_server_info()["facts"]["steps"]
    print(f"tokens equal merged adapters: {same}/{len(found)}  {way} ({steps})")
    return same < len(found)


@contextmanager
def blank_adapters(shape: dict[str, int], count: int) -> Iterator[dict[str, object]]:
    """Flags of an engine with adapters a0, a1 … of a model of this shape, which add zeros: what
    they cost as much as any others."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    sizes |= {"self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv)}
    sizes |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner)}
    sizes |= {"mlp.down_proj": (inner, hidden)}
    tensors = {}
    for layer in range(shape["num_hidden_layers"] if count else 0):
        for name, (inputs, outputs) in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.zeros(
                ADAPTER_RANK, inputs, dtype=torch.bfloat16
            )
            tensors[f"{stem}.lora_B.weight"] = torch.zeros(
                outputs, ADAPTER_RANK, dtype=torch.bfloat16
            )
    with tempfile.TemporaryDirectory() as root:
        folders = {f"a{number}": Path(root) / f"a{number}" for number in range(count)}
        for folder in folders.values():
            _write_adapter(
                folder, ADAPTER_RANK, [name.rpartition(".")[2] for name in sizes], tensors
            )
        paths = [f"{name}={folder}" for name, folder in folders.items()]
        yield {"lora_paths": paths} if count else {}


def _with_adapter(model: "PreTrainedModel", name: str, folder: Path) -> "PreTrainedModel":
    """Write a random adapter as PEFT does; the model that it is merged into."""
    (rank, targets), merged = ADAPTERS[name], copy.deepcopy(model)
    tensors = {}
    draw = torch.Generator().manual_seed(rank)
    for path, module in merged.named_modules():
        if path.rpartition(".")[2] not in targets:
            continue
        outputs, inputs = module.weight.shape
        down = torch.randn(rank, inputs, generator=draw) * inputs**-0.5
        up = torch.randn(outputs, rank, generator=draw) * rank**-0.5
        module.weight.data += ADAPTER_SCALE * up @ down
        tensors[f"base_model.model.{path}.lora_A.weight"] = down
        tensors[f"base_model.model.{path}.lora_B.weight"] = up
    _write_adapter(folder, rank, targets, tensors)
    return merged


def _write_adapter(
    folder: Path, rank: int, targets: Sequence[str], tensors: dict[str, Tensor]
) -> None:
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": ADAPTER_SCALE * rank}
    facts |= {"target_modules": list(targets), "base_model_name_or_path": "tiny"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


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
            got, summary = generate(folder, prompts, 32, device, **flags)
            same = sum(a == b for a, b in zip(got, 2 * wanted, strict=True))
            failed += same < len(got)
            print(f"tokens equal transformers: {same}/{len(got)}  {name} ({summary})")
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


def copied_bytes_per_second(device: str) -> float:
    """What a copy of 1 GiB moves, read and written."""
    source = torch.zeros(1 << (30 if device == "cuda" else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    wait = torch.cuda.synchronize if device == "cuda" else time.perf_counter
    took = []
    for _ in range(6):
        wait()
        began = time.perf_counter()
        for _ in range(8):
            target.copy_(source)
        wait()
        took.append((time.perf_counter() - began) / 8)
    return 2 * source.nbytes / statistics.median(took)


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
    bits, head_bits = (
        (BITS[quantization], 8 if quantization == "fp8" else 8.5) if quantization else (16, 16)
    )
    weights = (projections * bits + shape["vocab_size"] * width * head_bits) / 8
    read = weights + rows * (INPUT + OUTPUT // 2) * 4 * layers * kv
    bound = read / (options.bandwidth or copied_bytes_per_second(options.device)) / step_s
    print(
        f"{who:<13} {rows:>4} rows: {step_s * 1e3:8.3f} ms a step, {rows / step_s:9.0f} tokens/s, "
        f"{bound:6.1%} of the bandwidth bound"
    )
    kind = quantization or "bf16"
    print(f"figure: {who}, 8B shape, {kind}, {rows} rows, a step = {step_s * 1e3:.3f} ms")
    print(f"figure: {who}, 8B shape, {kind}, {rows} rows, of the bytes' bound = {bound:.3f}")


if __name__ == "__main__":
    raise SystemExit(main())
