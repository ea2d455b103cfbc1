"""Simulated time and devices: one device, pipeline stages, or the devices of DP attention replicas.

Each device runs plans in the virtual time of a `World` and calls back when a step is over.

Step times come from a roofline model (Williams et al., "Roofline", 2009). Each part of a step reads
its weights and the cached keys and values of its rows, and computes two floating-point operations
per weight and token. The slower of the two determines the time. The time of collectives is added.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from banyan.base.clock import VirtualClock
from banyan.messages.plan import StepLoad, StepPlan
from banyan.model_config.model_config import WINDOW, ModelConfig
from banyan.sim.layout import Hardware, ParallelLayout, Weights, kept_share


class StepTime(Protocol):
    def seconds(self, plan: StepPlan) -> float:
        """Device time of one step."""
        ...


_ALONE = ParallelLayout()


class Roofline:
    """Step time of one replica, from the plain facts of its model.

    Args:
        weight_bytes, cache_bytes, stream_bytes: bytes per stored weight, per cached key or value
            element, and per element of what goes from device to device.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        hardware: Hardware,
        layout: ParallelLayout = _ALONE,
        *,
        weight_bytes: float = 2.0,
        cache_bytes: float = 2.0,
        stream_bytes: float = 2.0,
    ) -> None:
        self._model_config = model_config
        self._hardware = hardware
        self._layout = layout
        self._weights = Weights.of(model_config)
        self._weight_bytes = weight_bytes
        self._stream_bytes = stream_bytes
        ranks = layout.attention_ranks
        self._position_bytes = (
            model_config.kept_per_token * cache_bytes * kept_share(model_config, ranks)
        )
        heads = (
            sum(map(model_config.heads_of, range(model_config.num_layers)))
            / model_config.num_layers
        )
        self._position_flops = 4 * heads * model_config.head_dim / ranks
        if model_config.latent is not None:
            width = 2 * model_config.latent.rank + model_config.latent.rope_dim
            self._position_flops = 2 * model_config.num_heads * width / ranks
        self._full_layers = sum(
            model_config.kind_of(i) != WINDOW for i in range(model_config.num_layers)
        )

    def seconds(self, plan: StepPlan) -> float:
        """Device time of one step through all stages."""
        if not plan.rows:
            return self._hardware.overhead_s
        return self._layout.pp * self.stage_s(plan) + self.head_s(plan)

    def stage_s(self, plan: StepPlan) -> float:
        """Device time of one stage of a step, without the logits."""
        if not plan.rows:
            return self._hardware.overhead_s
        return self._hardware.overhead_s + self._layers_s([plan]) / self._layout.pp

    def head_s(self, plan: StepPlan) -> float:
        """Device time of the logits, which all ranks compute together."""
        ranks = self._layout.tp * self._layout.pp
        return self._product_s(self._weights.head / ranks, len(plan.rows))

    def dp_attention_s(self, plans: Sequence[StepPlan]) -> float:
        """Device time of a step of DP attention replicas, given the plan of each.

        The replicas compute attention in parallel, so the slowest one counts; they share the rest.
        """
        rows = sum(len(plan.rows) for plan in plans)
        head = self._product_s(self._weights.head / self._layout.tp, rows)
        return self._hardware.overhead_s + self._layers_s(plans) + head

    def _layers_s(self, plans: Sequence[StepPlan]) -> float:
        """All layers, and the transfers between pipeline stages."""
        counts = [sum(row.count for row in plan.rows) for plan in plans]
        pairs = zip(plans, counts, strict=True)
        attention = max(self._attention_s(plan, count) for plan, count in pairs)
        together = sum(counts)
        return attention + self._feed_forward_s(together) + self._links_s(max(counts), together)

    def _product_s(self, weights: float, tokens: float, active: float = 1.0) -> float:
        """Time of a product with `weights` numbers; a token uses the fraction `active`."""
        return self._slower(weights * self._weight_bytes, 2 * weights * active * tokens)

    def _slower(self, moved: float, flops: float) -> float:
        return max(moved / self._hardware.bytes_per_s, flops / self._hardware.flops_per_s)

    def _attention_s(self, plan: StepPlan, tokens: int) -> float:
        """Attention of the slowest share of the tokens, with context parallelism; else of all."""
        cp = self._layout.cp
        reads = pairs = 0.0
        window_layers = self._model_config.num_layers - self._full_layers
        for row in plan.rows:
            end = row.start + row.count
            near = min(end, self._model_config.window + row.count)
            reads += (end * self._full_layers + near * window_layers) * min(1, row.count / cp)
            seen = row.start + (row.count + 1) / 2
            near_seen = min(seen, self._model_config.window)
            pairs += row.count * (seen * self._full_layers + near_seen * window_layers) / cp
        weights = self._weights.attention / self._layout.attention_ranks
        products = self._product_s(weights, -(-tokens // cp))
        return products + self._slower(reads * self._position_bytes, pairs * self._position_flops)

    def _feed_forward_s(self, tokens: int) -> float:
        """Routed experts are read when a token chose them: of `count`, each token misses one with
        (1 − per_token / count)."""
        tp, experts = self._layout.tp, self._model_config.experts
        seconds = self._product_s(self._weights.dense / tp, tokens)
        if experts is None:
            return seconds
        share = experts.per_token / experts.count
        met = 1 - (1 - share) ** tokens
        routed = self._weights.routed / tp
        moved = routed * met * self._weight_bytes
        return seconds + self._slower(moved, 2 * routed * share * tokens)

    def _links_s(self, tokens: int, together: int) -> float:
        layout, hardware = self._layout, self._hardware
        token = self._model_config.hidden_size * self._stream_bytes
        layers = self._model_config.num_layers
        cp = layout.cp
        attention = hardware.all_reduce_s(layout.attention_ranks, tokens * token / cp)
        # What is kept of a token goes to the other shares; at the end all have the hidden states.
        kept = self._model_config.kept_per_token * kept_share(
            self._model_config, layout.attention_ranks
        )
        attention += hardware.gather_s(cp, tokens * kept * self._stream_bytes)
        feed_forward = hardware.all_reduce_s(layout.tp, tokens * token)
        if (
            layout.uses_dp_attention or cp > 1
        ):  # rows are gathered, and sums come back to their owners
            feed_forward = 2 * hardware.gather_s(layout.tp, together * token)
        sends = (layout.pp - 1) * hardware.send_s(tokens * token)
        return layers * (attention + feed_forward) + sends + hardware.gather_s(cp, tokens * token)


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
