"""ExpertMover: brings the weights of experts to the places that an order names.

Ranks hand experts to one another, layer by layer; every rank knows from the order alone what it
gives and what it gets.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from banyan.base.errors import DeviceError
from banyan.base.log import logger
from banyan.layers.build import Build
from banyan.messages.control_ops import ControlOp, PlaceExperts
from banyan.models.base import Model
from banyan.moe.expert_map import ExpertMap
from banyan.moe.layer import Experts
from banyan.ops.experts_api import PackedExperts
from banyan.parallel.groups import Group
from banyan.runner.control_ops import Finish, RankReply

log = logger(__name__)


class ExpertMover:
    """
    Args:
        build: of the model; its places tell where experts are.
        model: the one that runs, None while its weights are released.
    """

    def __init__(self, build: Build, model: Callable[[], Model | None]) -> None:
        assert build.places is not None
        self._places, self._group = build.places, build.groups.experts
        self._model = model

    def prepare(self, order: ControlOp) -> Finish:
        """
        Raises:
            DeviceError: the weights are not there, or the order is not for this model.
        """
        assert isinstance(order, PlaceExperts)
        model = self._model()
        if model is None:
            log.info("experts are not moved: the weights are released")
            raise DeviceError("the weights are released")
        assert isinstance(model, nn.Module)
        layers = {m.layer: m for m in model.modules() if isinstance(m, Experts)}
        experts, count = self._places.experts, self._places.logical.shape[1]
        for layer, row in zip(order.layers, order.places, strict=True):
            if layer not in layers or len(row) != count or set(row) != set(range(experts)):
                raise DeviceError(f"experts of layer {layer} cannot lie so")

        def move() -> RankReply:
            moved = 0
            for layer, row in zip(order.layers, order.places, strict=True):
                packed = layers[layer].packed
                assert packed is not None
                moved += move_experts(packed, self._places, layer, row, self._group)
            if not self._group.rank:
                log.info("experts moved: layers=%d experts=%d", len(order.layers), moved)
            return RankReply(f"{moved} experts of {len(order.layers)} layers moved.")

        return move


def move_experts(
    packed: PackedExperts, places: ExpertMap, layer: int, wanted: list[int], group: Group
) -> int:
    """Bring the experts of a layer to their places, on every rank of `group` at once; how many
    were not there before."""
    staged: dict[int, list[Tensor]] = {}
    changes = list(moves(places.logical[layer], wanted, places.of_rank))
    for source, target in changes:
        giver, taker = source // places.of_rank, target // places.of_rank
        if places.rank == giver:
            parts = packed.parts(source - places.first)
            if giver == taker:
                staged[target] = [part.clone() for part in parts]
            else:
                for part in parts:
                    group.send(part.view(-1), taker)
        elif places.rank == taker:
            staged[target] = [torch.empty_like(p) for p in packed.parts(target - places.first)]
            for part in staged[target]:
                group.recv(part.view(-1), giver)
    for target, parts in staged.items():
        packed.put(target - places.first, parts)
    places.enter(layer, wanted)
    return len(changes)


def moves(present: np.ndarray, wanted: list[int], of_rank: int) -> Iterator[tuple[int, int]]:
    """From which place to which an expert goes: from one of the same rank if there is one, else
    from the first that has it."""
    for target, expert in enumerate(wanted):
        if int(present[target]) == expert:
            continue
        there = np.flatnonzero(present == expert).tolist()
        near = [place for place in there if place // of_rank == target // of_rank]
        yield (near or there)[0], target
