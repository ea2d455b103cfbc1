"""What sees or changes the outputs of layers: functions of the operator's own, dumps, and inputs
that take the place of others. Part of `config/resolve.py`; runs none of them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from banyan.base.errors import ConfigError, ModelError
from banyan.base.json_types import is_list, is_object, unique_json
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

TOKENS = "tokens"
"""Name of the ids of a pass in a file of its tensors."""
_MOST_ID = 1 << 31
_FORM = (
    '{"target_modules": ["layers.0.attention"], "hook_factory": "module:function", "config": {}}'
)


@dataclass(frozen=True)
class HookSpec:
    """One forward hook.

    Attributes:
        modules: names, in which * and ? stand for any characters, as a shell has them.
        factory: module:function that makes the hook of `options`.
    """

    modules: tuple[str, ...]
    factory: str
    options: Mapping[str, object]


def hook_specs(words: Sequence[str]) -> list[HookSpec]:
    """What --forward-hooks names.

    Raises:
        ConfigError: a word is no JSON of that form.
    """
    found: list[HookSpec] = []
    for word in words:
        try:
            given: object = unique_json(word)
        except (ValueError, RecursionError):
            given = None
        if given == []:
            raise ConfigError("--forward-hooks [] names none", hint=f"give {_FORM}")
        for part in given if is_list(given) else [given]:
            found.append(_spec(part, word))
    return found


def _spec(part: object, word: str) -> HookSpec:
    given = part if is_object(part) else {}
    modules, factory = given.get("target_modules"), given.get("hook_factory")
    options, known = given.get("config", {}), {"name", "target_modules", "hook_factory", "config"}
    names = [name for name in modules if isinstance(name, str)] if is_list(modules) else []
    is_whole = is_list(modules) and len(names) == len(modules) > 0
    if not is_whole or not isinstance(factory, str) or not factory or not is_object(options):
        raise ConfigError(f"--forward-hooks {printable(word, 100)} is none", hint=f"give {_FORM}")
    if unknown := given.keys() - known:
        raise ConfigError(
            f"--forward-hooks: {printable(', '.join(sorted(unknown)), 80)} is unknown"
        )
    return HookSpec(tuple(names), factory, options)


def read_prompt(path: str) -> list[int]:
    """The token ids of a file of --debug-tensor-dump-input-file.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    from banyan.formats.arrays import read_arrays  # numpy, which no start without such a file needs

    flag = f"--debug-tensor-dump-input-file {printable(path)}"
    try:
        tokens = read_arrays(path).get(TOKENS) if os.path.isfile(path) else None
    except (ModelError, OSError) as error:
        raise ConfigError(f"{flag}: {error}") from None
    if tokens is None or tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind != "i":
        raise ConfigError(
            f"{flag} is no safetensors file with the ids of a prompt",
            hint=f"it has a tensor {TOKENS!r}, [tokens] I32 or I64, as a dump of a pass has",
        )
    wrong = tokens[(tokens < 0) | (tokens >= _MOST_ID)]
    if len(wrong):
        raise ConfigError(f"{flag}: {wrong[0]} is no token id")
    return tokens.tolist()


def check_forward_hooks(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Steps are eager where something comes between the layers, since a recording has no room for
    it."""
    model = config.model
    if model.dump_layers and not model.dump_folder:
        raise ConfigError("--debug-tensor-dump-layers needs --debug-tensor-dump-output-folder")
    if model.injects and not model.dump_input:
        raise ConfigError("--debug-tensor-dump-inject needs --debug-tensor-dump-input-file")
    if model.dump_input:
        _check_prompt(read_prompt(model.dump_input), model_config)
        if config.server.skip_warmup:
            raise ConfigError(
                "--debug-tensor-dump-input-file is run by the warm-up, and --skip-server-warmup "
                "was given"
            )
    if not model.is_watched:
        return config
    beyond = [layer for layer in model.dump_layers if layer >= model_config.num_layers]
    if beyond:
        raise ConfigError(
            f"--debug-tensor-dump-layers {beyond[0]}: the model's layers are 0 to "
            f"{model_config.num_layers - 1}"
        )
    hook_specs(model.hooks)
    if model.implementation == "transformers":
        raise ConfigError(
            "--forward-hooks and --debug-tensor-dump-* see the layers of our own models, and "
            "--model-impl transformers has others",
            hint="leave --model-impl at auto",
        )
    log.info(
        "steps are eager, because layers are watched (--forward-hooks, --debug-tensor-dump-*, "
        "--enable-layerwise-nvtx-marker)"
    )
    return replace(config, device=replace(config.device, is_eager=True))


def _check_prompt(prompt: list[int], model_config: ModelConfig) -> None:
    """ConfigError: the model cannot run the prompt of a file."""
    flag = "--debug-tensor-dump-input-file"
    if max(prompt) >= model_config.vocab_size:
        raise ConfigError(f"{flag}: token {max(prompt)}, the model has {model_config.vocab_size:,}")
    if len(prompt) >= model_config.context_length:
        raise ConfigError(
            f"{flag} has {len(prompt):,} tokens, the model bears {model_config.context_length:,}"
        )
