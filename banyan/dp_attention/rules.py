"""Joined replicas (--enable-dp-attention), and feed-forward blocks that are not cut: what goes
together with what, decided before anything is loaded."""

import logging
from dataclasses import replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

_FLAG = "--enable-dp-attention"


def check_dp_attention(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Check DP attention before the ranks are counted. It is switched off for one replica."""
    parallel = config.parallel
    if not parallel.uses_dp_attention:
        return config
    if parallel.dp == 1:
        log.debug("set enable-dp-attention=False because there is one replica")
        return replace(config, parallel=replace(parallel, uses_dp_attention=False))
    if parallel.tp % parallel.dp:
        raise ConfigError(
            f"{_FLAG}: --tensor-parallel-size {parallel.tp} ranks cannot be shared out among "
            f"--data-parallel-size {parallel.dp} replicas",
            hint="choose a multiple: with this flag it counts the ranks of all replicas",
        )
    if parallel.dp % parallel.nodes:
        raise ConfigError(
            f"{_FLAG}: --data-parallel-size {parallel.dp} replicas cannot be spread evenly over "
            f"--nnodes {parallel.nodes} nodes",
            hint="choose a multiple: each replica lies on one node, whole",
        )
    for is_there, other, hint in (
        (parallel.pp > 1, "--pipeline-parallel-size", "use --tensor-parallel-size alone"),
        (
            config.model.implementation == "transformers",
            "--model-impl transformers",
            "leave --model-impl at auto",
        ),
        (
            config.speculative.borrows_head and not parallel.are_heads_apart,
            f"--speculative-algorithm {config.speculative.algorithm} without --enable-dp-lm-head",
            "give that too: each replica drafts by itself, with the logits of the model's head",
        ),
        (
            bool(config.cache.store),
            "--hicache-storage-backend",
            "each replica keeps prefixes in memory",
        ),
    ):
        if is_there:
            raise ConfigError(f"{_FLAG} cannot be combined with {other}", hint=hint)
    if model_config.pooling is not None:
        raise ConfigError(
            f"{_FLAG}: models for vectors are served by replicas that share nothing",
            hint="leave the flag out",
        )
    log.log(
        logging.INFO,
        "%d replicas of %d ranks share all feed-forward blocks",
        parallel.dp,
        parallel.attention_ranks,
    )
    return config


def check_the_dense_blocks(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    wanted = config.parallel.dense_tp
    if not wanted:
        return config
    if model_config.experts is None:
        raise ConfigError(
            f"--moe-dense-tp-size {wanted}: this model has no experts",
            hint="leave the flag out; --tensor-parallel-size cuts its feed-forward blocks",
        )
    if wanted != 1:
        raise ConfigError(
            f"--moe-dense-tp-size {wanted}: blocks without experts are cut over all ranks or whole "
            "on each",
            hint="choose 1, or leave the flag out",
        )
    return config


def of_replica(config: Config, number: int, meeting: str) -> Config:
    """The config of one replica.

    Args:
        meeting: path of a file that does not exist yet, the rendezvous of the DP attention
            replicas on one machine.
    """
    parallel = replace(config.parallel, replica=number)
    if parallel.uses_dp_attention:
        place = parallel.meeting if parallel.nodes > 1 else f"file://{meeting}"
        parallel = replace(parallel, meeting=place)
    return replace(config, parallel=parallel)
