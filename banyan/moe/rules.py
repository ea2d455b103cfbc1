"""Rules about models of experts: what is recorded of them, and where they lie. Part of
`config/resolve.py`."""

import os
from collections.abc import Iterator

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ExpertFacts, ModelConfig

log = logger(__name__)

_MODE = "--expert-distribution-recorder-mode"
_TOLD = "--enable-return-routed-experts"
_COPIES, _LOCATION = "--ep-num-redundant-experts", "--init-expert-location"
_DISPATCH = "--ep-dispatch-algorithm"
_BALANCE = "--enable-eplb"
TRIVIAL = "trivial"


def check_the_expert_flags(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    if config.experts.are_told:
        _check_the_library(config, model_config, _TOLD)
        _check_what_is_told(config, model_config)
    if config.experts.recorder:
        _check_the_library(config, model_config, _MODE)
        _check_the_folder(config)
    if config.experts.balances:
        _check_the_library(config, model_config, _BALANCE)
        _check_the_folder(config)
        _check_the_balance(config)
        groups_and_nodes(config, model_config.experts or ExpertFacts(1, 1, 1))
    for flag in _placing(config):
        _check_the_places(config, model_config, flag)
    return config


def are_placed(config: Config) -> bool:
    """Whether experts may lie elsewhere than in their order."""
    return config.parallel.ep > 1 and any(_placing(config))


def balances_by_itself(config: Config) -> bool:
    """Whether every rank counts choices and moves experts between its own steps: those of several
    replicas and stages have no plan in common that an order could be."""
    return config.experts.balances and (config.parallel.uses_dp_attention or config.parallel.pp > 1)


def _placing(config: Config) -> Iterator[str]:
    """The flags that ask for it, as they were given."""
    experts = config.experts
    if experts.redundant:
        yield f"{_COPIES} {experts.redundant}"
    if experts.location != TRIVIAL:
        yield _LOCATION
    if experts.dispatch:
        yield f"{_DISPATCH} {experts.dispatch}"
    if experts.balances:
        yield _BALANCE


def _check_the_places(config: Config, model_config: ModelConfig, flag: str) -> None:
    facts, experts, ep = model_config.experts, config.experts, config.parallel.ep
    if facts is None:
        raise ConfigError(f"{flag}: this model has no experts", hint="leave it out")
    if ep == 1:
        raise ConfigError(
            f"{flag}: one rank has all experts, or each has a cut of every one",
            hint="give --expert-parallel-size as large as --tensor-parallel-size, or leave it out",
        )
    if experts.redundant % ep:
        raise ConfigError(
            f"{_COPIES} {experts.redundant}: {ep} ranks cannot share {facts.count} experts and so "
            "many copies evenly",
            hint=f"choose a multiple of {ep}",
        )
    if config.parallel.nodes > 1 and experts.location != TRIVIAL:
        raise ConfigError(
            f"{_LOCATION} cannot be combined with {config.parallel.nodes_flag}",
            hint="start all ranks on one machine",
        )
    if experts.dispatch == "fake":
        _check_the_fake(config, facts)
    _check_the_location(experts.location)


def _check_the_fake(config: Config, facts: ExpertFacts) -> None:
    if config.parallel.uses_dp_attention:
        raise ConfigError(
            f"{_DISPATCH} fake cannot be combined with --enable-dp-attention",
            hint="use --data-parallel-size alone",
        )
    log.warning(
        "%s fake: tokens go through other experts of the %d than they chose, so that answers are "
        "not the model's",
        _DISPATCH,
        facts.count,
    )


def _check_the_location(location: str) -> None:
    if location == TRIVIAL or location.lstrip().startswith("{"):
        return
    shown = printable(repr(location), 200)
    if location.endswith((".pt", ".pth", ".pkl", ".bin")):
        raise ConfigError(
            f"{_LOCATION} {shown}: pickled files may run anything and are never opened",
            hint="write the map, or the counts, as JSON",
        )
    if not location.endswith((".json", ".safetensors")) or not os.path.isfile(location):
        raise ConfigError(
            f"{_LOCATION} {shown} is neither trivial nor JSON nor a file .json or .safetensors",
            hint='as {"physical_to_logical_map": [[0, 1, …], …]}, or a dump of the recorder',
        )


def _check_the_library(config: Config, model_config: ModelConfig, flag: str) -> None:
    if config.model.implementation == "transformers":
        raise ConfigError(
            f"{flag} cannot be combined with --model-impl transformers",
            hint="leave --model-impl at auto",
        )
    if model_config.experts is None:
        raise ConfigError(f"{flag}: this model has no experts", hint="leave it out")


def _check_what_is_told(config: Config, model_config: ModelConfig) -> None:
    if model_config.pooling is not None:
        raise ConfigError(f"{_TOLD}: this model is served for vectors", hint="leave it out")
    if config.handoff.role:
        raise ConfigError(
            f"{_TOLD} cannot be combined with --disaggregation-mode {config.handoff.mode}: what a "
            "prompt's tokens chose is not handed over",
            hint="serve such requests with one server",
        )


def _check_the_folder(config: Config) -> None:
    """Refuse what keeps dumps from being written."""
    folder = config.experts.folder
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR {folder!r} is not a folder that can be "
            "written",
            hint="name another one",
        )


def _check_the_balance(config: Config) -> None:
    if config.parallel.nodes > 1:
        raise ConfigError(
            f"{_BALANCE} cannot be combined with {config.parallel.nodes_flag}",
            hint="start all ranks on one machine",
        )
    if config.experts.dispatch == "fake":
        raise ConfigError(
            f"{_BALANCE} cannot be combined with {_DISPATCH} fake: those choices are even already",
            hint="use static or dynamic",
        )


def groups_and_nodes(config: Config, facts: ExpertFacts) -> tuple[int, int]:
    """Groups of experts that stay together on one of so many memory nodes; 1, 1 = none do."""
    nodes = len(dict.fromkeys(config.device.numa_nodes))
    if config.experts.algorithm == "deepseek" or nodes < 2:
        return 1, 1
    if facts.groups % nodes == 0 and config.parallel.ep % nodes == 0:
        return facts.groups, nodes
    if config.experts.algorithm == "auto":
        return 1, 1
    raise ConfigError(
        f"--eplb-algorithm deepseek_hierarchical: {facts.groups} groups of experts and "
        f"{config.parallel.ep} ranks cannot be shared by {nodes} memory nodes",
        hint="use auto",
    )
