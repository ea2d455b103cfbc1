"""Rules about the KV cache: recurrent states, eviction policies and sliding windows."""

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.schema import CacheConfig, Config
from banyan.model_config.model_config import WINDOW, ModelConfig

log = logger(__name__)

_STATE_FLAGS = {
    "states": "--max-mamba-cache-size",
    "state_ratio": "--mamba-full-memory-ratio",
    "state_interval": "--mamba-track-interval",
}


def check_states(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    cache = config.cache
    if not model_config.has_states:
        for field, flag in _STATE_FLAGS.items():
            if getattr(cache, field) != getattr(CacheConfig(), field):
                log.warning("%s has no effect: this model has no recurrent states", flag)
        return config
    running, states = config.schedule.max_running, cache.states
    if states and running > states:
        raise ConfigError(
            f"--max-running-requests {running}: each of them needs a state, and there are "
            f"--max-mamba-cache-size {states}",
            hint="raise --max-mamba-cache-size; states beyond the running requests are checkpoints",
        )
    return config


_EVICTION = "--radix-eviction-policy-config"


_MAX_NUMBER = 1 << 31


_NUMBERS: dict[str, dict[str, tuple[int, bool]]] = {
    "slru": {"protected_threshold": (1, False)},
    "tlru": {"threshold": (1, True), "next_prompt_estimate": (0, True)},
}
"""Policy -> parameter -> (minimum, whether it is required)."""


def check_eviction(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """Check the names and ranges of a policy's parameters."""
    policy, given = config.cache.eviction, config.cache.eviction_numbers
    known = _NUMBERS.get(policy, {})
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"{_EVICTION}: {policy} takes no {printable(str(key), 40)!r}",
                hint=f"it takes {' and '.join(known) or 'no numbers'}",
            )
        least, _ = known[key]
        if type(value) is not int or not least <= value < _MAX_NUMBER:
            shown = printable(repr(value), 40)
            raise ConfigError(
                f"{_EVICTION}: {key} must be an integer in [{least}, 2^31), got {shown}"
            )
    missing = [key for key, (_, is_needed) in known.items() if is_needed and key not in given]
    if missing:
        raise ConfigError(
            f"--radix-eviction-policy {policy} needs {' and '.join(missing)}",
            hint=f"give {_EVICTION} "
            '\'{"threshold": 4096, "next_prompt_estimate": 512}\', in tokens: '
            "how many may be left to compute, and how many a prompt adds",
        )
    if policy == "tlru" and given["threshold"] <= given["next_prompt_estimate"]:
        raise ConfigError(
            f"{_EVICTION}: threshold {given['threshold']} must be above next_prompt_estimate "
            f"{given['next_prompt_estimate']}",
            hint="or use --radix-eviction-policy lru, which it would be the same as",
        )
    return config


def check_windows(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    cache = config.cache
    if -1 < cache.window_mix < 0:
        raise ConfigError(
            f"--hybrid-kvcache-ratio must be in [0, 1], or -1 for none, got {cache.window_mix:g}"
        )
    given = {
        "--swa-full-tokens-ratio": cache.window_ratio > 0,
        "--hybrid-kvcache-ratio": cache.window_mix >= 0,
        "--disable-hybrid-swa-memory": cache.keeps_windows,
    }
    names = [name for name, is_given in given.items() if is_given]
    if names and WINDOW not in model_config.layer_kinds:
        log.warning("%s has no effect: this model has no sliding-window layers", names[0])
    return config
