"""GrammarCompiler: from `Generate.grammar` to matchers, as the engine sees it. One thread hands
constraints to the compiler process under a time limit; a bounded cache keeps the results.

Knows no requests and no steps.
"""

import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from banyan.base.errors import RequestError
from banyan.base.log import logger
from banyan.grammar.base import BACKENDS, Backend, Grammar, Program
from banyan.grammar.constrained import Constrained, TokenMasks
from banyan.grammar.vocabulary import Encode, Vocabulary
from banyan.grammar.worker import Job, Outcome, Setup, encode_frame, read_frame
from banyan.messages.constraint import Constraint

log = logger(__name__)

_NEVER = "invalid_grammar"
"""Code of a constraint that cannot be compiled however often one tries."""
_START_S = 60.0
"""Loading a library on a busy machine."""
_ENTRY_BYTES = 4096
"""What a cache entry takes besides the program."""


@dataclass(frozen=True)
class GrammarLimits:
    """What compiling may cost."""

    time_s: float = 20.0
    memory_bytes: int = 1 << 30
    cache_bytes: int = 256 << 20
    max_waiting: int = 1024
    """Different constraints waiting to be compiled."""


Read = Callable[[], tuple[Vocabulary, Encode]]
"""Reads the vocabulary, when the first constraint needs it."""


class GrammarCompiler:
    """Satisfies grammar.base.GrammarFactory. Everything but the thread belongs to one loop.

    Args:
        backend: name in BACKENDS.
        read: how to get the vocabulary.
        compact: no white space between JSON tokens.
        wake: called from the thread whenever `collect` has something.
    """

    def __init__(
        self,
        backend: str,
        read: Read,
        compact: bool = False,
        limits: GrammarLimits | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits or GrammarLimits()
        self._workshop = _Workshop(backend, read, compact, self._limits)
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
        if isinstance(outcome, RequestError) and outcome.code != _NEVER:
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


class _Workshop:
    """Compiles one constraint after the other with the help of a process that may fail."""

    def __init__(self, backend: str, read: Read, compact: bool, limits: GrammarLimits) -> None:
        self._name = backend
        self._read = read
        self._compact = compact
        self._limits = limits
        self._worker: _Worker | None = None
        self._parts: tuple[Vocabulary, TokenMasks, Backend] | None = None
        self._lock = threading.Lock()

    @property
    def masks(self) -> TokenMasks:
        assert self._parts is not None
        return self._parts[1]

    def make(self, grammar: str) -> "Program | RequestError":
        """The program, or why there is none; whatever fails, fails this constraint alone."""
        with self._lock:
            try:
                return self._make(grammar)
            except RequestError as error:
                return error
            except Exception as error:
                log.exception("a grammar could not be compiled")
                text = f"{type(error).__name__}: {error}"
                return _refusal(text, status=500, code="grammar_failure")

    def close(self) -> None:
        if (worker := self._worker) is not None:
            worker.close()

    def _make(self, grammar: str) -> Program:
        if self._parts is None:
            vocabulary, encode = self._read()
            if not vocabulary.end_ids:
                raise _refusal("the model has no end-of-sequence token")
            backend = BACKENDS.load(self._name)(vocabulary, encode, self._compact)
            self._parts = vocabulary, TokenMasks(vocabulary), backend
        vocabulary, _, backend = self._parts
        outcome = self._ask(vocabulary, grammar)
        if outcome.error:
            raise _refusal(f"{outcome.error} ({self._name})")
        program = backend.load(outcome.compiled)
        if not self._can_begin(program, grammar):
            raise _refusal(f"no output matches it ({self._name})")
        return program

    def _can_begin(self, program: Program, grammar: str) -> bool:
        text = self.masks.text(Constraint.decode(grammar))
        return any(Constrained(program.start(), self.masks, text).mask())

    def _ask(self, vocabulary: Vocabulary, grammar: str) -> Outcome:
        limits = self._limits
        if self._worker is None:
            self._worker = _Worker()
        try:
            if not self._worker.is_set_up:
                memory = limits.memory_bytes
                self._worker.set_up(Setup(self._name, vocabulary, self._compact, memory))
            return self._worker.ask(Job(grammar), limits.time_s)
        except _Lost as lost:
            self._worker.close()
            self._worker = None
            bounds = f"{limits.time_s:g} s, {limits.memory_bytes >> 20} MiB"
            text = f"{lost} ({self._name}; limits: {bounds})"
            raise _refusal(text, code="grammar_limit") from None


class _Lost(Exception):
    """The process is of no more use."""


class _Worker:
    """The compiler process. All methods but `close` raise _Lost when it fails."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "banyan.grammar.worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.is_set_up = False

    def set_up(self, setup: Setup) -> None:
        """Have it load the library; that is not on the clock of a request's constraint."""
        self._send(encode_frame(setup))
        self._send(encode_frame(Job("")))
        self._answer(_START_S, "the compiler did not start")
        self.is_set_up = True

    def ask(self, job: Job, time_s: float) -> Outcome:
        self._send(encode_frame(job))
        return self._answer(time_s, "it takes too long to compile")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _send(self, frame: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(frame)
        try:
            while view:
                view = view[os.write(self._process.stdin.fileno(), view) :]
        except BrokenPipeError:
            raise _Lost("the compiler has ended") from None

    def _answer(self, time_s: float, late: str) -> Outcome:
        assert self._process.stdout is not None
        reader = _Deadline(self._process.stdout.fileno(), time_s, late)
        outcome = read_frame(reader.read, Outcome)
        if outcome is None:
            raise _Lost("it needs too much memory to compile, or breaks the compiler")
        return outcome


class _Deadline:
    """Reads a pipe until a moment; _Lost after it."""

    def __init__(self, fd: int, time_s: float, late: str) -> None:
        self._fd = fd
        self._end_s = time.monotonic() + time_s
        self._late = late

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            left = self._end_s - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                raise _Lost(self._late)
            part = os.read(self._fd, min(size, 1 << 20))
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


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


def _refusal(text: str, status: int = 400, code: str = _NEVER) -> RequestError:
    return RequestError(f"The constraint cannot be compiled: {text}", status=status, code=code)
