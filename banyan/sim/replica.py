"""Simulated replicas: real EngineCores on simulated devices, alone, routed, or in PD pairs.

Plans are answered with synthetic tokens once their step time is over; when a request ends is
decided by its output length in the workload. A SimulationReport has what clients would have seen.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from banyan.base.ids import RequestId, SlotId, StepId
from banyan.engine.core import EngineCore
from banyan.engine.journal import plan_hash
from banyan.kv_cache.cache import TOKEN_BYTES
from banyan.messages.disaggregation import KVTransferEvent, KVTransferOp
from banyan.messages.events import Event, Failed, Finished, Tokens
from banyan.messages.plan import SAMPLE, TRANSFER_ID_BYTES, CopyResult, Row, StepPlan, StepResult
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.scheduler.request_table import Counters
from banyan.scheduler.routing import Route
from banyan.sim.device import Device, World
from banyan.sim.workload import Arrival


@dataclass
class RequestTimes:
    """One request: when its tokens came. `end_s` below 0 = it failed."""

    submitted_s: float
    prompt_len: int
    token_s: list[float] = field(default_factory=list[float])
    """Arrival time of each output token."""
    cached_tokens: int = 0
    end_s: float = -1.0


@dataclass(frozen=True)
class Spread:
    """Percentiles, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    def __str__(self) -> str:
        parts = (("mean", self.mean), ("p50", self.p50), ("p90", self.p90), ("p99", self.p99))
        return "  ".join(f"{name} {value * 1e3:9.2f} ms" for name, value in parts)


def spread(values: Sequence[float]) -> Spread:
    """Percentiles by the nearest rank; zeros of nothing."""
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    ranks = [
        ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)
    ]
    return Spread(sum(ordered) / len(ordered), *ranks)


@dataclass(frozen=True)
class SimulationReport:
    """Figures of one run."""

    finished: int
    failed: int
    seconds: float
    steps: int
    retractions: int
    output_tokens: int
    hit_rate: float
    """Share of the prompt tokens that came from the cache."""
    ttft: Spread
    itl: Spread
    e2e: Spread

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return "\n".join(
            (
                f"requests  {self.finished} finished, {self.failed} failed in {self.seconds:.3f} s",
                f"output    {self.output_tokens} tokens, {self.tokens_per_s:.1f} per second",
                f"cache     {self.hit_rate:.1%} of prompt tokens hit",
                f"engine    {self.steps} steps, {self.retractions} retractions",
                f"ttft      {self.ttft}",
                f"itl       {self.itl}",
                f"e2e       {self.e2e}",
            )
        )


def report(
    visits: Sequence[RequestTimes], seconds: float, steps: int, retractions: int
) -> SimulationReport:
    done = [visit for visit in visits if visit.end_s >= 0]
    prompt_tokens = sum(visit.prompt_len for visit in done)
    gaps = [
        later - earlier
        for visit in done
        for earlier, later in zip(visit.token_s, visit.token_s[1:], strict=False)
    ]
    return SimulationReport(
        finished=len(done),
        failed=len(visits) - len(done),
        seconds=seconds,
        steps=steps,
        retractions=retractions,
        output_tokens=sum(len(visit.token_s) for visit in done),
        hit_rate=sum(visit.cached_tokens for visit in done) / max(1, prompt_tokens),
        ttft=spread([visit.token_s[0] - visit.submitted_s for visit in done if visit.token_s]),
        itl=spread(gaps),
        e2e=spread([visit.end_s - visit.submitted_s for visit in done]),
    )


_PEER = "127.0.0.1:1"
"""Rooms are found by their names alone."""


class TransferPort(Protocol):
    """What carries pages to other replicas."""

    def carry(self, replica: "SimulatedReplica", plan: StepPlan) -> list[int]:
        """Begin a plan's copies; those that end with its step."""
        ...

    def run_transfer_ops(self, replica: "SimulatedReplica") -> None:
        """Do what its scheduler has ordered."""
        ...


