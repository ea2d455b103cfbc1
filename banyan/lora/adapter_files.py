"""Adapters by path: reads the configuration of a PEFT folder or a GGUF file, parses --lora-paths.

llama.cpp's format is a GGUF file with `adapter.type` lora and two matrices per weight. Only its
header is read.
"""

import math
import os
import re
from dataclasses import dataclass

from banyan.base.errors import ConfigError, ModelError
from banyan.base.json_types import is_object, unique_json
from banyan.base.log import printable
from banyan.formats.gguf import GGUFFile
from banyan.formats.mapped import TensorInfo
from banyan.lora.adapter_config import (
    CONFIG,
    MAX_RANK,
    WEIGHTS,
    AdapterConfig,
    LowRank,
    check_types,
    stacked,
)
from banyan.lora.from_peft import highest_token, read_peft


def read_adapter(path: str, max_rank: int = 0) -> AdapterConfig:
    """Read the configuration of an adapter: a PEFT folder or a GGUF file.

    Args:
        max_rank: highest rank that may be served; 0 = any.

    Raises:
        ConfigError: there is no adapter at `path`, or it cannot be served.
    """
    folder = printable(path, 200)
    is_file = os.path.isfile(path)
    if is_file and not path.endswith(".gguf") or not is_file and not os.path.isdir(path):
        what = "a file of another kind" if is_file else "it is not a folder"
        raise ConfigError(
            f"no adapter at {folder!r}: {what}",
            hint=f"name a folder that holds {CONFIG} and {WEIGHTS}, or a GGUF file; nothing is "
            "downloaded",
        )
    try:
        adapter_config = read_gguf(path) if is_file else read_peft(path)
    except ModelError as error:
        raise ConfigError(error.text, hint=error.hint) from None
    if max_rank and adapter_config.rank > max_rank:
        raise ConfigError(
            f"adapter {folder!r} has rank {adapter_config.rank}, --max-lora-rank is {max_rank}",
            hint="raise it, or leave it out to serve what --lora-paths names",
        )
    return adapter_config


def names_token(folder: str, token: int) -> bool:
    """Whether the tokenizer in a model folder has a token with this id or a higher one; False if
    the model is a single file."""
    return os.path.isdir(folder) and token <= highest_token(folder)


@dataclass(frozen=True)
class AdapterPlace:
    """A configured adapter.

    Attributes:
        is_pinned: never evicted.
    """

    name: str
    path: str
    is_pinned: bool = False


_NAME = re.compile(r"[\w./+@-]{1,128}")


def checked_name(name: str) -> str:
    """Return a name that requests can use; ConfigError for any other."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{printable(repr(name), 100)} cannot name an adapter",
            hint="use 1 to 128 letters, digits and _ . / + @ -",
        )
    return name


def named_adapters(words: tuple[str, ...]) -> tuple[AdapterPlace, ...]:
    """Parse --lora-paths: NAME=PATH, PATH, or JSON with lora_name, lora_path and pinned.

    Raises:
        ConfigError: an entry has another form, or two have the same name.
    """
    found: dict[str, AdapterPlace] = {}
    for word in words:
        place = _from_json(word) if word.startswith("{") else _from_word(word)
        if place.name in found:
            raise ConfigError(
                f"--lora-paths names two adapters {place.name!r}", hint="name them apart"
            )
        found[place.name] = place
    return tuple(found.values())


def _from_word(word: str) -> AdapterPlace:
    name, mark, path = word.partition("=")
    path = path if mark else word
    if not path:
        raise ConfigError(
            f"--lora-paths {printable(word, 80)!r} names no folder", hint="write NAME=FOLDER"
        )
    return AdapterPlace(checked_name(name if mark else _stem(word)), os.path.abspath(path))


def _stem(path: str) -> str:
    return path.rstrip("/") if _NAME.fullmatch(path) and ".." not in path else _last(path)


def _last(path: str) -> str:
    return os.path.basename(os.path.abspath(path))


def _from_json(word: str) -> AdapterPlace:
    try:
        raw: object = unique_json(word)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--lora-paths {printable(word, 80)!r} is not JSON: {printable(str(error))}"
        ) from None
    known = {"lora_name": str, "lora_path": str, "pinned": bool}
    if not is_object(raw) or not {"lora_name", "lora_path"} <= set(raw) <= set(known):
        raise ConfigError(
            f"--lora-paths {printable(word, 80)!r} must have lora_name, lora_path and, if you "
            "like, pinned"
        )
    if wrong := [key for key, value in raw.items() if type(value) is not known[key]]:
        raise ConfigError(f"--lora-paths: {wrong[0]} must be a {known[wrong[0]].__name__}")
    path = os.path.abspath(str(raw["lora_path"]))
    return AdapterPlace(checked_name(str(raw["lora_name"])), path, bool(raw.get("pinned")))


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
