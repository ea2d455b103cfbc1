"""ExpertMap: which expert lies at each place of each layer, on every rank alike.

Places are more than experts where some have copies; those of a rank follow each other. Knows
nothing of why an expert lies where it does.
"""

from collections.abc import Sequence

import numpy as np
import torch

from banyan.ops.experts_api import ExpertPlaces


class ExpertMap:
    """
    Args:
        logical: [layers, places], the expert at each place; each expert at one at least.
        experts: how many a layer has.
        rank, ranks: this one among those that share the places.
        dispatch: which of an expert's places a token goes to: "static", "dynamic" or "fake", which
            takes other experts, each as often as the others.
    """

    def __init__(
        self, logical: np.ndarray, experts: int, rank: int, ranks: int, dispatch: str
    ) -> None:
        layers, places = logical.shape
        assert places % ranks == 0 and experts % ranks == 0
        self.logical = logical.copy()
        self.experts, self.rank, self.ranks = experts, rank, ranks
        self.is_fake = dispatch == "fake"
        self.dispatch = "dynamic" if self.is_fake else dispatch
        self.of_rank = places // ranks
        self.home = experts // ranks
        """Experts of a rank where nothing was moved: sums are in the order that they have there."""
        room = places - experts + 1
        self.tables = [
            ExpertPlaces(
                torch.zeros(experts, room, dtype=torch.int32),
                torch.zeros(experts, dtype=torch.int32),
            )
            for _ in range(layers)
        ]
        for layer in range(layers):
            self.enter(layer, logical[layer])

    @property
    def first(self) -> int:
        """The first place of this rank."""
        return self.rank * self.of_rank

    def mine(self, layer: int) -> list[int]:
        """The experts at this rank's places."""
        return self.logical[layer, self.first : self.first + self.of_rank].tolist()

    def enter(self, layer: int, logical: Sequence[int] | np.ndarray) -> None:
        """Experts of a layer lie so from now on; steps read it."""
        self.logical[layer] = logical
        slots, copies = (t.numpy() for t in self._table(layer))
        copies[:] = 0
        for place, expert in enumerate(self.logical[layer].tolist()):
            slots[expert, copies[expert]] = place
            copies[expert] += 1

    def _table(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tables[layer].slots, self.tables[layer].copies
