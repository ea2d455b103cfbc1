"""Rules of --enable-dp-attention and --moe-dense-tp-size, and the Config of one replica.

`config/rules/conflicts.py` lists the features that exclude DP attention.
"""

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
    """Check the layout of replicas; one replica needs no DP attention.

    Runs before the rules that count ranks.
    """
    parallel = config.parallel
    if not parallel.uses_dp_attention:
        return config
    if parallel.dp == 1:
        log.debug("set enable-dp-attention=False because there is one replica")
        return replace(config, parallel=replace(parallel, uses_dp_attention=False))
    if parallel.tp % parallel.dp:
        raise ConfigError(
            f"{_FLAG}: --tensor-parallel-size {parallel.tp} ranks cannot be divided among "
            f"--data-parallel-size {parallel.dp} replicas",
            hint="choose a multiple; with this flag it counts the ranks of all replicas",
        )
    if parallel.dp % parallel.nodes:
        raise ConfigError(
            f"{_FLAG}: --data-parallel-size {parallel.dp} replicas cannot be spread evenly over "
            f"--nnodes {parallel.nodes} nodes",
            hint="choose a multiple; each replica runs on one node",
        )
    log.info(
        "DP attention: %d replicas of %d ranks share the MLP and expert layers",
        parallel.dp,
        parallel.attention_ranks,
    )
    return config


def check_dense_tp(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    wanted = config.parallel.dense_tp
    if not wanted:
        return config
    if model_config.experts is None:
        raise ConfigError(
            f"--moe-dense-tp-size {wanted}: this model has no experts",
            hint="leave the flag out; --tensor-parallel-size shards its MLPs",
        )
    if wanted != 1:
        raise ConfigError(
            f"--moe-dense-tp-size {wanted}: dense MLPs are sharded over all ranks or whole "
            "on each rank",
            hint="choose 1, or leave the flag out",
        )
    return config


def of_replica(config: Config, number: int, meeting: str) -> Config:
    """Return the Config of one replica.

    Args:
        meeting: path of a new file at which DP attention replicas of one machine meet.
    """
    parallel = replace(config.parallel, replica=number)
    if parallel.uses_dp_attention:
        address = parallel.meeting if parallel.nodes > 1 else f"file://{meeting}"
        parallel = replace(parallel, meeting=address)
    return replace(config, parallel=parallel)
