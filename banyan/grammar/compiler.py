"""GrammarCompiler: from `Generate.grammar` to matchers, as the engine sees it. Two threads hand
constraints to workshops, where they are compiled; a bounded cache keeps the results.

What compiles quickly never waits for what takes long: short constraints go first, and one that
takes more than a moment goes on in a lane of its own. Knows no requests and no steps.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from queue import PriorityQueue, SimpleQueue

from banyan.base.errors import RequestError
from banyan.grammar.base import Grammar, Program
from banyan.grammar.constrained import Constrained
from banyan.grammar.workshop import LIMIT, NEVER, GrammarLimits, Read, Words, Workshop
from banyan.messages.constraint import Constraint

_ENTRY_BYTES = 4096
"""What a cache entry takes besides the program."""

_QUICK_CHARS = 32 << 10
"""Longer constraints take the slow lane at once."""


class GrammarCompiler:
    """Satisfies grammar.base.GrammarFactory. Everything but the lanes belongs to one loop.

    Args:
        backends: names in BACKENDS; each stands in for what those before it refuse.
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
        self._quick = _Lane(
            Workshop(backends, self._words, whitespace, hurried), self._finish_quick
        )
        self._slow = _Lane(Workshop(backends, self._words, whitespace, self._limits), self._finish)
        self._wake = wake
        self._cache = _Cache(self._limits.cache_bytes)
        self._pending: set[str] = set()
        self._passing = ""
        """A failure that may not come again."""
        self._done: SimpleQueue[tuple[str, Program | RequestError]] = SimpleQueue()

    def has(self, grammar: str) -> bool:
        """Whether `__call__` answers at once."""
        return self._cache.get(bare_of(grammar)) is not None

    def prepare(self, grammar: str) -> None:
        """Compile in the background; RequestError 503 when too many constraints wait."""
        bare = bare_of(grammar)
        if bare in self._pending:
            return
        if len(self._pending) >= self._limits.max_waiting:
            raise RequestError(
                f"{len(self._pending)} constraints are waiting to be compiled",
                status=503,
                code="queue_full",
            )
        self._pending.add(bare)
        (self._quick if len(bare) <= _QUICK_CHARS else self._slow).put(bare)

    def cancel(self, grammar: str) -> None:
        """Nobody waits for it any more: it is not begun if it has not been."""
        bare = bare_of(grammar)
        self._pending.discard(bare)
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
        self._pending.discard(bare)
        self._cache.put(bare, outcome)
        if isinstance(outcome, RequestError) and outcome.code != NEVER:
            self._passing = bare
        return True

    def __call__(self, grammar: str) -> Grammar:
        """A fresh constraint; compiles on the spot when it is not at hand."""
        bare = bare_of(grammar)
        outcome = self._cache.get(bare)
        if outcome is None:
            outcome = self._slow.workshop.make(bare)
            self._cache.put(bare, outcome)
        if isinstance(outcome, RequestError):
            raise outcome
        constraint = Constraint.decode(grammar)
        masks = self._words.get()[2]
        return Constrained(outcome.start(), masks, masks.text(constraint), constraint.after)

    def close(self) -> None:
        self._quick.close()
        self._slow.close()

    def _finish_quick(self, bare: str, outcome: Program | RequestError) -> None:
        if isinstance(outcome, RequestError) and outcome.code == LIMIT and bare in self._pending:
            self._slow.put(bare)
        else:
            self._finish(bare, outcome)

    def _finish(self, bare: str, outcome: Program | RequestError) -> None:
        self._done.put((bare, outcome))
        self._wake()


class _Lane:
    """A thread with a workshop, that makes the shortest constraint first.

    Args:
        finish: told of each outcome, from the thread.
    """

    def __init__(
        self, workshop: Workshop, finish: Callable[[str, Program | RequestError], None]
    ) -> None:
        self.workshop = workshop
        self._finish = finish
        self._jobs: PriorityQueue[tuple[int, int, str | None]] = PriorityQueue()
        """(length, number, constraint); None ends the thread."""
        self._numbers = count()
        self._wanted: dict[str, int] = {}
        """Constraint -> the number of its job; other jobs for it are void."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, bare: str) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="grammar", daemon=True)
                self._thread.start()
            number = self._wanted[bare] = next(self._numbers)
            self._jobs.put((len(bare), number, bare))

    def drop(self, bare: str) -> None:
        with self._lock:
            self._wanted.pop(bare, None)

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put((-1, -1, None))
        self.workshop.close()

    def _work(self) -> None:
        while True:
            _, number, bare = self._jobs.get()
            if bare is None:
                return
            with self._lock:
                if self._wanted.get(bare) != number:
                    continue
                del self._wanted[bare]
            self._finish(bare, self.workshop.make(bare))


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
