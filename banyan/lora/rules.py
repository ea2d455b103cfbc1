"""Rules about LoRA: adapters of the start, maximum rank, target modules and limits."""

from collections.abc import Sequence
from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.lora.adapter_config import DORA, EXPERTS, HEAD, KINDS, MAX_RANK, ROUTER, AdapterConfig
from banyan.lora.adapter_files import named_adapters, read_adapter
from banyan.model_config.model_config import ModelConfig
from banyan.moe.rules import are_placed

log = logger(__name__)

_FLAG = "--enable-lora"
_TARGETS = (
    "all",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "qkv_proj",
    "gate_up_proj",
    "c_fc",
    "c_proj",
    "embed_tokens",
    "lm_head",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "experts",
    "router",
    "query",
    "key",
    "value",
    "dense",
)
NO_PROJECTION = "none"
"""A target that matches no projection."""
MOST_LOADED = 256
"""Default limit of adapters in memory, on devices that allocate them one by one."""


def plan_lora(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """Read the adapters of the start, and set the rank and kinds of weights to allocate."""
    lora = config.lora
    if lora.paths and not lora.is_enabled:
        log.debug("set enable-lora=True because --lora-paths names adapters")
        config = replace(config, lora=replace(lora, is_enabled=True))
        lora = config.lora
    if not lora.is_enabled:
        return config
    places = named_adapters(lora.paths)
    adapter_configs = [read_adapter(place.path, lora.max_rank) for place in places]
    ranks = [found.rank for found in adapter_configs if found.rank]
    if not lora.max_rank and not adapter_configs:
        raise ConfigError(
            f"{_FLAG}: without --lora-paths the maximum rank is unknown",
            hint="give --max-lora-rank, e.g. 64",
        )
    for target in lora.targets:
        _check_target(target)
    if lora.max_rank > MAX_RANK:
        raise ConfigError(f"--max-lora-rank {lora.max_rank}: the maximum is {MAX_RANK}")
    most = lora.max_loaded or MOST_LOADED
    if len(places) > most:
        raise ConfigError(
            f"--lora-paths names {len(places)} adapters, at most {most} stay in memory",
            hint="raise --max-loaded-loras, or name fewer and POST /load_lora_adapter",
        )
    if most < lora.max_running:
        raise ConfigError(
            f"--max-loaded-loras {most} is less than --max-loras-per-batch {lora.max_running}",
            hint="the adapters of all running requests must be in memory",
        )
    rank = lora.max_rank or max(ranks, default=1)
    kinds = _kinds(lora.targets, adapter_configs, model_config)
    _check_dp_attention(config, kinds)
    if DORA in kinds:
        _check_base_weights(config)
    if EXPERTS in kinds or ROUTER in kinds:
        _check_experts(config, model_config)
    targets = tuple(target for target in lora.targets if target not in KINDS)
    if lora.targets and not targets:
        targets = (NO_PROJECTION,)
    found = replace(lora, max_rank=rank, kinds=kinds, targets=targets)
    return replace(config, lora=found)


def _kinds(
    targets: tuple[str, ...], adapter_configs: Sequence[AdapterConfig], model: ModelConfig
) -> tuple[str, ...]:
    """Return the kinds of weights besides projections to support: named ones, and the kinds of the
    adapters of the start. Each kind costs a little in every step, so unused ones stay off."""
    absent = () if model.experts else (EXPERTS, ROUTER)
    brought = {kind for found in adapter_configs for kind in found.kinds if kind not in absent}
    if model.labels:
        brought |= {HEAD}  # PEFT saves a head of its own with every adapter of a classifier
    if model.tie_embeddings and any(found.tokens for found in adapter_configs):
        brought |= {HEAD}
    return tuple(kind for kind in KINDS if kind in targets or kind in brought)


def _check_target(target: str) -> None:
    if target not in _TARGETS:
        raise ConfigError(
            f"--lora-target-modules {printable(target, 80)!r} is not a LoRA target",
            hint=f"choose: {', '.join(_TARGETS)}",
        )


def _check_base_weights(config: Config) -> None:
    """Refuse changed base weights: DoRA reads its row norms from the checkpoint."""
    functions = ", ".join(printable(name, 80) for name in config.model.loader_functions)
    for is_there, flag in (
        (bool(functions), f"--custom-weight-loader {functions}"),
        (config.model.load_format == "dummy", "--load-format dummy"),
    ):
        if is_there:
            raise ConfigError(
                f"DoRA adapters cannot be combined with {flag}: DoRA reads the norms of base "
                "weights from the checkpoint, and the served weights differ",
                hint="save the changed weights as a checkpoint, or merge the adapter into them",
            )


def _check_dp_attention(config: Config, kinds: Sequence[str]) -> None:
    """Refuse adapters that DP attention replicas cannot share.

    Each replica numbers adapters itself, and computes logits for the others.
    """
    parallel = config.parallel
    if not parallel.uses_dp_attention:
        return
    if not config.lora.paths:
        raise ConfigError(
            f"{_FLAG} without --lora-paths cannot be combined with --enable-dp-attention: its "
            "replicas only have the adapters of the start",
            hint="name them in --lora-paths",
        )
    if HEAD in kinds and not parallel.replicates_lm_head:
        raise ConfigError(
            "adapters of lm_head cannot be combined with --enable-dp-attention while "
            "replicas share the lm_head",
            hint="add --enable-dp-lm-head",
        )


def _check_experts(config: Config, model_config: ModelConfig) -> None:
    """Check that adapters of experts and routers are possible."""
    if model_config.experts is None:
        raise ConfigError(
            "adapters of experts and routers were asked for, and the model has no experts",
            hint="leave experts and router out of --lora-target-modules, or serve another adapter",
        )
    if are_placed(config):
        raise ConfigError(
            "adapters of experts and routers need every expert once, in its original order",
            hint="leave --ep-num-redundant-experts, --init-expert-location, "
            "--ep-dispatch-algorithm and --enable-eplb out",
        )
