"""Tiny checkpoints whose weights are of a quantised form."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.quant import open_method
from banyan.models.weights.quant.base import restored
from banyan.models.weights.reader import read_tensors, tensor_types
from tests.models.families import rewrite_config, tiny
from tests.models.quantised import FORMS

BROKEN = "model.layers.1.mlp.up_proj"
"""A projection whose parts are spoiled."""
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def rewrite_weights(
    folder: Path, form, endings: tuple[str, ...] = ("_proj.weight",)
) -> dict[str, torch.Tensor]:
    """Replace the weight of each projection with such a name by what the form makes of it; returns
    the meant weights by name."""
    path = folder / "model.safetensors"
    tensors, meant = {}, {}
    for name, tensor in load_file(path).items():
        if not name.endswith(endings):
            tensors[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        parts, meant[name] = form.change(tensor)
        tensors |= {f"{stem}.{last}": part.contiguous().clone() for last, part in parts.items()}
    save_file(tensors, path)
    for file, describe in form.files.items():
        (folder / file).write_text(json.dumps(describe(list(tensors))))
    return meant


def quantised(name: str, folder: Path, variant: str = "qwen2", **sizes):
    """A quantised checkpoint, and the transformers model of the weights that it means."""
    form = FORMS[name]
    reference = tiny(variant, folder, **{**SIZES, **sizes})
    meant = rewrite_weights(folder, form)
    if form.settings is not None:
        rewrite_config(folder, quantization_config=form.settings)
    state = reference.state_dict()
    state |= {name: weight for name, weight in meant.items() if name in state}
    reference.load_state_dict(state)
    return reference, meant


def restore(folder: Path, rounded: Sequence[str] = ()):
    model_config = read_model_config(str(folder))
    method = open_method(model_config.quant, "here", rounded)
    return dict(
        restored(
            read_tensors(model_config),
            tensor_types(model_config),
            method,
            model_config.quant.method,
        )
    )


def spoil(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
