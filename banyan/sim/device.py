"""Simulated time and devices: one device, pipeline stages, or the devices of DP attention replicas.

Each device runs plans in the virtual time of a `World` and calls back when a step is over.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from banyan.base.clock import VirtualClock
from banyan.messages.plan import StepLoad, StepPlan
from banyan.sim.steptime import StepTime


class World:
    """Event heap over a virtual clock. Events of one time happen in the order they were planned."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Plan an event; a time in the past means at once."""
        self._planned += 1
        heappush(self._events, (max(when_s, self.clock.now()), self._planned, happen))

    def run(self, until_s: float = float("inf")) -> None:
        """Let everything happen that is planned up to `until_s`."""
        while self._events and self._events[0][0] <= until_s:
            when_s, _, happen = heappop(self._events)
            self.clock.advance_to(when_s)
            happen()


class Device(Protocol):
    def begin(self, plan: StepPlan, ready_s: float, done: Callable[[], None]) -> None:
        """Run a plan after all earlier ones, no sooner than `ready_s`; then call `done`."""
        ...


class OneDevice:
    """Runs one step after another."""

    def __init__(self, world: World, step_time: StepTime) -> None:
        self._world = world
        self._step_time = step_time
        self._free_s = 0.0

    def begin(self, plan: StepPlan, ready_s: float, done: Callable[[], None]) -> None:
        self._free_s = max(ready_s, self._free_s) + self._step_time.seconds(plan)
        self._world.at(self._free_s, done)


class PipelineTime(Protocol):
    def stage_s(self, plan: StepPlan) -> float:
        """Seconds of one stage of a step, without the logits."""
        ...

    def head_s(self, plan: StepPlan) -> float:
        """Seconds of the logits, which all stages compute together."""
        ...


@dataclass
class _Passing:
    plan: StepPlan
    ready_s: float
    done: Callable[[], None]
    turns: int = 0


class PipelineDevice:
    """Pipeline stages that run in turns, each with another step (engine/launcher.py).

    A turn takes as long as its slowest stage. At its end all stages compute the logits of the step
    that has passed the last stage.
    """

    def __init__(self, world: World, step_time: PipelineTime, stages: int) -> None:
        self._world = world
        self._step_time = step_time
        self._stages = stages
        self._coming: deque[_Passing] = deque()
        self._passing: deque[_Passing] = deque()
        self._is_turning = False

    def begin(self, plan: StepPlan, ready_s: float, done: Callable[[], None]) -> None:
        self._coming.append(_Passing(plan, ready_s, done))
        self._go_on()

    def _go_on(self) -> None:
        """Start the next turn unless one runs. A plan that is not ready yet delays it."""
        if self._is_turning or not (self._coming or self._passing):
            return
        now = self._world.clock.now()
        if self._coming and self._coming[0].ready_s > now:
            self._world.at(self._coming[0].ready_s, self._go_on)
            return
        if self._coming:
            self._passing.append(self._coming.popleft())
        self._is_turning = True
        took_s = max(self._step_time.stage_s(each.plan) for each in self._passing)
        if self._passing[0].turns == self._stages - 1:
            took_s += self._step_time.head_s(self._passing[0].plan)
        self._world.at(now + took_s, self._end)

    def _end(self) -> None:
        self._is_turning = False
        for each in self._passing:
            each.turns += 1
        if self._passing[0].turns == self._stages:
            self._passing.popleft().done()
        self._go_on()


class DPAttentionTime(Protocol):
    def dp_attention_s(self, plans: Sequence[StepPlan]) -> float:
        """Seconds of a step, given the plan of each replica."""
        ...


class DPAttentionDevices:
    """Devices of replicas that run every step together. They agree on steps as real replicas do
    (dp_attention/step_clock.py), but without delay.

    Attributes:
        wake: callback of each replica that launches its next steps; filled by the caller.
    """

    def __init__(self, world: World, step_time: DPAttentionTime, replicas: int) -> None:
        self._world = world
        self._step_time = step_time
        self._free_s = 0.0
        self.wake: list[Callable[[], None]] = []
        self._loads: dict[int, dict[int, StepLoad]] = {}
        """Step -> load of each replica."""
        self._agreed = [0] * replicas
        """Per replica, the number of steps whose loads it has received."""
        self._begun: dict[int, dict[int, _Passing]] = {}
        self._launched = [0] * replicas

    def agree(self, replica: int, load: StepLoad) -> list[StepLoad] | None:
        """See `dp_attention.step_clock.StepAgreement`."""
        step = self._agreed[replica]
        loads = self._loads.setdefault(step, {})
        if not loads and not load.tokens:
            return []
        if replica not in loads:
            loads[replica] = load
            for other, wake in enumerate(self.wake):
                if other != replica:
                    self._world.at(self._world.clock.now(), wake)
        if len(loads) < len(self._agreed):
            return None
        self._agreed[replica] += 1
        if min(self._agreed) > step:
            del self._loads[step]
        return [loads[number] for number in range(len(self._agreed))]

    def begin(self, replica: int, plan: StepPlan, ready_s: float, done: Callable[[], None]) -> None:
        if not plan.replica_loads:  # nothing is computed
            self._world.at(max(ready_s, self._free_s), done)
            return
        step = self._launched[replica]
        self._launched[replica] += 1
        begun = self._begun.setdefault(step, {})
        begun[replica] = _Passing(plan, ready_s, done)
        if len(begun) < len(self._agreed):
            return
        del self._begun[step]
        starts_s = max(self._free_s, *(each.ready_s for each in begun.values()))
        self._free_s = starts_s + self._step_time.dp_attention_s(
            [each.plan for each in begun.values()]
        )
        for number in sorted(begun):
            self._world.at(self._free_s, begun[number].done)


@dataclass(frozen=True)
class DPAttentionDevice:
    """The part of one replica in DPAttentionDevices: a `Device` and a `StepAgreement`."""

    devices: DPAttentionDevices
    replica: int

    def begin(self, plan: StepPlan, ready_s: float, done: Callable[[], None]) -> None:
        self.devices.begin(self.replica, plan, ready_s, done)

    def agree(self, load: StepLoad) -> list[StepLoad] | None:
        return self.devices.agree(self.replica, load)
