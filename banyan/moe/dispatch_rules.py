"""Rows that go to the ranks of their experts (--moe-a2a-backend): what that goes together with, and
how many travel at once. Part of `config/resolve.py`."""

from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig
from banyan.moe.rules import are_placed

log = logger(__name__)

_FLAG, _MODE = "--moe-a2a-backend", "--deepep-mode"
FUSED = "ascend_fuseep"
LIMIT = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
MOST = 1024
_LINE = 64
"""Bytes that what ranks put before each other is a multiple of."""


def share_the_experts(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Before the ranks are counted: each has some experts whole."""
    parallel, experts = config.parallel, config.experts
    if experts.a2a == "none":
        return config
    flag = f"{_FLAG} {experts.a2a}"
    if model_config.experts is None:
        raise ConfigError(f"{flag}: this model has no experts", hint="leave it out")
    if config.model.implementation == "transformers":
        raise ConfigError(
            f"{flag} cannot be combined with --model-impl transformers",
            hint="leave --model-impl at auto",
        )
    if is_fused(config) and experts.a2a_mode == "normal":
        raise ConfigError(
            f"{flag} cannot be combined with {_MODE} normal: its operator sends rows at once",
            hint=f"leave {_MODE} at auto",
        )
    if experts.a2a_tokens == 0 and experts.a2a_mode != "normal":
        raise ConfigError(
            f"{LIMIT}=0 (no bound) cannot be combined with {_MODE} {experts.a2a_mode}",
            hint=f"give {'' if is_fused(config) else f'{_MODE} normal, or '}the most tokens of a "
            f"rank, up to {MOST}",
        )
    if parallel.ep > 1 or parallel.tp == 1:
        return config
    log.info("set expert-parallel-size=%d because of %s", parallel.tp, flag)
    return replace(config, parallel=replace(parallel, ep=parallel.tp))


def is_fused(config: Config) -> bool:
    """One operator sends the rows and runs the experts."""
    return config.experts.a2a == FUSED


def sends_rows(config: Config) -> bool:
    return config.experts.a2a != "none" and config.parallel.ep > 1


def slot_bytes(config: Config, model_config: ModelConfig) -> int:
    """What a rank must be able to put before the others at once; 0 = as much as is usual."""
    parallel, experts, facts = config.parallel, config.experts, model_config.experts
    if not sends_rows(config) or experts.a2a_mode == "normal" or facts is None:
        return 0
    # Of each token one row comes back from a rank, or all of its pairs.
    rows = facts.per_token if are_placed(config) else 1
    tokens = experts.a2a_tokens * parallel.tp
    size = tokens * rows * (facts.latent or model_config.hidden_size) * 4
    return -(-size // _LINE) * _LINE


def within_the_exchange(config: Config, chunk: int, running: int) -> tuple[int, int]:
    """Tokens of prompts and requests of a step, where nobody says how many there may be: as many as
    travel at once.

    Args:
        chunk, running: what else would suit the device.
    """
    parallel, experts = config.parallel, config.experts
    if not sends_rows(config) or experts.a2a_mode != "low_latency":
        return chunk, running
    room = experts.a2a_tokens * parallel.attention_ranks * parallel.cp
    each = 1 + config.speculative.drafts
    running = max(1, min(running, room // 2 // each))
    fits = max(1, min(chunk, room - (config.schedule.max_running or running) * each))
    if fits < chunk:
        log.info("steps have %d tokens of prompts, because of %s low_latency", fits, _MODE)
    return fits, running


def check_the_tokens(config: Config, running: int) -> None:
    """Once it is known how large a step may be. running: tokens of answers in one of a replica."""
    parallel, experts = config.parallel, config.experts
    if not sends_rows(config) or experts.a2a_mode != "low_latency":
        return
    schedule, ranks = config.schedule, parallel.attention_ranks * parallel.cp
    chunk = schedule.chunk_tokens if schedule.chunk_tokens > 0 else schedule.prefill_tokens
    most = -(-(chunk + running) // ranks)
    if most > experts.a2a_tokens:
        raised = f", or set {LIMIT} to {most}" if most <= MOST else ""
        raise ConfigError(
            f"{_MODE} low_latency: a step may have {chunk} tokens of prompts and {running} of "
            f"answers, which is {most} for each of {ranks} ranks, and {LIMIT} is "
            f"{experts.a2a_tokens}",
            hint=f"use {_MODE} auto, or lower --chunked-prefill-size and --max-running-requests"
            + raised,
        )
