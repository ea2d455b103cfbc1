"""Reads LoRA adapters in llama.cpp's format: a GGUF file with `adapter.type` lora and two matrices
per weight. Reads the header only."""

import math
import re

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.formats.gguf import GGUFFile
from banyan.formats.mapped import TensorInfo
from banyan.lora.adapter_config import MAX_RANK, AdapterConfig, LowRank, check_types, stacked

_MATRIX = re.compile(r"(.+)\.weight\.lora_(a|b)")


def read_gguf(path: str) -> AdapterConfig:
    """Read the configuration of an adapter from a GGUF file.

    Raises:
        ConfigError, ModelError: the adapter cannot be served.
    """
    folder = printable(path, 200)
    with GGUFFile.open(path, has_words=False) as file:
        alpha = _alpha(file, folder)
        base = file.metadata.get("general.base_model.0.name") or file.metadata.get("general.name")
        found: dict[str, dict[str, TensorInfo]] = {}
        for name, tensor in file.tensors.items():
            match = _MATRIX.fullmatch(name)
            if match is None:
                raise ConfigError(
                    f"adapter {folder!r}: {printable(name, 120)} is no matrix of LoRA",
                    hint="make the file with llama.cpp's convert_lora_to_gguf.py",
                )
            found.setdefault(match.group(1), {})[match.group(2)] = tensor
        if not found:
            raise ConfigError(f"adapter {folder!r} has no tensors", hint="convert it again")
        modules = {name: _low_rank(name, both, alpha, folder) for name, both in found.items()}
        return AdapterConfig(path, str(base or ""), modules, file.size_bytes, "gguf")


def _alpha(file: GGUFFile, folder: str) -> float:
    """Return alpha; 0 means that the scale is 1."""
    kind = (file.metadata.get("general.type"), file.metadata.get("adapter.type"))
    if kind != ("adapter", "lora"):
        raise ConfigError(
            f"{folder!r} is no adapter: its general.type is {printable(str(kind[0]), 40)} and its "
            f"adapter.type {printable(str(kind[1]), 40)}",
            hint="name a model by --model-path; adapters of other types are not served",
        )
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise ConfigError(
            f"adapter {folder!r} applies only after some token of the prompt (aLoRA), which is "
            "not available here",
            hint="merge it into the weights",
        )
    alpha = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, float | int) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ConfigError(
            f"adapter {folder!r} lacks a number adapter.lora.alpha", hint="convert it again"
        )
    return float(alpha)


def _low_rank(name: str, both: dict[str, TensorInfo], alpha: float, folder: str) -> LowRank:
    shown = printable(name, 100)
    if len(both) < 2:
        lacking = "b" if "a" in both else "a"
        raise ConfigError(
            f"adapter {folder!r} lacks lora_{lacking} of {shown}", hint="convert it again"
        )
    down, up = both["a"], both["b"]
    check_types((down, up), folder)
    if len(down.shape) == 3 and 0 < down.shape[1] <= MAX_RANK:
        rank = down.shape[1]
        return stacked(name, (down, up), (rank, alpha, alpha / rank if alpha else 1.0), folder)
    is_pair = len(down.shape) == len(up.shape) == 2 and down.shape[0] == up.shape[1]
    if not is_pair or down.shape[0] > MAX_RANK:
        raise ConfigError(
            f"adapter {folder!r}: {shown} has matrices of {list(down.shape)} and {list(up.shape)}, "
            f"which are no pair of one rank up to {MAX_RANK}",
            hint="embeddings of GGUF adapters are not served; merge it into the weights",
        )
    rank = down.shape[0]
    scale = alpha / rank if alpha else 1.0
    names = (down.name, up.name)
    return LowRank(rank, alpha, down.shape[1], up.shape[0], scale, names, down.type)
