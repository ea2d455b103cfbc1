"""GrammarCompiler: from `Generate.grammar` to matchers. Two threads send constraints to worker
processes, which compile them; a bounded cache keeps the results.

Short constraints are compiled first. A constraint that takes more than a moment continues in the
second thread, so quick ones never wait for slow ones. Callers take turns by the time that their
constraints have taken; of one caller the shortest constraint is compiled first.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from queue import SimpleQueue

from banyan.base.errors import RequestError
from banyan.base.fair_share import FairShare
from banyan.grammar.base import Grammar, Program
from banyan.grammar.constrained import AnyText, Constrained
from banyan.grammar.worker_pool import LIMIT, NEVER, GrammarLimits, GrammarWorkerPool, Read, Words
from banyan.messages.requests import FREE, Constraint


@dataclass
class CompileJob:
    """A constraint that waits to be compiled, and its callers."""

    bare: str
    callers: set[bytes]
    number: int = field(default_factory=count().__next__)
    """Order of arrival."""


Finish = Callable[[CompileJob, Program | RequestError], None]


class CompileThread:
    """Compiles queued constraints. Calls `finish` with each outcome, from its own thread."""

    def __init__(self, worker_pool: GrammarWorkerPool, finish: Finish) -> None:
        self.worker_pool = worker_pool
        self._finish = finish
        self._jobs: dict[str, CompileJob] = {}
        self._shares = Shares()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, bare: str, callers: Iterable[bytes] = (b"",)) -> None:
        with self._changed:
            job = self._jobs.setdefault(bare, CompileJob(bare, set()))
            self._add(job, callers)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="grammar", daemon=True)
                self._thread.start()
            self._changed.notify()

    def join(self, bare: str, caller: bytes) -> None:
        """One more caller waits for it, if it is still to be begun here."""
        with self._changed:
            if (job := self._jobs.get(bare)) is not None:
                self._add(job, (caller,))

    def drop(self, bare: str) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            self._jobs.pop(bare, None)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self.worker_pool.close()

    def _add(self, job: CompileJob, callers: Iterable[bytes]) -> None:
        for caller in callers:
            job.callers.add(caller)
            self._shares.enter(caller)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            began_s = time.monotonic()
            outcome = self.worker_pool.make(job.bare)
            with self._changed:
                self._shares.charge(job.callers, time.monotonic() - began_s)
            self._finish(job, outcome)

    def _next(self) -> CompileJob | None:
        """Take the job whose turn it is; None once the thread is closed."""
        with self._changed:
            while not self._jobs and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            turn_s = self._shares.turn_s
            job = min(self._jobs.values(), key=lambda j: (turn_s(j.callers), len(j.bare), j.number))
            waiting = {caller for other in self._jobs.values() for caller in other.callers}
            self._shares.begin(job.callers, waiting)
            return self._jobs.pop(job.bare)


class Shares:
    """How much time each caller has had. One who comes anew starts level with the one whose turn
    it is, so that nobody saves up time while he asks for nothing."""

    def __init__(self) -> None:
        self._had_s: dict[bytes, float] = {}
        self._level_s = 0.0

    def enter(self, caller: bytes) -> None:
        self._had_s[caller] = max(self._had_s.get(caller, 0.0), self._level_s)

    def turn_s(self, callers: Iterable[bytes]) -> float:
        """The lower, the sooner it is the turn of what these wait for."""
        return min(self._had_s[caller] for caller in callers)

    def begin(self, callers: Iterable[bytes], waiting: Iterable[bytes]) -> None:
        """It is the turn of `callers`. Those who neither wait nor are ahead are forgotten."""
        self._level_s = max(self._level_s, self.turn_s(callers))
        kept = set(waiting)
        self._had_s = {c: s for c, s in self._had_s.items() if c in kept or s > self._level_s}

    def charge(self, callers: set[bytes], took_s: float) -> None:
        for caller in callers:
            self._had_s[caller] = self._had_s.get(caller, self._level_s) + took_s / len(callers)


_ENTRY_BYTES = 4096
"""What a cache entry takes besides the program."""

_QUICK_CHARS = 32 << 10
"""Longer constraints go to the slow thread at once."""


class GrammarCompiler:
    """Satisfies grammar.base.GrammarFactory. Everything but the threads belongs to one loop.

    Args:
        backends: names in BACKENDS; each compiles what the earlier ones refuse.
        read: how to get the vocabulary.
        whitespace: pattern of white space between JSON tokens; "" = none, None = any.
        wake: called from a thread when `collect` has something.
    """

    def __init__(
        self,
        backends: Sequence[str],
        read: Read,
        whitespace: str | None = None,
        limits: GrammarLimits | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits or GrammarLimits()
        self._words = Words(read)
        hurried = replace(self._limits, time_s=min(self._limits.quick_s, self._limits.time_s))
        self._quick = CompileThread(
            GrammarWorkerPool(backends, self._words, whitespace, hurried), self._finish_quick
        )
        self._slow = CompileThread(
            GrammarWorkerPool(backends, self._words, whitespace, self._limits), self._finish
        )
        self._wake = wake
        self._cache = _Cache(self._limits.cache_bytes)
        self._pending: dict[str, set[bytes]] = {}
        """Constraint -> who waits for it."""
        self._passing = ""
        """A failure that may not come again."""
        self._done: SimpleQueue[tuple[str, Program | RequestError]] = SimpleQueue()

    def has(self, grammar: str) -> bool:
        """Whether `__call__` answers at once."""
        return _is_free(grammar) or self._cache.get(bare_of(grammar)) is not None

    def prepare(self, grammar: str, caller: bytes = b"") -> None:
        """Compile in the background; RequestError 503 when too many constraints wait.

        Args:
            caller: whose share of the time it takes.
        """
        bare = bare_of(grammar)
        if bare in self._pending:
            self._pending[bare].add(caller)
            for thread in (self._quick, self._slow):
                thread.join(bare, caller)
            return
        self._check_waiting(caller)
        self._pending[bare] = {caller}
        (self._quick if len(bare) <= _QUICK_CHARS else self._slow).put(bare, (caller,))

    def _check_waiting(self, caller: bytes) -> None:
        share = FairShare(self._limits.max_waiting)
        for callers in self._pending.values():
            share.take(min(callers))
        if not share.fits(caller):
            raise RequestError(
                f"{share.total} constraints are waiting to be compiled, {share.held_by(caller)} of "
                f"them of this caller; at most {share.most} may",
                status=503,
                code="queue_full",
            )

    def cancel(self, grammar: str) -> None:
        """Nobody waits for it any more: it is not begun if it has not been."""
        bare = bare_of(grammar)
        self._pending.pop(bare, None)
        self._quick.drop(bare)
        self._slow.drop(bare)

    def collect(self) -> bool:
        """Take over the next constraint that has been compiled; False when there is none.

        It stays at hand until the next call at least. Longer than that are kept those that were
        compiled, and those that can never be.
        """
        if self._passing:
            self._cache.drop(self._passing)
            self._passing = ""
        if self._done.empty():
            return False
        bare, outcome = self._done.get()
        self._pending.pop(bare, None)
        self._cache.put(bare, outcome)
        if isinstance(outcome, RequestError) and outcome.code != NEVER:
            self._passing = bare
        return True

    def __call__(self, grammar: str) -> Grammar:
        """A fresh constraint; compiles on the spot when it is not at hand."""
        matcher = AnyText() if _is_free(grammar) else self._program(grammar).start()
        found, masks = Constraint.decode(grammar), self._words.get()[2]
        text = masks.text(found)
        return Constrained(matcher, masks, text, found.after, found.budget, found.opening)

    def _program(self, grammar: str) -> Program:
        bare = bare_of(grammar)
        outcome = self._cache.get(bare)
        if outcome is None:
            outcome = self._slow.worker_pool.make(bare)
            self._cache.put(bare, outcome)
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def close(self) -> None:
        self._quick.close()
        self._slow.close()

    def _finish_quick(self, job: CompileJob, outcome: Program | RequestError) -> None:
        is_late = isinstance(outcome, RequestError) and outcome.code == LIMIT
        if is_late and job.bare in self._pending:
            self._slow.put(job.bare, job.callers)
        else:
            self._finish(job, outcome)

    def _finish(self, job: CompileJob, outcome: Program | RequestError) -> None:
        self._done.put((job.bare, outcome))
        self._wake()


class _Cache:
    """Outcomes by constraint, the least recently used let go first; the newest always stays."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[str, Program | RequestError] = OrderedDict()
        self.size_bytes = 0

    def get(self, grammar: str) -> "Program | RequestError | None":
        entry = self._entries.get(grammar)
        if entry is not None:
            self._entries.move_to_end(grammar)
        return entry

    def put(self, grammar: str, entry: "Program | RequestError") -> None:
        self.drop(grammar)
        self._entries[grammar] = entry
        self.size_bytes += _cost(grammar, entry)
        while self.size_bytes > self._limit and len(self._entries) > 1:
            self.drop(next(iter(self._entries)))

    def drop(self, grammar: str) -> None:
        entry = self._entries.pop(grammar, None)
        if entry is not None:
            self.size_bytes -= _cost(grammar, entry)


def _cost(grammar: str, entry: "Program | RequestError") -> int:
    program = 0 if isinstance(entry, RequestError) else entry.size_bytes
    return _ENTRY_BYTES + 4 * len(grammar) + program


def _is_free(grammar: str) -> bool:
    """Whether there is nothing to compile."""
    return Constraint.decode(grammar).kind == FREE


def bare_of(grammar: str) -> str:
    """The constraint without where it begins: that does not change how it is compiled."""
    constraint = Constraint.decode(grammar)
    return Constraint(constraint.kind, constraint.text).encode()
