"""Nodes started by a Ray cluster (--use-ray): one actor per node.

Ray chooses the machines and reports dead actors. Everything else works as in
`engine/multi_node.py`; the secret never goes through Ray. Needs the package ray.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from banyan.base.errors import ConfigError, DeviceError
from banyan.base.log import logger, printable, start_logging
from banyan.config.env import read_environment
from banyan.config.resolve import find_model
from banyan.config.schema import ParallelConfig
from banyan.engine.multi_node import check_secret, own_hello, serve_node
from banyan.engine.process_spec import ProcessSpec

log = logger(__name__)

_LOOK_S = 1.0
_END_S = 5.0
"""Time for actors to end after the engine."""
_PORTS = range(21000, 29000, 2)


class RayNodes:
    """Nodes 1, 2 … of a replica, as actors of this machine's Ray cluster.

    They end with this process.

    Attributes:
        parallel: the given config, with the address at which the leader listens.

    Raises:
        ConfigError: this machine has no Ray cluster, or the cluster has too few machines.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        _join(parallel.meet_timeout_s)
        own = ray.get_runtime_context().get_node_id()
        alive = [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
        self._places = rank_addresses_of(parallel, own, alive)
        self.parallel = parallel if parallel.meeting else _with_meeting(parallel)
        self._actors: dict[ray.ObjectRef[None], tuple[str, object]] = {}
        """Reference to the end of an actor -> (its name, the actor)."""
        self._thread = threading.Thread(target=self._look, name="ray-nodes", daemon=True)
        self._on_death: Callable[[str], None] | None = None
        self._is_closing = False
        self._lost = ""

    def start(self, process_spec: ProcessSpec) -> None:
        """Start the actors; each connects to the leader at the address in `parallel`."""
        encoded_spec = replace(
            process_spec, config=replace(process_spec.config, parallel=self.parallel)
        ).encode()
        kept = ray.remote(num_cpus=self.parallel.local_world, max_restarts=0)(KeptNode)
        for node, place in enumerate(self._places, 1):
            there = NodeAffinitySchedulingStrategy(place, soft=False)
            actor = kept.options(scheduling_strategy=there).remote()
            self._actors[actor.run.remote(encoded_spec, node)] = (f"node {node} (by Ray)", actor)
            log.info("Ray starts node %d on its node %s", node, place[:12])
        self._thread.start()

    def check(self) -> None:
        """
        Raises:
            DeviceError: a node has died.
        """
        if self._lost:
            raise DeviceError(self._lost)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` from a thread when a node ends unexpectedly."""
        self._on_death = on_death
        if self._lost:
            on_death(self._lost)

    def close(self) -> None:
        """End the actors. The leader has already asked their nodes to end."""
        self._is_closing = True
        with suppress(Exception):  # the cluster may be gone
            ray.wait(list(self._actors), num_returns=len(self._actors), timeout=_END_S)
            for _, actor in self._actors.values():
                ray.kill(actor)
        if self._thread.ident is not None:
            self._thread.join(_END_S)
        ray.shutdown()

    def _look(self) -> None:
        while not self._is_closing:
            ended, _ = ray.wait(list(self._actors), num_returns=1, timeout=_LOOK_S)
            if ended and not self._is_closing:
                return self._lose(ended[0])

    def _lose(self, ended: "ray.ObjectRef[None]") -> None:
        try:
            ray.get(ended)
            how = "has ended"
        except RayActorError as error:
            how = f"has died: {printable(str(error).partition(chr(10))[0], 200)}"
        except RayTaskError as error:
            how = printable(str(error.cause), 300)
        self._lost = f"{self._actors[ended][0]} {how}"
        log.error("%s", self._lost)
        if self._on_death is not None:
            self._on_death(self._lost)


class KeptNode:
    """The actor that runs one node."""

    def run(self, encoded_spec: bytes, node: int) -> None:
        """Run the ranks of a node until the leader's engine ends.

        Args:
            encoded_spec: a `ProcessSpec`. The model is searched on this machine, by the name in its
                config.
        """
        process_spec = ProcessSpec.decode(encoded_spec)
        start_logging(f"node{node}", process_spec.config.observe.log_level)
        environment = read_environment()
        _, model_config = find_model(process_spec.config, environment)
        parallel = replace(process_spec.config.parallel, node=node)
        check_secret(parallel, environment.dist_secret)
        hello = own_hello(parallel, model_config)
        serve_node(parallel, environment.dist_secret, hello, model_config.path, comes_again=False)


def rank_addresses_of(parallel: ParallelConfig, own: str, alive: list[str]) -> list[str]:
    """The Ray node of each node but the first, which is on `own`.

    Each node gets a machine of its own. If every rank is a node (`are_by_rank`), the nodes are
    spread evenly over the machines.

    Raises:
        ConfigError: the cluster has too few machines.
    """
    others = sorted(set(alive) - {own})
    if parallel.are_by_rank:
        found = [own, *others]
        return [found[node * len(found) // parallel.nodes] for node in range(1, parallel.nodes)]
    if len(others) + 1 < parallel.nodes:
        raise ConfigError(
            f"--nnodes {parallel.nodes} --use-ray: the Ray cluster has {len(others) + 1} "
            f"node{'s' if others else ''}, this one included",
            hint="start ray on more machines, or leave out --nnodes: then Ray starts every rank",
        )
    return others[: parallel.nodes - 1]


def _join(timeout_s: float) -> None:
    """Connect to the cluster of this machine.

    This runs in a thread: Ray waits very long for a cluster that is gone, and in the main thread it
    would replace the signal handlers of this process.
    """
    errors: list[Exception] = []

    def join() -> None:
        try:
            ray.init(address="auto", logging_level="warning", configure_logging=False)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=join, name="ray-join", daemon=True)
    thread.start()
    thread.join(timeout_s)
    why = printable(str(errors[0]), 200) if errors else f"no answer within {timeout_s:g} s"
    if errors or thread.is_alive():
        raise ConfigError(
            f"--use-ray: this machine belongs to no Ray cluster that answers: {why}",
            hint="run `ray start --head` on one machine, and `ray start --address` on the others; "
            "RAY_ADDRESS names a cluster that is elsewhere",
        )


def _with_meeting(parallel: ParallelConfig) -> ParallelConfig:
    """Add an address of this machine with two consecutive free ports."""
    host = get_node_ip_address()
    for port in _PORTS:
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind((host, port))
            second.bind((host, port + 1))
            return replace(parallel, meeting=f"{host}:{port}")
    raise ConfigError(f"--use-ray: no port of {host} is free", hint="name one by --dist-init-addr")
