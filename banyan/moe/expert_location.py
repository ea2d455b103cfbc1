"""ExpertMap: the expert at each place of each layer, the same on every rank; and its initial value:
in order, from a file, or balanced by counts from a file.

There are more places than experts if some have copies. The places of a rank follow each other.
"""

from collections.abc import Sequence

import numpy as np
import torch

from banyan.base.errors import ConfigError, ModelError
from banyan.base.json_types import is_object, unique_json
from banyan.base.os import read_whole
from banyan.config.schema import Config
from banyan.formats.arrays import read_arrays
from banyan.model_config.model_config import ModelConfig
from banyan.moe.eplb import balanced, trivial
from banyan.moe.rules import TRIVIAL, are_placed
from banyan.ops.experts_api import ExpertPlaces
from banyan.parallel.groups import Groups


class ExpertMap:
    """Args:
    logical: [layers, places], the expert at each place; every expert has a place.
    experts: number per layer.
    rank, ranks: this one among those that share the places.
    dispatch: which copy of an expert a token uses: "static", "dynamic", or "fake", which
        replaces the chosen experts by others so that loads are equal.
    device: of the tables that kernels read; the host if None.
    """

    def __init__(
        self,
        logical: np.ndarray,
        experts: int,
        rank: int,
        ranks: int,
        dispatch: str,
        device: torch.device | None = None,
    ) -> None:
        layers, places = logical.shape
        assert places % ranks == 0 and experts % ranks == 0
        self.logical = logical.copy()
        self.experts, self.rank, self.ranks = experts, rank, ranks
        self.is_fake = dispatch == "fake"
        self.dispatch = "dynamic" if self.is_fake else dispatch
        self.of_rank = places // ranks
        self.home = experts // ranks
        """Experts per rank before any move: sums are computed in that order."""
        room = places - experts + 1
        self.tables = [
            ExpertPlaces(
                torch.zeros(experts, room, dtype=torch.int32, device=device),
                torch.zeros(experts, dtype=torch.int32, device=device),
            )
            for _ in range(layers)
        ]
        for layer in range(layers):
            self.enter(layer, logical[layer])

    @property
    def total(self) -> int:
        """Places of a layer, on all ranks."""
        return self.logical.shape[1]

    @property
    def first(self) -> int:
        """The first place of this rank."""
        return self.rank * self.of_rank

    def mine(self, layer: int) -> list[int]:
        """The experts at this rank's places."""
        return self.logical[layer, self.first : self.first + self.of_rank].tolist()

    def enter(self, layer: int, logical: Sequence[int] | np.ndarray) -> None:
        """Set the experts of a layer; the next steps use them."""
        self.logical[layer] = logical
        table = self.tables[layer]
        slots = np.zeros(table.slots.shape, np.int32)
        copies = np.zeros(self.experts, np.int32)
        for place, expert in enumerate(self.logical[layer].tolist()):
            slots[expert, copies[expert]] = place
            copies[expert] += 1
        table.slots.copy_(torch.from_numpy(slots))
        table.copies.copy_(torch.from_numpy(copies))

    def copies(self, layer: int) -> np.ndarray:
        """Number of places of each expert of a layer."""
        return np.bincount(self.logical[layer], minlength=self.experts)


_FLAG = "--init-expert-location"
_MAP, _COUNTS = "physical_to_logical_map", "logical_count"
_MAX_BYTES = 64 << 20


def open_expert_map(
    config: Config, model_config: ModelConfig, groups: Groups, device: torch.device
) -> ExpertMap | None:
    """None if experts are in order, without copies.

    Raises:
        ConfigError: the location does not fit this model.
    """
    if model_config.experts is None or not are_placed(config):
        return None
    count, experts = model_config.experts.count, config.experts
    places, ranks = count + experts.redundant, groups.experts.size
    logical = trivial(model_config.num_layers, count, places)
    if experts.location != TRIVIAL:
        found = read_location(experts.location)
        logical = location_map(found, model_config.num_layers, count, places, ranks)
    dispatch = experts.dispatch or "static"
    return ExpertMap(logical, count, groups.experts.rank, ranks, dispatch, device)


def read_location(location: str) -> dict[str, np.ndarray]:
    """Read --init-expert-location: JSON or a file.

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
    """Nested lists of numbers; refuses true and false, which NumPy would read as 1 and 0."""
    found = np.array(value)
    if any(type(cell) is bool for cell in np.array(value, object).flat):
        raise ValueError(f"{name} has true or false among its numbers")
    return found


def location_map(
    found: dict[str, np.ndarray], layers: int, experts: int, places: int, ranks: int
) -> np.ndarray:
    """The expert at each place, [layers, places].

    Raises:
        ConfigError: the file is not for such a model.
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
