"""Upper bounds of histograms of lengths, from the words of a flag."""

import math
from collections.abc import Sequence

from banyan.base.errors import ConfigError
from banyan.config.env import Environment
from banyan.config.schema import Config
from banyan.model_config.model_config import ModelConfig

_LENGTHS = tuple(float(1 << power) for power in range(4, 21))
_MAX_BOUNDS = 256


def check_histogram_buckets(
    config: Config, model_config: ModelConfig, environment: Environment
) -> Config:
    bounds_of(config.observe.prompt_buckets)
    bounds_of(config.observe.output_buckets)
    return config


def bounds_of(rule: Sequence[str]) -> tuple[float, ...]:
    """Upper bounds from `default`, `custom N …`, or `tse MIDDLE BASE COUNT`: COUNT bounds on either
    side of MIDDLE, at distances that grow by the factor BASE.

    Raises:
        ConfigError: another rule, or numbers that are none.
    """
    if not rule or rule[0] == "default":
        return _LENGTHS
    try:
        numbers = [float(word) for word in rule[1:]]
    except ValueError:
        numbers = []
    if not all(0 < number < math.inf for number in numbers):
        numbers = []
    if rule[0] == "custom" and 0 < len(numbers) <= _MAX_BOUNDS:
        return tuple(sorted(set(numbers)))
    if rule[0] == "tse" and len(numbers) == 3 and numbers[1] > 1 and 1 <= numbers[2] <= 64:
        middle, base, count = numbers
        steps = [base**power for power in range(1, math.ceil(count / 2) + 1)]
        found = {middle, *(middle + step for step in steps), *(middle - step for step in steps)}
        return tuple(sorted(bound for bound in found if 0 < bound < math.inf))
    raise ConfigError(
        f"{' '.join(rule)!r} is no rule for bounds of lengths",
        hint="write default, custom N … (positive numbers), or tse MIDDLE BASE COUNT with BASE "
        "above 1 and COUNT up to 64",
    )
