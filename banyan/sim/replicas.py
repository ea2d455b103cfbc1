"""Several simulated replicas with the real routing policies."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from banyan.messages.plan import TRANSFER_ID_BYTES
from banyan.scheduler.routing import Route
from banyan.sim.replica import SimulatedReplica
from banyan.sim.report import SimulationReport, report
from banyan.sim.workload import Arrival
from banyan.sim.world import World


class ReplicaSet:
    """Gives every arrival to the replica that the route names."""

    def __init__(self, world: World, replicas: list[SimulatedReplica], route: Route) -> None:
        self._world = world
        self._replicas = replicas
        self._route = route
        self._routed = 0
        self._queue: Iterator[Arrival] = iter(())
        for replica in replicas:
            replica.on_end = self._submit_next

    def play(self, arrivals: Iterable[Arrival]) -> None:
        """Submit every arrival at its time."""
        for arrival in arrivals:
            self._world.at(arrival.at_s, lambda arrival=arrival: self._arrive(arrival))

    def play_at_concurrency(self, arrivals: Iterable[Arrival], concurrency: int) -> None:
        """Keep `concurrency` requests open until `arrivals` run out; their times are ignored."""
        self._queue = iter(arrivals)
        for _ in range(concurrency):
            self._submit_next()

    def report(self) -> SimulationReport:
        """Of all replicas together."""
        return report(
            [visit for replica in self._replicas for visit in replica.visits],
            self._world.clock.now(),
            sum(replica.counters.steps for replica in self._replicas),
            sum(replica.counters.retractions for replica in self._replicas),
        )

    def _arrive(self, arrival: Arrival) -> None:
        self._routed += 1
        self._routed_to(self._replicas).submit(arrival)

    def _routed_to(self, replicas: Sequence[SimulatedReplica]) -> SimulatedReplica:
        requests = [replica.open_requests for replica in replicas]
        tokens = [replica.open_tokens for replica in replicas]
        return replicas[self._route(requests, tokens, self._routed - 1)]

    def _submit_next(self) -> None:
        arrival = next(self._queue, None)
        if arrival is not None:
            self._world.at(self._world.clock.now(), lambda: self._arrive(arrival))


class PrefillDecodePairs(ReplicaSet):
    """Gives every arrival to a prefill and a decode replica, as a router of servers does. What
    clients see is what the decode replicas answer."""

    def __init__(
        self,
        world: World,
        prefill: list[SimulatedReplica],
        decode: list[SimulatedReplica],
        route: Route,
    ) -> None:
        super().__init__(world, decode, route)
        self._prefill = prefill

    def report(self) -> SimulationReport:
        found = super().report()
        return replace(
            found, steps=found.steps + sum(replica.counters.steps for replica in self._prefill)
        )

    def _arrive(self, arrival: Arrival) -> None:
        self._routed += 1
        prefill, decode = self._routed_to(self._prefill), self._routed_to(self._replicas)
        room = self._routed.to_bytes(TRANSFER_ID_BYTES, "little")
        prefill.submit(arrival, room)
        decode.submit(arrival, room)
