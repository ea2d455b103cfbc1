"""Rules about what is recorded of models of experts. Part of `config/resolve.py`."""

import os

from banyan.base.errors import ConfigError
from banyan.config.card import ModelCard
from banyan.config.env import Environment
from banyan.config.schema import Config

_MODE = "--expert-distribution-recorder-mode"


def check_the_expert_flags(config: Config, card: ModelCard, environment: Environment) -> Config:
    if config.experts.recorder:
        _check_the_recorder(config, card)
    return config


def _check_the_recorder(config: Config, card: ModelCard) -> None:
    """Refuse what choices cannot be recorded beside, by name."""
    if card.experts is None:
        raise ConfigError(f"{_MODE}: this model has no experts", hint="leave it out")
    for is_there, other, hint in (
        (
            config.model.implementation == "transformers",
            "--model-impl transformers",
            "leave --model-impl at auto",
        ),
        (config.parallel.is_joined, "--enable-dp-attention", "use --data-parallel-size alone"),
        (config.parallel.pp > 1, "--pipeline-parallel-size", "use --tensor-parallel-size"),
        (config.schedule.burst > 1, "--num-continuous-decode-steps", "leave that at 1"),
    ):
        if is_there:
            raise ConfigError(f"{_MODE} and {other} do not go together", hint=hint)
    folder = config.experts.folder
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR {folder!r} is not a folder that can be "
            "written",
            hint="name another one",
        )
