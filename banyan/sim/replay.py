"""Replay: feeds a journal to a fresh core and compares every plan with the recorded one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from banyan.base.errors import ModelError
from banyan.base.install import VERSION
from banyan.engine.core import EngineCore
from banyan.engine.journal import (
    Began,
    Completed,
    Flushed,
    Full,
    JournalRecord,
    Launched,
    Received,
    plan_hash,
    read_journal,
)
from banyan.engine.snapshot import restore
from banyan.grammar.base import GrammarFactory
from banyan.messages.events import Event
from banyan.messages.plan import StepLoad, StepPlan, StepResult
from banyan.messages.requests import Generate


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
        self.next: list[StepLoad] | None = []

    def agree(self, load: StepLoad) -> list[StepLoad] | None:
        return self.next


@dataclass(frozen=True)
class Played:
    """One record, and what the core made of it. `difference` as in ReplayReport."""

    number: int
    record: JournalRecord
    core: EngineCore
    plan: StepPlan | None = None
    events: Sequence[Event] = ()
    difference: str = ""


def play(path: str, grammars: GrammarFactory | None = None) -> Iterator[Played]:
    """Feed the records at `path` to a fresh core, one by one, up to the first difference.

    Args:
        grammars: what compiled the constraints then; without it, constrained requests differ.

    Raises:
        ModelError: not a journal, damaged, or of a flight recorder that had no room for a snapshot.
    """
    spec, records = read_journal(path)
    peers = _RecordedPeers()
    core = spec.build(grammars, peers)
    for number, record in enumerate(records, 1):
        plan, events, difference = None, list[Event](), ""
        match record:
            case Received():
                difference = _lack(record, grammars)
                core.receive(record.message, record.now)
            case Completed():
                result = msgspec.msgpack.decode(record.result, type=StepResult)
                if result.step == core.oldest_step:
                    events, _ = core.complete(result, record.now)
                else:
                    difference = (
                        f"a result of step {result.step}, step {core.oldest_step} is in flight"
                    )
            case Full():
                pass
            case Began():
                if number == 1:
                    _begin(core, record, grammars)
            case Flushed():
                core.flush(record.now)
            case Launched():
                peers.next, core.is_paused = record.peers, record.is_paused
                plan = core.launch(record.now)
                if plan_hash(plan) != record.plan_hash:
                    difference = _difference(record, plan is not None)
        events += core.take_events()
        core.take_masks()
        core.scheduler.store_fetcher.take_lookups()
        yield Played(number, record, core, plan, events, difference)
        if difference:
            return


def check(path: str, grammars: GrammarFactory | None = None) -> ReplayReport:
    """Replay the journal at `path`; stops at the first difference. Takes and raises what `play`
    does."""
    number = plans = 0
    for played in play(path, grammars):
        number = played.number
        if played.difference:
            return ReplayReport(number, plans, played.difference)
        if isinstance(played.record, Full):
            return ReplayReport(number, plans, is_full=True)
        plans += played.plan is not None
    return ReplayReport(number, plans)


def _begin(core: EngineCore, record: Began, grammars: GrammarFactory | None) -> None:
    if not record.core:
        raise ModelError(
            "the flight recorder had no room for a snapshot, so nothing can be replayed",
            hint="raise --flight-recorder-bytes",
        )
    if record.build != VERSION:
        raise ModelError(
            f"recorded by version {record.build}, and this is {VERSION}: only the version "
            "that took a snapshot can go on from it"
        )
    restore(core, record.core, grammars)


def _lack(record: Received, grammars: GrammarFactory | None) -> str:
    """Why what follows cannot be made again; "" when it can."""
    asked = record.message
    if not isinstance(asked, Generate) or not asked.grammar or grammars is not None:
        return ""
    return (
        f"request {asked.request} is constrained, and there is no vocabulary here to go by: name "
        "the model"
    )


def _difference(record: Launched, has_plan: bool) -> str:
    if not record.plan_hash:
        return "a plan is made where none was recorded"
    return "the plan differs from the recorded one" if has_plan else "the recorded plan is not made"
