"""GrammarCompiler: from `Generate.grammar` to matchers, as the engine sees it. One thread hands
constraints to the workshop, where they are compiled; a bounded cache keeps the results.

Knows no requests and no steps.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from banyan.base.errors import RequestError
from banyan.grammar.base import Grammar, Program
from banyan.grammar.constrained import Constrained
from banyan.grammar.workshop import NEVER, GrammarLimits, Read, Workshop
from banyan.messages.constraint import Constraint

_ENTRY_BYTES = 4096
"""What a cache entry takes besides the program."""


class GrammarCompiler:
    """Satisfies grammar.base.GrammarFactory. Everything but the thread belongs to one loop.

    Args:
        backends: names in BACKENDS; each stands in for what those before it refuse.
        read: how to get the vocabulary.
        compact: no white space between JSON tokens.
        wake: called from the thread whenever `collect` has something.
    """

    def __init__(
        self,
        backends: Sequence[str],
        read: Read,
        compact: bool = False,
        limits: GrammarLimits | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits or GrammarLimits()
        self._workshop = Workshop(backends, read, compact, self._limits)
        self._wake = wake
        self._cache = _Cache(self._limits.cache_bytes)
        self._pending: set[str] = set()
        self._passing = ""
        """A failure that may not come again."""
        self._jobs: SimpleQueue[str | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[str, Program | RequestError]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def has(self, grammar: str) -> bool:
        """Whether `__call__` answers at once."""
        return self._cache.get(_bare(grammar)) is not None

    def prepare(self, grammar: str) -> None:
        """Compile in the background; RequestError 503 when too many constraints wait."""
        bare = _bare(grammar)
        if bare in self._pending:
            return
        if len(self._pending) >= self._limits.max_waiting:
            raise RequestError(
                f"{len(self._pending)} constraints are waiting to be compiled",
                status=503,
                code="queue_full",
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammar", daemon=True)
            self._thread.start()
        self._pending.add(bare)
        self._jobs.put(bare)

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
        bare = _bare(grammar)
        outcome = self._cache.get(bare)
        if outcome is None:
            outcome = self._workshop.make(bare)
            self._cache.put(bare, outcome)
        if isinstance(outcome, RequestError):
            raise outcome
        constraint = Constraint.decode(grammar)
        masks = self._workshop.masks
        return Constrained(outcome.start(), masks, masks.text(constraint), constraint.after)

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
        self._workshop.close()

    def _work(self) -> None:
        while (bare := self._jobs.get()) is not None:
            self._done.put((bare, self._workshop.make(bare)))
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


def _bare(grammar: str) -> str:
    """The constraint without where it begins: that does not change how it is compiled."""
    constraint = Constraint.decode(grammar)
    return Constraint(constraint.kind, constraint.text).encode()
