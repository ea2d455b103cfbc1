"""Drives an EngineCore with a runner that continues sequences by a fixed rule."""

from array import array
from collections import deque

from banyan.config.defaults import Defaults, settle
from banyan.config.env import Environment
from banyan.config.resolve import resolve
from banyan.engine.core_spec import CoreSpec, core_spec
from banyan.kv_cache.sizing import FULL, CacheGroup, GroupBytes, plan_memory
from banyan.messages.events import Event, Failed, Finished, Tokens
from banyan.messages.plan import SAMPLE, CopyResult, RowFailure, StepPlan, StepResult
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.scheduler.budget import Priorities, SchedulerLimits
from tests.support.configs import MODEL_CONFIG
from tests.support.flags import config_of

VOCAB = 97
TASTE = Defaults("abacus", ("float32",), 16, 512, 128, 0.25)
"""What a device of no particular kind would have."""


def asked(*flags: str) -> CoreSpec:
    """What the flags ask of one replica that has plenty of memory."""
    config, _ = settle(resolve(config_of(*flags), MODEL_CONFIG, Environment()), TASTE)
    memory = plan_memory(
        config.cache,
        config.schedule,
        context_length=config.model.context_length,
        groups=(GroupBytes(FULL, 1 << 10),),
        process_bytes=0,
        total_bytes=1 << 30,
        free_bytes=1 << 30,
    )
    return core_spec(config, MODEL_CONFIG, memory)


def next_token(history: list[int]) -> int:
    """The token after `history`: any fixed function of all of it."""
    value = 7
    for token in history:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB


def continuation(prompt: list[int], length: int) -> list[int]:
    history = list(prompt)
    for _ in range(length):
        history.append(next_token(history))
    return history[len(prompt) :]


class Driver:
    """One core, the plans it launched, and what clients would have seen."""

    def __init__(
        self,
        *,
        pages=100,
        page_tokens=4,
        policy="fcfs",
        max_running=8,
        recorder=None,
        spec=None,
        grammars=None,
        **limits,
    ) -> None:
        honoured = Priorities(are_honoured=True, preemption_gap=0)
        limits = {
            "chunk_tokens": 64,
            "max_request_tokens": 400,
            "priorities": honoured,
            **limits,
        }
        self.spec = spec or CoreSpec(
            groups=(CacheGroup(FULL, page_tokens, pages),),
            limits=SchedulerLimits(max_running=max_running, **limits),
            order=policy,
        )
        self.core = self.spec.build(recorder=recorder and recorder(self.spec), grammars=grammars)
        self.flying: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.now = 0.0
        self.slots: dict[int, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, Finished | Failed] = {}
        self.broken_tokens: set[int] = set()
        """A step that reads one of these tokens fails as a whole."""

    def submit(
        self,
        name: str,
        prompt: list[int],
        new: int = 4,
        priority: int = 0,
        caller: bytes = b"",
        **sampling,
    ) -> None:
        params = SamplingParams(max_new_tokens=new, **sampling)
        tokens = array("i", prompt).tobytes()
        self.receive(
            Generate(request=name, tokens=tokens, sampling=params, priority=priority, caller=caller)
        )

    def receive(self, message) -> None:
        self.core.receive(message, self.now)
        self._hear()

    def launch(self) -> StepPlan | None:
        plan = self.core.launch(self.now)
        self._hear()
        self.core.check()
        if plan is not None:
            self.plans.append(plan)
            self.flying.append(plan)
        return plan

    def complete(self, failed_row: int = -1) -> None:
        plan = self.flying.popleft()
        result = self._execute(plan)
        if failed_row >= 0:
            result = StepResult(
                step=plan.step, tokens=result.tokens, failed=[RowFailure(failed_row, "broken")]
            )
        events, _ = self.core.complete(result, self.now)
        self._hear(events)
        if ids := [copy.id for copy in plan.copies]:
            self.receive(CopyResult(ids))
        self.core.check()

    def step(self) -> None:
        """Launch one plan and complete it."""
        assert self.launch() is not None
        self.complete()

    def run(self) -> "Driver":
        """Until nothing is left to do."""
        while True:
            while self.launch() is not None:
                pass
            if not self.flying:
                break
            self.complete()
        assert self.core.is_idle, self.core.stats(0.0)
        return self

    def _execute(self, plan: StepPlan) -> StepResult:
        for slot in plan.leaves:
            del self.slots[slot]
        for join in plan.joins:
            self.slots[join.slot] = list(array("i", join.tokens))
        sampled, error = [], ""
        for row in plan.rows:
            history = self.slots[row.slot]
            end = row.start + row.count
            if self.broken_tokens & set(history[row.start : end]):
                error = "device fault"
            if row.want & SAMPLE:
                assert end == len(history)
                history.append(next_token(history))
            sampled.append(array("i", history[end:] if row.want & SAMPLE else []).tobytes())
        return StepResult(step=plan.step, tokens=[] if error else sampled, error=error)

    def _hear(self, events: list[Event] | None = None) -> None:
        for event in self.core.take_events() if events is None else events:
            assert event.request not in self.ends, f"{event} after the end"
            if isinstance(event, Tokens):
                output = self.outputs.setdefault(event.request, [])
                assert event.first == len(output)
                output += array("i", event.tokens)
            else:
                self.ends[event.request] = event
