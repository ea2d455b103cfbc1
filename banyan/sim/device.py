"""What runs the plans of simulated replicas: one device, the stages of a line, or devices that
several replicas share step by step. Each says when a step is over, in virtual time."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from banyan.messages.plan import StepLoad, StepPlan
from banyan.sim.steptime import StepTime
from banyan.sim.world import World


class Device(Protocol):
    def begin(self, plan: StepPlan, ready_s: float, done: Callable[[], None]) -> None:
        """Run a plan after those that were begun before it, no sooner than `ready_s`; `done` is
        called when it is over."""
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
        """Of one stage of a step, without the logits."""
        ...

    def head_s(self, plan: StepPlan) -> float:
        """Of the logits, which all stages make together."""
        ...


@dataclass
class _Passing:
    plan: StepPlan
    ready_s: float
    done: Callable[[], None]
    turns: int = 0


class PipelineDevice:
    """Stages that take turns together, each with another step (pipeline/launcher.py): a turn is
    as long as its longest stage, and at its end all of them make the logits of the step that is
    through."""

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
        """Take the next turn, unless one is being taken; it waits for a plan that is on its way."""
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
    def joint_s(self, plans: Sequence[StepPlan]) -> float:
        """Of a step that consists of one of each replica."""
        ...


class DPAttentionDevices:
    """Devices of replicas that work on every step together. They agree on it as theirs do
    (dp_attention/step_clock.py), but in no time.

    Attributes:
        wake: what lets each replica launch what it may, by number; filled by whoever makes them.
    """

    def __init__(self, world: World, step_time: DPAttentionTime, replicas: int) -> None:
        self._world = world
        self._step_time = step_time
        self._free_s = 0.0
        self.wake: list[Callable[[], None]] = []
        self._loads: dict[int, dict[int, StepLoad]] = {}
        """Step -> what each replica brings to it."""
        self._agreed = [0] * replicas
        """Steps that each has heard all of."""
        self._begun: dict[int, dict[int, _Passing]] = {}
        self._launched = [0] * replicas

    def agree(self, replica: int, load: StepLoad) -> list[StepLoad] | None:
        """See `engine.lockstep.StepAgreement`."""
        step = self._agreed[replica]
        told = self._loads.setdefault(step, {})
        if not told and not load.tokens:
            return []
        if replica not in told:
            told[replica] = load
            for other, wake in enumerate(self.wake):
                if other != replica:
                    self._world.at(self._world.clock.now(), wake)
        if len(told) < len(self._agreed):
            return None
        self._agreed[replica] += 1
        if min(self._agreed) > step:
            del self._loads[step]
        return [told[number] for number in range(len(self._agreed))]

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
        self._free_s = starts_s + self._step_time.joint_s([each.plan for each in begun.values()])
        for number in sorted(begun):
            self._world.at(self._free_s, begun[number].done)


@dataclass(frozen=True)
class DPAttentionDevice:
    """The devices of joined replicas, as one of these sees them: `Device`, and `StepAgreement`."""

    devices: DPAttentionDevices
    replica: int

    def begin(self, plan: StepPlan, ready_s: float, done: Callable[[], None]) -> None:
        self.devices.begin(self.replica, plan, ready_s, done)

    def agree(self, load: StepLoad) -> list[StepLoad] | None:
        return self.devices.agree(self.replica, load)
