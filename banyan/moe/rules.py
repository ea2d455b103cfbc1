"""Rules about experts: recording, placement, balancing (EPLB) and the all-to-all exchange."""

import os
from collections.abc import Iterator
from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ExpertFacts, ModelConfig

log = logger(__name__)

_RECORDER = "--expert-distribution-recorder-mode"
_RETURNED = "--enable-return-routed-experts"
_COPIES, _LOCATION = "--ep-num-redundant-experts", "--init-expert-location"
_DISPATCH = "--ep-dispatch-algorithm"
_BALANCE = "--enable-eplb"
TRIVIAL = "trivial"
_EXCHANGE, _MODE = "--moe-a2a-backend", "--deepep-mode"
FUSED = "ascend_fuseep"
LIMIT = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
MOST = 1024
_LINE = 64
"""Alignment in bytes of the exchange slots."""


def check_experts(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    experts = config.experts
    for is_given, flag in (
        (experts.are_returned, _RETURNED),
        (bool(experts.recorder), _RECORDER),
        (experts.balances, _BALANCE),
    ):
        if is_given and model_config.experts is None:
            raise ConfigError(f"{flag}: this model has no experts", hint="leave it out")
    if experts.recorder or experts.balances:
        _check_folder(config)
    if experts.balances:
        groups_and_nodes(config, model_config.experts or ExpertFacts(1, 1, 1))
    for flag in _placement_flags(config):
        _check_placement(config, model_config, flag)
    return config


def are_placed(config: Config) -> bool:
    """Whether experts may be in another order than the checkpoint's, or have copies."""
    return config.parallel.ep > 1 and any(_placement_flags(config))


def balances_by_itself(config: Config) -> bool:
    """Whether every rank counts choices and moves experts between its own steps.

    With DP attention or pipeline stages no single plan reaches all ranks.
    """
    return config.experts.balances and (config.parallel.uses_dp_attention or config.parallel.pp > 1)


def _placement_flags(config: Config) -> Iterator[str]:
    """The flags that place experts, as they were given."""
    experts = config.experts
    if experts.redundant:
        yield f"{_COPIES} {experts.redundant}"
    if experts.location != TRIVIAL:
        yield _LOCATION
    if experts.dispatch:
        yield f"{_DISPATCH} {experts.dispatch}"
    if experts.balances:
        yield _BALANCE


def _check_placement(config: Config, model_config: ModelConfig, flag: str) -> None:
    facts, experts, ep = model_config.experts, config.experts, config.parallel.ep
    if facts is None:
        raise ConfigError(f"{flag}: this model has no experts", hint="leave it out")
    if ep == 1:
        raise ConfigError(
            f"{flag}: no rank holds whole experts of its own",
            hint="set --expert-parallel-size to --tensor-parallel-size, or leave it out",
        )
    if experts.redundant % ep:
        raise ConfigError(
            f"{_COPIES} {experts.redundant}: {ep} ranks cannot share {facts.count} experts and "
            "these copies evenly",
            hint=f"choose a multiple of {ep}",
        )
    if experts.dispatch == "fake":
        log.warning(
            "%s fake: tokens use other experts than they chose; answers are not the model's",
            _DISPATCH,
        )
    _check_location(experts.location)


def _check_location(location: str) -> None:
    if location == TRIVIAL or location.lstrip().startswith("{"):
        return
    shown = printable(repr(location), 200)
    if location.endswith((".pt", ".pth", ".pkl", ".bin")):
        raise ConfigError(
            f"{_LOCATION} {shown}: pickled files can run code and are never opened",
            hint="write the map or the counts as JSON",
        )
    if not location.endswith((".json", ".safetensors")) or not os.path.isfile(location):
        raise ConfigError(
            f"{_LOCATION} {shown} is neither trivial, JSON nor a .json or .safetensors file",
            hint='give {"physical_to_logical_map": [[0, 1, …], …]}, or a dump of the recorder',
        )


def _check_folder(config: Config) -> None:
    folder = config.experts.folder
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR {folder!r} is not a writable folder",
            hint="choose another one",
        )


def groups_and_nodes(config: Config, facts: ExpertFacts) -> tuple[int, int]:
    """Return the numbers of expert groups and of memory nodes for them; 1, 1 = no grouping."""
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


