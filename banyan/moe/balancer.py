"""ExpertBalancer and ExpertMover: expert parallel load balancing (EPLB) while serving.

Rank 0 counts the experts that tokens choose, and moves experts by control ops, one chunk of layers
at a time with a step between. With DP attention or pipeline parallelism no single plan reaches all
ranks: each rank has a balancer, and the ranks that share experts run the same steps, count the same
and move at the same time.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from banyan.base.errors import DeviceError
from banyan.base.log import logger
from banyan.config.schema import Config, ExpertsConfig
from banyan.layers.build import Build
from banyan.messages.control_ops import ControlOp, PlaceExperts
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import Model
from banyan.moe.eplb import balanced, kept_in_place, unevenness
from banyan.moe.expert_location import ExpertMap
from banyan.moe.layer import Experts
from banyan.moe.routing_record import ExpertLayers, counts_of
from banyan.moe.rules import balances_by_itself, groups_and_nodes
from banyan.ops.experts_api import PackedExperts
from banyan.parallel.groups import Group
from banyan.runner.control_ops import Finish, RankReply

log = logger(__name__)


def open_balancer(
    config: Config, model_config: ModelConfig, build: Build, wake: Callable[[], None]
) -> "ExpertBalancer | None":
    """The balancer of rank 0; None if experts are not balanced, or if each rank balances by itself.

    Args:
        wake: called, from any thread, when an op is due.
    """
    facts = model_config.experts
    if not config.experts.balances or facts is None or build.watch is None or build.places is None:
        return None
    if balances_by_itself(config):
        return None
    layers = ExpertLayers.of(facts, model_config.num_layers)
    groups = groups_and_nodes(config, facts)
    balancer = ExpertBalancer(config.experts, layers, build.places, groups, wake)
    build.watch.local_observers.append(balancer.ran)
    return balancer


def balance_between_steps(
    config: Config, model_config: ModelConfig, build: Build, model: Callable[[], Model | None]
) -> None:
    """Let this rank move experts between steps, if ranks balance by themselves. All ranks that
    share experts do the same.

    model: the one that runs.
    """
    facts, watch, places, loaded = model_config.experts, build.watch, build.places, model()
    if not balances_by_itself(config) or facts is None or watch is None or places is None:
        return
    assert isinstance(loaded, nn.Module)
    mine = tuple(sorted(m.layer for m in loaded.modules() if isinstance(m, Experts)))
    layers = ExpertLayers(facts.count, facts.per_token, model_config.num_layers, mine)
    balancer = ExpertBalancer(
        config.experts,
        layers,
        places,
        groups_and_nodes(config, facts),
        is_reporting=not build.groups.experts.rank,
    )
    mover = ExpertMover(build, model)

    def ran(chosen: np.ndarray, positions: np.ndarray) -> None:
        balancer.ran(chosen, positions)
        for order in balancer.due():
            mover.prepare(order)()

    if mine:  # a stage may have none
        watch.local_observers.append(ran)


class ExpertBalancer:
    """Args:
    places: location of experts; read here, changed by ops.
    groups: number of expert groups and of nodes, for `eplb.balanced`.
    is_reporting: log results at level INFO.
    """

    def __init__(
        self,
        experts: ExpertsConfig,
        layers: ExpertLayers,
        places: ExpertMap,
        groups: tuple[int, int] = (1, 1),
        wake: Callable[[], None] = lambda: None,
        is_reporting: bool = True,
    ) -> None:
        self._level = logging.INFO if is_reporting else logging.DEBUG
        self._experts, self._layers, self._places = experts, layers, places
        self._groups, self._ring = groups, wake
        self._waiting: deque[PlaceExperts] = deque()
        """Chunks to move; the engine loop's thread takes them, the runner's adds them."""
        self._has_run = False
        """A step has run since the last op."""
        self._begin()

    def ran(self, chosen: np.ndarray, positions: np.ndarray) -> None:
        """Count a step. chosen: [layers with experts, tokens, per_token]."""
        self._has_run = True
        if self._waiting:
            self._ring()
            return
        counts = counts_of(chosen, self._layers.count)
        self._sum += counts
        self._busy += self._utilization(counts)
        self._passes += 1
        experts = self._experts
        if self._passes >= experts.iterations:
            self._plan()
            self._begin()

    def due(self) -> list[ControlOp]:
        """The op for the next plan, if any."""
        if not self._waiting or not self._has_run:
            return []
        self._has_run = False
        return [self._waiting.popleft()]

    def _begin(self) -> None:
        """Reset the counts."""
        self._passes, self._busy = 0, 0.0
        self._sum = np.zeros((len(self._layers.sparse), self._layers.count), np.int64)

    def _utilization(self, counts: np.ndarray) -> float:
        """Mean load of ranks over the largest, averaged over layers."""
        places = self._places
        at = places.logical[list(self._layers.sparse)]
        shares = counts / np.stack([places.copies(layer) for layer in self._layers.sparse])
        loads = np.take_along_axis(shares, at, 1).reshape(len(at), places.ranks, -1).sum(-1)
        return float(np.mean(loads.mean(-1) / np.maximum(loads.max(-1), 1e-9)))

    def _plan(self) -> None:
        busy, places, experts = self._busy / self._passes, self._places, self._experts
        if busy > experts.threshold:
            log.log(self._level, "experts stay: utilization=%.3f passes=%d", busy, self._passes)
            return
        sparse = list(self._layers.sparse)
        present, count = places.logical[sparse], places.logical.shape[1]
        wanted = balanced(self._sum, count, places.ranks, *self._groups)
        wanted = np.stack(
            [
                kept_in_place(new, old, places.ranks)
                for new, old in zip(wanted, present, strict=True)
            ]
        )
        before, after = (unevenness(self._sum, at, places.ranks) for at in (present, wanted))
        changed = [i for i in range(len(sparse)) if not np.array_equal(wanted[i], present[i])]
        log.log(
            self._level,
            "experts move: layers=%d utilization=%.3f passes=%d busiest rank %.2f -> %.2f of mean",
            len(changed),
            busy,
            self._passes,
            before,
            after,
        )
        size = experts.chunk_layers or len(changed) or 1
        for first in range(0, len(changed), size):
            chunk = changed[first : first + size]
            layers, rows = [sparse[i] for i in chunk], [wanted[i].tolist() for i in chunk]
            self._waiting.append(PlaceExperts(layers, rows))
        if self._waiting:
            self._ring()


class ExpertMover:
    """Moves weights of experts between ranks, layer by layer. Every rank derives its sends and
    receives from the op alone.

    Args:
        build: of the model, with the locations of experts.
        model: the model that runs; None while its weights are released.
        stream: the stream of the steps.
    """

    def __init__(
        self,
        build: Build,
        model: Callable[[], Model | None],
        stream: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        assert build.places is not None
        self._places, self._group = build.places, build.groups.experts
        self._model, self._stream = model, stream

    def prepare(self, order: ControlOp) -> Finish:
        """Raises:
        DeviceError: the weights are released, or the op does not fit the model.
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
                with self._stream():
                    moved += move_experts(packed, self._places, layer, row, self._group)
            if not self._group.rank:
                log.info("experts moved: layers=%d experts=%d", len(order.layers), moved)
            return RankReply(f"{moved} experts of {len(order.layers)} layers moved.")

        return move


