"""GrammarWorkerPool: from a constraint to a program, with the help of compiler processes that
may fail. One library is asked after the other; the first that honours the whole constraint has it.

"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from banyan.base.child_process import WorkerProcess
from banyan.base.errors import ModelError, RequestError
from banyan.base.log import logger
from banyan.grammar.base import BACKENDS, Backend, Program
from banyan.grammar.constrained import Constrained, TokenMasks
from banyan.grammar.vocabulary import Encode, Vocabulary
from banyan.grammar.worker import MAX_FRAME_BYTES, CompileOutcome, Job, Setup, encode_frame
from banyan.messages.requests import Constraint

log = logger(__name__)

NEVER = "invalid_grammar"
"""Code of a constraint that cannot be compiled however often one tries."""
LIMIT = "grammar_limit"
"""Code of one that takes more time or memory than it may."""
_PREFIX = "The constraint cannot be compiled: "
_START_S = 60.0
"""Loading a library on a busy machine."""
_PATIENCE_S = 5.0
"""For a library that another one can stand in for."""


@dataclass(frozen=True)
class GrammarLimits:
    """What compiling may cost."""

    time_s: float = 20.0
    quick_s: float = 2.0
    """A longer compilation continues after the others, with limit `time_s`."""
    memory_bytes: int = 1 << 30
    cache_bytes: int = 256 << 20
    max_waiting: int = 1024
    """Different constraints waiting to be compiled, shared by the callers."""


Read = Callable[[], tuple[Vocabulary, Encode]]
"""Reads the vocabulary."""


class Words:
    """The vocabulary and what follows from it, read when the first constraint needs it. For all
    pools and their threads."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._found: tuple[Vocabulary, Encode, TokenMasks] | None = None
        self._is_reported = False
        self._lock = threading.Lock()

    def get(self) -> tuple[Vocabulary, Encode, TokenMasks]:
        """RequestError when the model cannot be constrained."""
        with self._lock:
            if self._found is None:
                vocabulary, encode = self._words_of_the_model()
                if not vocabulary.end_ids:
                    raise _refusal("the model has no end-of-sequence token")
                self._found = vocabulary, encode, TokenMasks(vocabulary)
            return self._found

    def _words_of_the_model(self) -> tuple[Vocabulary, Encode]:
        try:
            return self._read()
        except ModelError as error:  # nobody looks for one where ids alone are served
            if not self._is_reported:
                log.warning("constraints are refused: %s", error)
            self._is_reported = True
            raise _refusal("the model has no tokenizer that can be read") from None


class GrammarWorkerPool:
    """Compiles one constraint after the other.

    Args:
        backends: names in BACKENDS, in the order in which they are asked.
    """

    def __init__(
        self, backends: Sequence[str], words: Words, whitespace: str | None, limits: GrammarLimits
    ) -> None:
        self._names = backends
        self._words = words
        self._whitespace = whitespace
        self._limits = limits
        self._libraries: dict[str, _Library] = {}
        self._lock = threading.Lock()

    def make(self, grammar: str) -> Program | RequestError:
        """The program, or why there is none; whatever fails, fails this constraint alone."""
        with self._lock:
            refusals: list[RequestError] = []
            for name in self._names:
                outcome = self._try(name, grammar)
                if not isinstance(outcome, RequestError):
                    if refusals:
                        log.info("grammar compiled by=%s instead: %s", name, refusals[0].text)
                    return outcome
                refusals.append(outcome)
            return _all_of(refusals)

    def close(self) -> None:
        for library in list(self._libraries.values()):
            library.close()

    def _try(self, name: str, grammar: str) -> Program | RequestError:
        try:
            return self._make(name, grammar)
        except RequestError as error:
            return error
        except Exception as error:
            log.exception("a grammar could not be compiled")
            return _refusal(f"{type(error).__name__}: {error}", 500, "grammar_failure")

    def _make(self, name: str, grammar: str) -> Program:
        library = self._library(name)
        limit_s = self._limits.time_s
        program = library.make(
            grammar, limit_s if name == self._names[-1] else min(limit_s, _PATIENCE_S)
        )
        masks = self._words.get()[2]
        text = masks.text(Constraint.decode(grammar))
        if not any(Constrained(program.start(), masks, text).mask()):
            raise _refusal(f"no output matches it ({name})")
        return program

    def _library(self, name: str) -> "_Library":
        vocabulary, encode, _ = self._words.get()
        if name not in self._libraries:
            backend = BACKENDS.load(name)(vocabulary, encode, self._whitespace)
            setup = Setup(name, vocabulary, self._whitespace, self._limits.memory_bytes)
            self._libraries[name] = _Library(backend, setup)
        return self._libraries[name]


class _Library:
    """One library: in this process to load what it compiles, in another to compile."""

    def __init__(self, backend: Backend, setup: Setup) -> None:
        self._backend = backend
        self._setup = setup
        self._worker: _Worker | None = None

    def make(self, grammar: str, time_s: float) -> Program:
        """RequestError when it refuses the constraint or takes too much."""
        outcome = self._ask(grammar, time_s)
        if outcome.error:
            raise _refusal(f"{outcome.error} ({self._setup.backend})")
        return self._backend.load(outcome.compiled)

    def close(self) -> None:
        if (worker := self._worker) is not None:
            worker.close()

    def _ask(self, grammar: str, time_s: float) -> CompileOutcome:
        setup = self._setup
        try:
            if self._worker is None:
                self._worker = _Worker()
                self._worker.set_up(setup)
            return self._worker.ask(Job(grammar), time_s)
        except _Lost as lost:
            self.close()
            self._worker = None
            bounds = f"{time_s:g} s, {setup.memory_bytes >> 20} MiB"
            text = f"{lost} ({setup.backend}; limits: {bounds})"
            raise _refusal(text, code=LIMIT) from None


class _Lost(Exception):
    """The process is of no more use."""


class _Worker:
    """The compiler process. All methods but `close` raise _Lost when it fails."""

    def __init__(self) -> None:
        self._process = WorkerProcess("banyan.grammar.worker", max_answer_bytes=MAX_FRAME_BYTES)

    def set_up(self, setup: Setup) -> None:
        """Load the library. This is not part of the time limit of a constraint."""
        task = encode_frame(setup) + encode_frame(Job(""))
        self._run(task, _START_S, "the compiler did not start")

    def ask(self, job: Job, time_s: float) -> CompileOutcome:
        return self._run(encode_frame(job), time_s, "it takes too long to compile")

    def close(self) -> None:
        self._process.close()

    def _run(self, task: bytes, limit_s: float, too_late: str) -> CompileOutcome:
        try:
            return msgspec.msgpack.decode(self._process.run(task, limit_s), type=CompileOutcome)
        except TimeoutError:
            raise _Lost(too_late) from None
        except EOFError:
            raise _Lost("it needs too much memory to compile, or breaks the compiler") from None
        except (ValueError, msgspec.DecodeError) as error:
            raise _Lost(f"the compiler sends nonsense: {error}") from None


def _refusal(text: str, status: int = 400, code: str = NEVER) -> RequestError:
    return RequestError(f"{_PREFIX}{text}", status=status, code=code)


def _all_of(refusals: list[RequestError]) -> RequestError:
    """One answer for several libraries; it is final where each of theirs is."""
    if len(refusals) == 1:
        return refusals[0]
    passing = next((x for x in refusals if x.code != NEVER), refusals[0])
    reasons = dict.fromkeys(x.text.removeprefix(_PREFIX) for x in refusals)
    return RequestError(_PREFIX + "; ".join(reasons), status=passing.status, code=passing.code)
