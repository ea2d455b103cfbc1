"""--radix-eviction-policy-config: the numbers that some policies of eviction take."""

from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig

_FLAG = "--radix-eviction-policy-config"
_MOST = 1 << 31

_NUMBERS: dict[str, dict[str, tuple[int, bool]]] = {
    "slru": {"protected_threshold": (1, False)},
    "tlru": {"threshold": (1, True), "next_prompt_estimate": (0, True)},
}
"""Policy -> key -> (least, whether it must be given)."""


def check_the_eviction(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    """Each number has a place in the policy, and is one."""
    policy, given = config.cache.eviction, config.cache.eviction_numbers
    known = _NUMBERS.get(policy, {})
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"{_FLAG}: {policy} takes no {printable(str(key), 40)!r}",
                hint=f"it takes {' and '.join(known) or 'no numbers'}",
            )
        least, _ = known[key]
        if type(value) is not int or not least <= value < _MOST:
            shown = printable(repr(value), 40)
            raise ConfigError(f"{_FLAG}: {key} must be an integer in [{least}, 2^31), got {shown}")
    missing = [key for key, (_, is_needed) in known.items() if is_needed and key not in given]
    if missing:
        raise ConfigError(
            f"--radix-eviction-policy {policy} needs {' and '.join(missing)}",
            hint=f'give {_FLAG} \'{{"threshold": 4096, "next_prompt_estimate": 512}}\', in tokens: '
            "how many may be left to compute, and how many a prompt adds",
        )
    if policy == "tlru" and given["threshold"] <= given["next_prompt_estimate"]:
        raise ConfigError(
            f"{_FLAG}: threshold {given['threshold']} must be above next_prompt_estimate "
            f"{given['next_prompt_estimate']}",
            hint="or use --radix-eviction-policy lru, which it would be the same as",
        )
    return config
