"""Where experts lie at the start: in their order, as a file says, or balanced by counts in one."""

import numpy as np

from banyan.base.errors import ConfigError, ModelError
from banyan.base.json_types import is_object, unique_json
from banyan.base.read_file import read_whole
from banyan.config.schema import Config
from banyan.formats.arrays import read_arrays
from banyan.model_config.model_config import ModelConfig
from banyan.moe.expert_map import ExpertMap
from banyan.moe.load_balancing import balanced, trivial
from banyan.moe.rules import TRIVIAL, are_placed
from banyan.parallel.groups import Groups
from banyan.platform.base import Traits

_FLAG = "--init-expert-location"
_MAP, _COUNTS = "physical_to_logical_map", "logical_count"
_MAX_BYTES = 64 << 20


def open_expert_map(
    config: Config, model_config: ModelConfig, groups: Groups, traits: Traits
) -> ExpertMap | None:
    """None where experts lie in their order, once.

    Raises:
        ConfigError: the location is not one of this model's, or the device does not move experts.
    """
    if model_config.experts is None or not are_placed(config):
        return None
    if not traits.is_host:
        raise ConfigError(
            f"experts lie in their order on {traits.name}; copies of them are served on CPUs",
            hint="leave --ep-num-redundant-experts, --init-expert-location, "
            "--ep-dispatch-algorithm and --enable-eplb out, or use --device cpu",
        )
    count, experts = model_config.experts.count, config.experts
    places, ranks = count + experts.redundant, groups.experts.size
    logical = trivial(model_config.num_layers, count, places)
    if experts.location != TRIVIAL:
        found = read_location(experts.location)
        logical = map_of(found, model_config.num_layers, count, places, ranks)
    return ExpertMap(logical, count, groups.experts.rank, ranks, experts.dispatch or "static")


def read_location(location: str) -> dict[str, np.ndarray]:
    """What JSON, or a file, says of experts.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if location.endswith(".safetensors"):
            return read_arrays(location)
        text = location
        if not location.lstrip().startswith("{"):
            text = read_whole(location, _MAX_BYTES).decode()
        found = unique_json(text)
        assert is_object(found)
        named = {name: found[name] for name in (_MAP, _COUNTS) if name in found}
        return {name: _numbers(name, value) for name, value in named.items()}
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, AssertionError) as error:
        raise ConfigError(f"{_FLAG} cannot be read: {error or 'it is no object'}") from None
    except ModelError as error:
        raise ConfigError(f"{_FLAG}: {error}") from None


def _numbers(name: str, value: object) -> np.ndarray:
    """Nested lists of numbers; NumPy takes true and false among them as 1 and 0."""
    found = np.array(value)
    if any(type(cell) is bool for cell in np.array(value, object).flat):
        raise ValueError(f"{name} has true or false among its numbers")
    return found


def map_of(
    found: dict[str, np.ndarray], layers: int, experts: int, places: int, ranks: int
) -> np.ndarray:
    """The expert at each place, [layers, places].

    Raises:
        ConfigError: what was found is not of such a model.
    """
    if _MAP in found:
        logical = found[_MAP]
        if logical.dtype.kind != "i":
            raise ConfigError(f"{_FLAG}: {_MAP} holds something else than whole numbers")
        if logical.shape != (layers, places):
            raise ConfigError(
                f"{_FLAG}: {_MAP} is {list(logical.shape)}, the model has {layers} layers, and "
                f"{places} places with --ep-num-redundant-experts {places - experts}"
            )
        for layer, row in enumerate(logical.tolist()):
            if set(row) != set(range(experts)):
                raise ConfigError(
                    f"{_FLAG}: layer {layer} of {_MAP} does not hold each of {experts} experts, "
                    "and nothing else"
                )
        return logical
    if _COUNTS not in found:
        raise ConfigError(f"{_FLAG} has neither {_MAP} nor {_COUNTS}")
    counts = found[_COUNTS]
    if counts.dtype.kind not in "if" or not np.isfinite(counts).all() or not counts.size:
        raise ConfigError(f"{_FLAG}: {_COUNTS} holds something else than finite numbers")
    counts = counts.astype(np.float64)
    if counts.ndim > 2:
        counts = counts.reshape(-1, *counts.shape[-2:]).sum(0)
    if counts.shape != (layers, experts) or counts.min() < 0:
        raise ConfigError(
            f"{_FLAG}: {_COUNTS} is {list(counts.shape)}, the model has {layers} layers of "
            f"{experts} experts, and counts are not negative"
        )
    return balanced(counts, places, ranks)
