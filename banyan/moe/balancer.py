"""ExpertBalancer: counts the choices of experts and says when, and how, they should move.

On rank 0, which routes as all ranks do. It gives orders, one chunk of layers at a time, with a step
between two of them; what an order does is `expert_mover.py`'s. Where replicas work on one batch, or
stages on several plans, there is one on every rank: the ranks that share experts run the same steps
and count the same, so each carries out between two of them what the others do at that moment.
"""

import logging
from collections import deque
from collections.abc import Callable

import numpy as np
from torch import nn

from banyan.base.log import logger
from banyan.config.schema import Config, ExpertsConfig
from banyan.layers.build import Build
from banyan.messages.control_ops import ControlOp, PlaceExperts
from banyan.model_config.model_config import ModelConfig
from banyan.models.base import Model
from banyan.moe.expert_map import ExpertMap
from banyan.moe.expert_mover import ExpertMover
from banyan.moe.layer import Experts
from banyan.moe.load_balancing import balanced, kept_in_place, unevenness
from banyan.moe.routing_record import ExpertLayers, counts_of
from banyan.moe.rules import balances_by_itself, groups_and_nodes

log = logger(__name__)


def open_balancer(
    config: Config, model_config: ModelConfig, build: Build, ring: Callable[[], None]
) -> "ExpertBalancer | None":
    """None where experts stay where they are.

    Args:
        ring: called, from any thread, when an order is due.
    """
    facts = model_config.experts
    if not config.experts.balances or facts is None or build.watch is None or build.places is None:
        return None
    if balances_by_itself(config):
        return None
    layers = ExpertLayers.of(facts, model_config.num_layers)
    groups = groups_and_nodes(config, facts)
    balancer = ExpertBalancer(config.experts, layers, build.places, groups, ring)
    build.watch.heard.append(balancer.ran)
    return balancer


def balance_between_steps(
    config: Config, model_config: ModelConfig, build: Build, model: Callable[[], Model | None]
) -> None:
    """Let this rank move experts by itself, where that is how they move. model: the one that runs.

    All ranks that share experts do so.
    """
    facts, watch, places, loaded = model_config.experts, build.watch, build.places, model()
    if not balances_by_itself(config) or facts is None or watch is None or places is None:
        return
    assert isinstance(loaded, nn.Module)
    mine = tuple(sorted(m.layer for m in loaded.modules() if isinstance(m, Experts)))
    layers = ExpertLayers(facts.count, facts.per_token, model_config.num_layers, mine)
    balancer = ExpertBalancer(
        *(config.experts, layers, places, groups_and_nodes(config, facts)),
        tells=not build.groups.experts.rank,
    )
    mover = ExpertMover(build, model)

    def ran(chosen: np.ndarray, positions: np.ndarray) -> None:
        balancer.ran(chosen, positions)
        for order in balancer.due():
            mover.prepare(order)()

    if mine:  # a stage may have none
        watch.heard.append(ran)


class ExpertBalancer:
    """
    Args:
        places: where experts are; read here, changed by orders.
        groups: of experts that stay together, and the nodes that they stay on.
        tells: what it finds stands in the log.
    """

    def __init__(
        self,
        experts: ExpertsConfig,
        layers: ExpertLayers,
        places: ExpertMap,
        groups: tuple[int, int] = (1, 1),
        ring: Callable[[], None] = lambda: None,
        tells: bool = True,
    ) -> None:
        self._level = logging.INFO if tells else logging.DEBUG
        self._experts, self._layers, self._places = experts, layers, places
        self._groups, self._ring = groups, ring
        self._waiting: deque[PlaceExperts] = deque()
        """Chunks to come; the loop's thread takes them, the runner's adds them."""
        self._has_run = False
        """A step has run since the last order."""
        self._begin()

    def ran(self, chosen: np.ndarray, positions: np.ndarray) -> None:
        """Count a pass. chosen: [layers with experts, tokens, per_token]."""
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
        """The order that the next plan should be, if any."""
        if not self._waiting or not self._has_run:
            return []
        self._has_run = False
        return [self._waiting.popleft()]

    def _begin(self) -> None:
        """Count from nothing."""
        self._passes, self._busy = 0, 0.0
        self._sum = np.zeros((len(self._layers.sparse), self._layers.count), np.int64)

    def _utilization(self, counts: np.ndarray) -> float:
        """Mean load of the ranks over the largest, averaged over the layers."""
        places = self._places
        at = places.logical[list(self._layers.sparse)]
        copies = np.stack([table.copies.numpy() for table in places.tables])
        shares = counts / copies[list(self._layers.sparse)]
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
            *(len(changed), busy, self._passes, before, after),
        )
        size = experts.chunk_layers or len(changed) or 1
        for first in range(0, len(changed), size):
            chunk = changed[first : first + size]
            layers, rows = [sparse[i] for i in chunk], [wanted[i].tolist() for i in chunk]
            self._waiting.append(PlaceExperts(layers, rows))
        if self._waiting:
            self._ring()
