"""Lane: a thread with a worker_pool that makes one constraint after the other. Callers take
turns by the time that theirs have taken; of one caller the shortest is made first.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from banyan.base.errors import RequestError
from banyan.grammar.base import Program
from banyan.grammar.worker_pool import GrammarWorkerPool


@dataclass
class CompileJob:
    """A constraint that waits to be made, and for whom."""

    bare: str
    callers: set[bytes]
    number: int = field(default_factory=count().__next__)
    """ControlOp of arrival."""


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
        """Take the job whose turn it is; None once the lane is closed."""
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
