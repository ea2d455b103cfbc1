"""Reads a ModelConfig from a checkpoint: a GGUF file or a folder of safetensors.

The keys of each format are in `from_hf.py` and `from_gguf.py`.
"""

import os
from collections.abc import Mapping

from banyan.base.errors import ConfigError, ModelError
from banyan.base.log import printable
from banyan.formats.shards import has_weights
from banyan.model_config.from_gguf import read_gguf
from banyan.model_config.from_hf import read_hub_folder
from banyan.model_config.model_config import ModelConfig

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
WITHOUT_FILES = ("dummy", "remote_instance")
"""Load formats of weights that are not in the model's files."""
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "*.txt", "*.tiktoken")
"""Files that are fetched from a repository: safe weights, configuration, tokenizer, template."""


def read_model_config(
    path: str,
    load_format: str = "auto",
    overrides: Mapping[str, object] | None = None,
    is_foreign: bool = False,
    with_media: bool = True,
    config_file: str = "",
) -> ModelConfig:
    """The ModelConfig of the checkpoint at `path`.

    Args:
        path: a .gguf file, or a folder that holds one, or config.json and *.safetensors.
        load_format: auto | gguf | safetensors, or one of WITHOUT_FILES, which need only the
            configuration.
        overrides: values that replace the checkpoint's, by its own keys.
        is_foreign: the transformers library runs the model, so any architecture is accepted.
        with_media: False = of a multimodal checkpoint only the text model is served.
        config_file: read instead of the folder's config.json.

    Raises:
        ModelError: missing, damaged, hostile, of an unknown family, or in pickled files.
    """
    if config_file and (is_foreign or os.path.isfile(path)):
        raise ConfigError(
            f"--decrypted-config-file {printable(config_file)} stands for the config.json of a "
            "folder of safetensors, and this model is read in another way",
            hint="leave it out",
        )
    if is_foreign:
        return _read_foreign(path, overrides)
    if os.path.isfile(path):
        return _read_file(path, load_format, overrides)
    if not os.path.isdir(path):
        raise ModelError(f"there is no model at {printable(path)!r}", hint="check the path")
    names = sorted(os.listdir(path))
    gguf = [name for name in names if name.endswith(".gguf")]
    is_folder = has_weights(names)
    if load_format == "gguf" or (load_format == "auto" and gguf and not is_folder):
        return read_gguf(_the_one_gguf(path, gguf), overrides)
    if not is_folder and load_format not in WITHOUT_FILES:
        raise _without_weights(path, names)
    return read_hub_folder(path, overrides, with_media=with_media, config_file=config_file)


def _read_foreign(path: str, overrides: Mapping[str, object] | None) -> ModelConfig:
    if not os.path.isdir(path):
        raise ConfigError(
            f"--model-impl transformers needs a folder with config.json, not {printable(path)!r}",
            hint="leave --model-impl at auto",
        )
    if overrides:
        raise ConfigError(
            "--json-model-override-args cannot be combined with --model-impl transformers",
            hint="change config.json, or leave --model-impl at auto",
        )
    return read_hub_folder(path, is_foreign=True)


def _read_file(path: str, load_format: str, overrides: Mapping[str, object] | None) -> ModelConfig:
    if path.endswith(PICKLED):
        raise pickled(path)
    if path.endswith(".safetensors"):
        raise ModelError(
            f"{printable(path)!r} is one weights file",
            hint="name the folder that holds it and config.json",
        )
    if load_format == "safetensors":
        raise ConfigError(f"--load-format safetensors, but {printable(path)!r} is a GGUF file")
    return read_gguf(path, overrides)


def _the_one_gguf(path: str, names: list[str]) -> str:
    if len(names) != 1:
        found = ", ".join(names[:5]) if names else "none"
        raise ModelError(
            f"{printable(path)!r} must hold exactly one .gguf file; found {found}",
            hint="name the file itself",
        )
    return os.path.join(path, names[0])


def _without_weights(path: str, names: list[str]) -> ModelError:
    if any(name.endswith(PICKLED) for name in names):
        return pickled(path)
    return ModelError(
        f"{printable(path)!r} holds no *.safetensors, no pytorch_model*.bin and no *.gguf",
        hint="check the path, or use --load-format dummy for random weights",
    )


def pickled(source: str) -> ModelError:
    """The error for weights in pickled files of other names than torch's for models."""
    name = printable(source)
    return ModelError(
        f"{name!r} keeps its weights in pickled files (.bin, .pt), which can run code when opened",
        hint="on a machine you trust with it, convert them once: python -c 'import sys; from "
        "transformers import AutoModelForCausalLM as M; M.from_pretrained(sys.argv[1], "
        f'dtype="auto").save_pretrained(sys.argv[2])\' {name} NEW_FOLDER, and copy the tokenizer '
        "files along",
    )
