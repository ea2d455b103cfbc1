"""Writes the other files of a quantised folder: quantization_config, the index, and copies of the
source's files."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from banyan.base.json_types import is_object
from banyan.models.quantize.layouts import Floats, TargetLayout
from banyan.models.quantize.plan import QuantizePlan, targets

_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_WEIGHTS = (
    ".safetensors",
    ".gguf",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".part",
    ".index.json",
    ".py",
)
"""Endings of files that are not copied: weights, and code, which nobody here runs."""


def quantization_config(plan: QuantizePlan, layout: TargetLayout) -> dict[str, object]:
    """In compressed-tensors' form. Modules of the most common kind are named by their class."""
    kinds = sorted(plan.kinds, key=lambda kind: -len(plan.kinds[kind]))
    groups: dict[str, object] = {}
    everything = [*plan.floats, *(name for names in plan.kinds.values() for name in names)]
    for number, kind in enumerate(kinds):
        mine = set(plan.kinds[kind])
        others = [name for name in everything if name not in mine]
        named = ["Linear"] if number == 0 else targets(plan.kinds[kind], others)
        groups[f"group_{number}"] = {"targets": named, **layout.scheme(kind)}
    first = layout.scheme(kinds[0])
    left = set(plan.floats)
    rounded = [name for name in everything if name not in left]
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": first["format"],
        "config_groups": groups,
        "ignore": targets(_linear(plan.floats), rounded),
    }


def _linear(modules: Sequence[str]) -> list[str]:
    """Without embeddings, which are no linear layers; a head is one, tied or not."""
    return list(dict.fromkeys([*(m for m in modules if "embed" not in m), "lm_head"]))


@dataclass(frozen=True)
class OtherFiles:
    """The files of a folder besides its weights.

    Attributes:
        files: name -> content, or the file to copy.
        config: config.json without quantization_config.
    """

    files: Mapping[str, bytes | Path]
    config: Mapping[str, object]


def other_files_of(source: Path) -> OtherFiles:
    """The other files of a folder, and its configuration."""
    files: dict[str, bytes | Path] = {
        file.name: file
        for file in sorted(source.iterdir())
        if file.is_file() and file.name != _CONFIG and not file.name.endswith(_WEIGHTS)
    }
    config = cast(object, json.loads((source / _CONFIG).read_text(encoding="utf-8")))
    assert is_object(config)
    return OtherFiles(files, config)


def write_other_files(
    plan: QuantizePlan, layout: TargetLayout, others: OtherFiles, target: Path
) -> None:
    """Write the other files and the index, and config.json last: it makes the folder a model."""
    for name, content in others.files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, target / name)
        else:
            (target / name).write_bytes(content)
    if len(plan.files) > 1:
        weights = {
            entry.name: file.name
            for file in plan.files
            for piece in file.pieces
            for unit in piece.units
            for entry in unit.entries
        }
        sizes = sum(p.end - p.start - len(p.head) for f in plan.files for p in f.pieces)
        index = {"metadata": {"total_size": sizes}, "weight_map": weights}
        (target / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config = dict(others.config)
    if not isinstance(layout, Floats):
        config["quantization_config"] = quantization_config(plan, layout)
    (target / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
