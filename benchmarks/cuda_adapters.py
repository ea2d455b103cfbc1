"""Checks that adapters are served on a CUDA device: rows of two adapters and of none in one batch,
against transformers with each adapter merged into the weights. A part of `benchmarks.cuda_check`.
"""

import copy
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

import banyan
from benchmarks.cuda_tokens import greedy, prompts_of, sampling, started, tiny_llama

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COUNT, SCALE = 24, 2.0
NAMES = ["a", None, "b", "a", None, "b", "b", "a", None]
ADAPTERS = {
    "a": (8, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    "b": (3, ("v_proj", "gate_proj", "down_proj")),
}
"""Name -> rank and projections."""
RANK = 16
"""Of the adapters that are timed."""
ROOM = {"enable_lora": True, "max_lora_rank": 8}
WAYS = {
    "captured": {},
    "captured, depth 1": {"disable_overlap_schedule": True},
    "eager": {"disable_cuda_graph": True},
    "drafts verified": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6},
    "weights from the host": {"offload_group_size": 1, "offload_prefetch_step": 0},
}


def check_adapters(device: str) -> int:
    """In how many ways to run them a row has other tokens."""
    model, failed = tiny_llama(), 0
    prompts = prompts_of([5 + 11 * i for i in range(len(NAMES))])
    with tempfile.TemporaryDirectory() as folder:
        base, paths = f"{folder}/base", {name: Path(folder) / name for name in ADAPTERS}
        model.save_pretrained(base)
        models = {None: model} | {n: _with_adapter(model, n, path) for n, path in paths.items()}
        wanted = [
            greedy(models[n], prompt, COUNT) for n, prompt in zip(NAMES, prompts, strict=True)
        ]
        changed = sum(
            tokens != greedy(model, prompt, COUNT)
            for tokens, prompt in zip(wanted, prompts, strict=True)
        )
        assert changed == sum(name is not None for name in NAMES), "adapters must tell"
        named = {"lora_paths": [f"{name}={path}" for name, path in paths.items()]}
        for way, flags in WAYS.items():
            with started(base, device, **named, **flags) as engine:
                failed += _differs(engine, prompts, wanted, way)
        with started(base, device, **ROOM, max_loaded_loras=2, max_loras_per_batch=2) as engine:
            for name in ("b", "a"):  # each in the other's place of the first time
                engine.load_lora_adapter(name, str(paths[name]))
            failed += _differs(engine, prompts, wanted, "loaded while it runs")
            for name in ("b", "a"):
                engine.unload_lora_adapter(name)
            for name in ("a", "b"):
                engine.load_lora_adapter(name, str(paths[name]))
            failed += _differs(engine, prompts, wanted, "loaded again, in other places")
    return failed


def _differs(
    engine: banyan.Engine, prompts: list[list[int]], wanted: list[list[int]], way: str
) -> bool:
    """Asked twice: the second time the prompts are in the cache."""
    found = [
        answer["output_ids"]
        for _ in range(2)
        for answer in engine.generate(
            input_ids=prompts, sampling_params=sampling(COUNT), lora_path=NAMES
        )
    ]
    same = sum(a == b for a, b in zip(found, 2 * wanted, strict=True))
    steps = engine.get_server_info()["facts"]["steps"]
    print(f"tokens equal merged adapters: {same}/{len(found)}  {way} ({steps})")
    return same < len(found)


@contextmanager
def blank_adapters(shape: dict[str, int], count: int) -> Iterator[dict[str, object]]:
    """Flags of an engine with adapters a0, a1 … of a model of this shape, which add zeros: what
    they cost is that of any others."""
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
            tensors[f"{stem}.lora_A.weight"] = torch.zeros(RANK, inputs, dtype=torch.bfloat16)
            tensors[f"{stem}.lora_B.weight"] = torch.zeros(outputs, RANK, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as root:
        folders = {f"a{number}": Path(root) / f"a{number}" for number in range(count)}
        for folder in folders.values():
            _write(folder, RANK, [name.rpartition(".")[2] for name in sizes], tensors)
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
        module.weight.data += SCALE * up @ down
        tensors[f"base_model.model.{path}.lora_A.weight"] = down
        tensors[f"base_model.model.{path}.lora_B.weight"] = up
    _write(folder, rank, targets, tensors)
    return merged


def _write(folder: Path, rank: int, targets: Sequence[str], tensors: dict[str, Tensor]) -> None:
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank}
    facts |= {"target_modules": list(targets), "base_model_name_or_path": "tiny"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
