"""Replay of a journal: the same messages into a core built the same way must give the same plans.

The regression test for every change of scheduler or memory. Runs nothing but decisions.
"""

from dataclasses import dataclass

import msgspec

from banyan.engine.core import EngineCore
from banyan.engine.journal import (
    Completed,
    Copied,
    Full,
    JournalReader,
    Launched,
    Received,
    Record,
    digest_of,
)
from banyan.grammar.base import GrammarFactory
from banyan.messages.requests import Control


@dataclass(frozen=True)
class ReplayReport:
    """What a replay found."""

    records: int
    plans: int
    """Plans that came out the same."""
    is_complete: bool
    """False when the journal filled up before the engine ended."""
    differs_at: int = -1
    """Index of the first record that does not fit, -1 for none."""
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.differs_at < 0

    def __str__(self) -> str:
        if not self.ok:
            return f"differs at record {self.differs_at} after {self.plans} plans: {self.text}"
        ending = "" if self.is_complete else "; the journal filled up before the engine ended"
        return f"{self.plans} plans in {self.records} records, all the same{ending}"


class _RecordedPeers:
    """Lockstep that answers what the journal says the replicas agreed on."""

    def __init__(self) -> None:
        self.peers: list[int] = []

    def agree(self, tokens: int) -> list[int]:
        return self.peers


def check(path: str, grammars: GrammarFactory | None = None) -> ReplayReport:
    """Replay the journal at `path` and compare every plan.

    Raises JournalError when the file is damaged, OSError when it cannot be read.
    """
    reader = JournalReader(path)
    peers = _RecordedPeers()
    core = reader.header.core.build(grammars, peers)
    plans, index, is_complete = 0, -1, True
    for index, record in enumerate(reader.records()):
        if isinstance(record, Full):
            is_complete = False
            continue
        try:
            difference = _feed(core, peers, record)
        except (AssertionError, LookupError) as error:
            difference = f"{type(error).__name__}: {error}"
        if difference:
            return ReplayReport(index + 1, plans, is_complete, index, difference)
        plans += isinstance(record, Launched) and bool(record.digest)
    return ReplayReport(index + 1, plans, is_complete)


def _feed(core: EngineCore, peers: _RecordedPeers, record: Record) -> str:
    """Give the core one record; what does not fit, or ""."""
    match record:
        case Received(message=Control(verb="flush_cache")):
            core.scheduler.flush()
        case Received(message=Control()):
            pass
        case Received(now, message):
            core.receive(message, now)
        case Copied(now, result):
            core.receive(result, now)
        case Completed(now, result):
            core.complete(result, now)
        case Launched(now, digest, agreed):
            peers.peers = agreed
            plan = core.launch(now)
            if digest_of(plan) != digest:
                kind = "no plan" if plan is None else msgspec.json.encode(plan.rows).decode()
                return f"recorded {digest.hex() or 'no plan'}, this build plans {kind[:500]}"
    core.take_events()
    core.take_masks()
    return ""
