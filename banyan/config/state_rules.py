"""Rules about layers that keep a state: what they do not go with, and how far their checkpoints lie
apart. Part of `config/resolve.py`; knows no pages.
"""

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.config.env import Environment
from banyan.config.schema import CacheConfig, Config
from banyan.config.speculation import what_branches
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

_FLAGS = {
    "states": "--max-mamba-cache-size",
    "state_ratio": "--mamba-full-memory-ratio",
    "state_interval": "--mamba-track-interval",
}


def check_the_states(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    cache = config.cache
    if not model_config.has_states:
        for field, flag in _FLAGS.items():
            if getattr(cache, field) != getattr(CacheConfig(), field):
                log.warning("%s has no effect: no layer of this model keeps a state", flag)
        return config
    for is_there, flag, why in (
        (
            bool(what_branches(config.speculative)),
            what_branches(config.speculative),
            "a state does not branch",
        ),
        (
            bool(cache.store),
            f"--hicache-storage-backend {cache.store}",
            "what is stored of a prefix is every position, and no state",
        ),
        (
            config.parallel.uses_dp_attention,
            "--enable-dp-attention",
            "layers with states take the rows of one replica",
        ),
        (
            config.parallel.pp > 1,
            f"--pipeline-parallel-size {config.parallel.pp}",
            "stages are not told where states lie; use --tensor-parallel-size",
        ),
    ):
        if is_there:
            raise ConfigError(
                f"{flag} is not available for this model, some of whose layers keep a state: {why}",
                hint="leave it out",
            )
    running, states = config.schedule.max_running, cache.states
    if states and running > states:
        raise ConfigError(
            f"--max-running-requests {running}: each of them needs a state, and there are "
            f"--max-mamba-cache-size {states}",
            hint="raise the latter; more states than requests are checkpoints of prefixes",
        )
    if states and cache.state_ratio != CacheConfig().state_ratio:
        raise ConfigError(
            "--max-mamba-cache-size and --mamba-full-memory-ratio both say how many states there "
            "are",
            hint="give only one of them",
        )
    return config
