"""Random adapters in PEFT's form, and the weights that they are merged into: what they must answer
like."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.system.checkpoint import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SIZES = {
    "q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "gate_proj": (HIDDEN, INNER),
    "up_proj": (HIDDEN, INNER),
    "down_proj": (INNER, HIDDEN),
}
"""Target of the tiny model -> its inputs and outputs."""


def module_of(layer: int, target: str) -> str:
    part = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.layers.{layer}.{part}.{target}"


def write_adapter(
    folder: Path,
    seed: int,
    rank: int = 8,
    targets: Sequence[str] = ALL_TARGETS,
    dtype: type = np.float32,
    **config: object,
) -> Path:
    """A random adapter of the tiny model that changes its answers; `config` goes beside the usual
    entries of adapter_config.json."""
    rng = np.random.default_rng(1000 + seed)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        **config,
    }
    ranks: Mapping[str, int] = facts.get("rank_pattern") or {}
    tensors = {}
    for layer in range(LAYERS):
        for target in targets:
            inputs, outputs = _SIZES[target]
            module = module_of(layer, target)
            own = next((r for name, r in ranks.items() if module.endswith(name)), rank)
            down = rng.standard_normal((own, inputs)) / inputs**0.5
            up = rng.standard_normal((outputs, own)) / own**0.5
            stem = f"base_model.model.{module}"
            tensors[f"{stem}.lora_A.weight"] = down.astype(dtype)
            tensors[f"{stem}.lora_B.weight"] = up.astype(dtype)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


_GGUF = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
"""Projection -> its name in GGUF."""


def as_gguf(adapter: Path, path: Path, change: Mapping[str, object] | None = None) -> Path:
    """The same adapter as llama.cpp's converter writes it, with other entries where `change` names
    some."""
    import gguf

    facts = json.loads((adapter / "adapter_config.json").read_text())
    entries: dict[str, object] = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(facts["lora_alpha"]),
    }
    for name, values in load_file(adapter / "adapter_model.safetensors").items():
        _, _, _, _, layer, part, target, matrix, _ = name.split(".")
        if target in ("q_proj", "k_proj") and matrix == "lora_B":
            halves = values.reshape(-1, 2, HEAD_DIM // 2, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        stem = f"blk.{layer}.{_GGUF[f'{part}.{target}']}.weight"
        entries[f"{stem}.{matrix.lower()}"] = np.ascontiguousarray(values)
    writer = gguf.GGUFWriter(path, "llama")
    for name, entry in {**entries, **(change or {})}.items():
        if isinstance(entry, np.ndarray):
            writer.add_tensor(name, entry)
        elif isinstance(entry, str):
            writer.add_string(name, entry)
        elif isinstance(entry, float):
            writer.add_float32(name, entry)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """A checkpoint of `model` whose weights are base + scale · B · A, in float32."""
    shutil.copytree(model, folder)
    facts = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        down = tensors[name].astype(np.float64)
        up = tensors[name.replace("lora_A", "lora_B")].astype(np.float64)
        alphas = facts.get("alpha_pattern") or {}
        alpha = next((a for n, a in alphas.items() if module.endswith(n)), facts["lora_alpha"])
        rank = len(down)
        scale = alpha / (rank**0.5 if facts.get("use_rslora") else rank)
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight + scale * up @ down).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
