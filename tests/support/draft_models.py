"""Draft models for a model."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def like(model: Path, folder: Path, noise: float) -> Path:
    """A copy of a checkpoint whose weights are a little off."""
    shutil.copytree(model, folder)
    random, weights = np.random.default_rng(5), load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        off = random.standard_normal(tensor.shape).astype(np.float32) * tensor.std()
        weights[name] = tensor + noise * off
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