def choose_expert_parallel(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Set --expert-parallel-size for an all-to-all backend. Runs before ranks are counted."""
    parallel, experts = config.parallel, config.experts
    if experts.a2a == "none" and not parallel.whole_experts:
        return config
    if experts.a2a == "none":
        return _with_whole_experts(config, model_config)
    flag = f"{_EXCHANGE} {experts.a2a}"
    if model_config.experts is None:
        raise ConfigError(f"{flag}: this model has no experts", hint="leave it out")
    if is_fused(config) and experts.a2a_mode == "normal":
        raise ConfigError(
            f"{flag} cannot be combined with {_MODE} normal: it exchanges rows at once",
            hint=f"leave {_MODE} at auto",
        )
    if experts.a2a_tokens == 0 and experts.a2a_mode != "normal":
        raise ConfigError(
            f"{LIMIT}=0 (no bound) cannot be combined with {_MODE} {experts.a2a_mode}",
            hint=f"give {'' if is_fused(config) else f'{_MODE} normal, or '}the tokens per rank, "
            f"up to {MOST}",
        )
    if parallel.ep > 1 or parallel.tp == 1:
        return config
    log.info("set expert-parallel-size=%d because of %s", parallel.tp, flag)
    return replace(config, parallel=replace(parallel, ep=parallel.tp))


def _with_whole_experts(config: Config, model_config: ModelConfig) -> Config:
    """For --enable-ep-moe."""
    parallel, flag = config.parallel, "--enable-ep-moe"
    if parallel.ep > 1:
        return config
    if model_config.experts is None or parallel.tp == 1:
        why = "this model has no experts" if model_config.experts is None else "there is one rank"
        log.warning("%s has no effect: %s", flag, why)
        return config
    log.info("set expert-parallel-size=%d because of %s", parallel.tp, flag)
    return replace(config, parallel=replace(parallel, ep=parallel.tp))


def is_fused(config: Config) -> bool:
    """Whether one operator exchanges rows and runs the experts."""
    return config.experts.a2a == FUSED


def sends_rows(config: Config) -> bool:
    return config.experts.a2a != "none" and config.parallel.ep > 1


def slot_bytes(config: Config, model_config: ModelConfig) -> int:
    """Return the size of a rank's exchange slot in bytes; 0 = the default."""
    parallel, experts, facts = config.parallel, config.experts, model_config.experts
    if not sends_rows(config) or experts.a2a_mode == "normal" or facts is None:
        return 0
    # With placed experts a rank returns one row per token and expert, otherwise one per token.
    rows = facts.per_token if are_placed(config) else 1
    tokens = experts.a2a_tokens * parallel.tp
    size = tokens * rows * (facts.latent or model_config.hidden_size) * 4
    return -(-size // _LINE) * _LINE


def within_the_exchange(config: Config, chunk: int, running: int) -> tuple[int, int]:
    """Limit the defaults for prompt tokens and requests per step to one exchange.

    Args:
        chunk, running: the device's own defaults.
    """
    parallel, experts = config.parallel, config.experts
    if not sends_rows(config) or experts.a2a_mode != "low_latency":
        return chunk, running
    capacity = experts.a2a_tokens * parallel.attention_ranks * parallel.cp
    each = 1 + config.speculative.drafts
    running = max(1, min(running, capacity // 2 // each))
    fits = max(1, min(chunk, capacity - (config.schedule.max_running or running) * each))
    if fits < chunk:
        log.info("set chunked-prefill-size=%d because of %s low_latency", fits, _MODE)
    return fits, running


def check_exchange_size(config: Config, running: int) -> None:
    """Refuse steps that exceed one exchange. running: maximum decode tokens of a replica's step."""
    parallel, experts = config.parallel, config.experts
    if not sends_rows(config) or experts.a2a_mode != "low_latency":
        return
    schedule, ranks = config.schedule, parallel.attention_ranks * parallel.cp
    chunk = schedule.chunk_tokens if schedule.chunk_tokens > 0 else schedule.prefill_tokens
    most = -(-(chunk + running) // ranks)
    if most > experts.a2a_tokens:
        raised = f", or set {LIMIT} to {most}" if most <= MOST else ""
        raise ConfigError(
            f"{_MODE} low_latency: a step may have {chunk} prompt tokens and {running} decode "
            f"tokens, which is {most} for each of {ranks} ranks; {LIMIT} is "
            f"{experts.a2a_tokens}",
            hint=f"use {_MODE} auto, or lower --chunked-prefill-size and --max-running-requests"
            + raised,
        )
