"""GrammarCompiler: from `Generate.grammar` to matchers, as the engine sees it. Two threads hand
constraints to workshops, where they are compiled; a bounded cache keeps the results.

What compiles quickly never waits for what takes long: short constraints go first, and one that
takes more than a moment goes on in a lane of its own. What one caller asks for does not hold up
another's: they take turns.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue

from banyan.base.errors import RequestError
from banyan.grammar.base import Grammar, Program
from banyan.grammar.compile_thread import CompileJob, CompileThread
from banyan.grammar.constrained import Constrained
from banyan.grammar.worker_pool import LIMIT, NEVER, GrammarLimits, GrammarWorkerPool, Read, Words
from banyan.messages.requests import Constraint

_ENTRY_BYTES = 4096
"""What a cache entry takes besides the program."""

_QUICK_CHARS = 32 << 10
"""Longer constraints take the slow lane at once."""


class GrammarCompiler:
    """Satisfies grammar.base.GrammarFactory. Everything but the lanes belongs to one loop.

    Args:
        backends: names in BACKENDS; each compiles what the earlier ones refuse.
        read: how to get the vocabulary.
        whitespace: pattern of white space between JSON tokens; "" = none, None = any.
        wake: called from a lane whenever `collect` has something.
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
        return self._cache.get(bare_of(grammar)) is not None

    def prepare(self, grammar: str, caller: bytes = b"") -> None:
        """Compile in the background; RequestError 503 when too many constraints wait.

        Args:
            caller: whose share of the time it takes.
        """
        bare = bare_of(grammar)
        if bare in self._pending:
            self._pending[bare].add(caller)
            for lane in (self._quick, self._slow):
                lane.join(bare, caller)
            return
        self._check_waiting(caller)
        self._pending[bare] = {caller}
        (self._quick if len(bare) <= _QUICK_CHARS else self._slow).put(bare, (caller,))

    def _check_waiting(self, caller: bytes) -> None:
        waiting = len(self._pending)
        own = sum(caller in callers for callers in self._pending.values())
        if waiting >= self._limits.max_waiting or own >= self._limits.max_of_one:
            raise RequestError(
                f"{waiting} constraints are waiting to be compiled, {own} of them of this caller; "
                f"at most {self._limits.max_waiting} and {self._limits.max_of_one} may",
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
        bare = bare_of(grammar)
        outcome = self._cache.get(bare)
        if outcome is None:
            outcome = self._slow.worker_pool.make(bare)
            self._cache.put(bare, outcome)
        if isinstance(outcome, RequestError):
            raise outcome
        constraint = Constraint.decode(grammar)
        masks = self._words.get()[2]
        return Constrained(outcome.start(), masks, masks.text(constraint), constraint.after)

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


def bare_of(grammar: str) -> str:
    """The constraint without where it begins: that does not change how it is compiled."""
    constraint = Constraint.decode(grammar)
    return Constraint(constraint.kind, constraint.text).encode()