def move_experts(
    packed: PackedExperts, places: ExpertMap, layer: int, wanted: list[int], group: Group
) -> int:
    """Move the experts of a layer, on every rank of `group` at once; returns how many moved."""
    staged: dict[int, list[Tensor]] = {}
    changes = list(moves(places.logical[layer], wanted, places.of_rank))
    for source, target in changes:
        source_rank, target_rank = source // places.of_rank, target // places.of_rank
        if places.rank == source_rank:
            parts = packed.parts(source - places.first)
            if source_rank == target_rank:
                staged[target] = [part.clone() for part in parts]
            else:
                for part in parts:
                    group.send(part.view(-1), target_rank)
        elif places.rank == target_rank:
            staged[target] = [torch.empty_like(p) for p in packed.parts(target - places.first)]
            for part in staged[target]:
                group.recv(part.view(-1), source_rank)
    for target, parts in staged.items():
        packed.put(target - places.first, parts)
    places.enter(layer, wanted)
    return len(changes)


def moves(present: np.ndarray, wanted: list[int], of_rank: int) -> Iterator[tuple[int, int]]:
    """(source, target) places of experts that move: from the same rank if possible, else from the
    first place with the expert."""
    for target, expert in enumerate(wanted):
        if int(present[target]) == expert:
            continue
        there = np.flatnonzero(present == expert).tolist()
        near = [place for place in there if place // of_rank == target // of_rank]
        yield (near or there)[0], target
