"""Replay: feeds a journal to a fresh core and compares every plan with the recorded one."""

from dataclasses import dataclass

import msgspec

from banyan.engine.journal import (
    Completed,
    Flushed,
    Full,
    Launched,
    Received,
    plan_hash,
    read_journal,
)
from banyan.grammar.base import GrammarFactory
from banyan.messages.plan import Load, StepResult


@dataclass(frozen=True)
class ReplayReport:
    """What a replay found. `difference` is "" when every plan is the recorded one."""

    records: int
    plans: int
    difference: str = ""
    is_full: bool = False
    """The journal filled up before the engine ended."""

    @property
    def ok(self) -> bool:
        return not self.difference

    def __str__(self) -> str:
        if self.ok:
            ending = "; the journal was full then" if self.is_full else ""
            return f"{self.plans} plans of {self.records} records are the recorded ones{ending}"
        return f"record {self.records}, after {self.plans} equal plans: {self.difference}"


class _RecordedPeers:
    """Answers what the other replicas answered then."""

    def __init__(self) -> None:
        self.next: list[Load] | None = []

    def agree(self, load: Load) -> list[Load] | None:
        return self.next


def check(path: str, grammars: GrammarFactory | None = None) -> ReplayReport:
    """Replay the journal at `path`; stops at the first difference.

    Args:
        grammars: what compiled the constraints then; without it, constrained requests differ.

    Raises:
        ModelError: not a journal, or damaged.
    """
    spec, records = read_journal(path)
    peers = _RecordedPeers()
    core = spec.build(grammars, peers)
    number = plans = 0
    for number, record in enumerate(records, 1):
        match record:
            case Received():
                core.receive(record.message, record.now)
            case Completed():
                result = msgspec.msgpack.decode(record.result, type=StepResult)
                if result.step != core.oldest_step:
                    text = f"a result of step {result.step}, step {core.oldest_step} is in flight"
                    return ReplayReport(number, plans, text)
                core.complete(result, record.now)
            case Full():
                return ReplayReport(number, plans, is_full=True)
            case Flushed():
                core.flush(record.now)
            case Launched():
                peers.next, core.is_paused = record.peers, record.is_paused
                plan = core.launch(record.now)
                if plan_hash(plan) != record.plan_hash:
                    return ReplayReport(number, plans, _difference(record, plan is not None))
                plans += plan is not None
        core.take_events()
        core.take_masks()
        core.take_lookups()
    return ReplayReport(number, plans)


def _difference(record: Launched, has_plan: bool) -> str:
    if not record.plan_hash:
        return "a plan is made where none was recorded"
    return "the plan differs from the recorded one" if has_plan else "the recorded plan is not made"