class SimulatedReplica:
    """One simulated engine.

    Args:
        host_s: time that planning and launching a step costs on the host; depth 2 hides it.
        carrier: of one that hands prompts over or takes them.
    """

    def __init__(
        self,
        world: World,
        core: EngineCore,
        device: Device,
        host_s: float = 0.0,
        carrier: TransferPort | None = None,
    ) -> None:
        self._carrier = carrier
        self._copies: dict[StepId, list[int]] = {}
        """Of plans in flight, those that end with the step."""
        self._world = world
        self._core = core
        self._device = device
        self._host_s = host_s
        self._host_free_s = 0.0
        self._flying: deque[StepPlan] = deque()
        self._seeds: dict[SlotId, int] = {}
        self._lengths: dict[SlotId, int] = {}
        self._visits: dict[RequestId, RequestTimes] = {}
        self._open: dict[RequestId, int] = {}
        self.on_end: Callable[[], None] = lambda: None
        """Called when a request has ended."""
        self.plan_hashes: list[bytes] = []

    @property
    def visits(self) -> list[RequestTimes]:
        return list(self._visits.values())

    @property
    def counters(self) -> Counters:
        return self._core.scheduler.counters

    def submit(self, arrival: Arrival, room: bytes = b"") -> None:
        """A request comes, now.

        Args:
            room: where its prompt is handed over; b"" = nowhere.
        """
        now = self._world.clock.now()
        number = len(self._visits) + 1
        request = RequestId(f"r{number}")
        prompt_len = len(arrival.prompt) // TOKEN_BYTES
        self._visits[request] = RequestTimes(now, prompt_len)
        self._open[request] = prompt_len + arrival.output_len
        sampling = SamplingParams(max_new_tokens=arrival.output_len, seed=number, temperature=0.0)
        generate = Generate(
            request=request,
            tokens=arrival.prompt,
            sampling=sampling,
            priority=arrival.priority,
            transfer_id=room,
            prefill_address=_PEER if room else "",
        )
        self._core.receive(generate, now)
        self.turn()

    def receive(self, news: CopyResult | KVTransferEvent) -> None:
        """Something that another replica has to do with has happened."""
        self._core.receive(news, self._world.clock.now())
        self.turn()

    def take_transfer_ops(self) -> list[KVTransferOp]:
        return self._core.scheduler.take_transfer_ops()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def open_tokens(self) -> int:
        """Of the open requests: their prompts, and the most that they may produce."""
        return sum(self._open.values())

    def turn(self) -> None:
        """Launch what may be launched."""
        now = self._world.clock.now()
        while (plan := self._core.launch(now)) is not None:
            self.plan_hashes.append(plan_hash(plan))
            self._flying.append(plan)
            self._host_free_s = max(now, self._host_free_s) + self._host_s
            self._device.begin(plan, self._host_free_s, self._complete)
            self._copies[plan.step] = (
                [copy.id for copy in plan.copies]
                if self._carrier is None
                else self._carrier.carry(self, plan)
            )
        if self._carrier is not None:
            self._carrier.run_transfer_ops(self)
        self._take_events(self._core.take_events())

    def _complete(self) -> None:
        now = self._world.clock.now()
        plan = self._flying.popleft()
        for join in plan.joins:
            self._seeds[join.slot] = join.sampling.seed
            self._lengths[join.slot] = len(join.tokens) // TOKEN_BYTES
        tokens = [self._sample(row) for row in plan.rows]
        if copies := self._copies.pop(plan.step):
            self._core.receive(CopyResult(copies), now)
        events, _ = self._core.complete(StepResult(step=plan.step, tokens=tokens), now)
        self._take_events(events)
        self.turn()

    def _sample(self, row: Row) -> bytes:
        """A token that no other request samples at the same place, so that only prompts share."""
        if not row.want & SAMPLE:
            return b""
        self._lengths[row.slot] += 1
        token = (self._seeds[row.slot] * 7919 + self._lengths[row.slot]) % (1 << 30)
        return array("i", [token]).tobytes()

    def _take_events(self, events: list[Event]) -> None:
        now = self._world.clock.now()
        for event in events:
            match event:
                case Tokens():
                    count = len(event.tokens) // TOKEN_BYTES
                    self._visits[event.request].token_s += [now] * count
                case Finished():
                    visit = self._visits[event.request]
                    visit.end_s, visit.cached_tokens = now, event.cached_tokens
                    self._end(event.request)
                case Failed():
                    self._end(event.request)
                case _:
                    pass

    def _end(self, request: RequestId) -> None:
        del self._open[request]
        self.on_end()


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
