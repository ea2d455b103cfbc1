"""FlightRecorder: the latest records of an engine, in memory of a fixed size that its server holds
too, so that they outlast the engine (engine/flight_recorder_memory.py).

The memory has two halves. Each begins with what the core was at that moment (engine/snapshot.py),
so a replay can begin there: when one half is full, the other one is written anew. That waits for a
moment of rest, as long as there is room for waiting.
"""

import mmap
import time
from contextlib import ExitStack
from zlib import crc32

from banyan.base.log import logger
from banyan.base.version import own_version
from banyan.config.schema import ObserveConfig
from banyan.engine import snapshot
from banyan.engine.core import CoreInput, CoreRecorder, EngineCore
from banyan.engine.core_spec import CoreSpec
from banyan.engine.flight_recorder_memory import HALF, HEAD, RING_MAGIC, half_bytes, mapped
from banyan.engine.journal import Began, Journal, Records
from banyan.engine.process_spec import NO_RECORDING
from banyan.messages.plan import StepLoad, StepPlan, StepResult

log = logger(__name__)

_END = bytes(HEAD.size)
_SPARE = 4096
"""Room for the records of plans that are made before anything else is told."""
_ROOM_TO_WAIT = 2
"""A half that is full by 1 / this is changed at the next moment of rest."""


class FlightRecorder(Records):
    """
    Args:
        memory: where the records go; all of it is there already.
        spec: what rebuilds the core.
    """

    def __init__(self, memory: mmap.mmap, spec: CoreSpec) -> None:
        super().__init__()
        self._memory = memory
        self._spec = self._encoder.encode(spec)
        self._half = half_bytes(len(memory))
        self._core: EngineCore | None = None
        self._number = 0
        self._end = self._limit = 0
        """Of the half that is written; equal = it takes no more."""
        self._is_whole = True
        """No record has been left out."""
        self._is_mute = False
        """Snapshots cannot be had, and the log was told."""
        memory[: len(RING_MAGIC)] = RING_MAGIC

    def follow(self, core: EngineCore, now: float) -> None:
        """Record this core, which has decided nothing yet."""
        self._core = core
        self._begin(now)

    def before(self, size: int, now: float) -> None:
        if not self._is_whole or self._end + HEAD.size + size + _SPARE > self._limit:
            self._begin(now)

    def rested(self, now: float) -> None:
        if self._limit - self._end < self._half // _ROOM_TO_WAIT:
            self._begin(now)

    def append(self, body: bytes) -> None:
        """A record without room is left out, and what follows it too, up to the next snapshot."""
        end = self._end + HEAD.size + len(body)
        if not self._is_whole or end + HEAD.size > self._limit:
            self._is_whole = False
            return
        # The head comes last: until it is there, the record does not exist.
        self._memory[end : end + HEAD.size] = _END
        self._memory[self._end + HEAD.size : end] = body
        HEAD.pack_into(self._memory, self._end, len(body), crc32(body))
        self._end = end

    def _begin(self, now: float) -> None:
        """Write the other half from here on, over what it had."""
        body = self._encoder.encode(Began(now, time.time(), own_version(), self._snapshot()))
        start = len(RING_MAGIC) + self._number % 2 * self._half
        HALF.pack_into(self._memory, start, 0, 0)
        self._end, self._limit = start + HALF.size, start + self._half
        was_whole, self._is_whole = self._is_whole and self._number > 0, True
        self.append(self._spec)
        self.append(body)
        self._number += 1
        HALF.pack_into(self._memory, start, self._number, was_whole)

    def _snapshot(self) -> bytes:
        """b"" when it leaves too little room for records, or there is none."""
        assert self._core is not None
        try:
            taken = snapshot.take(self._core)
        except TypeError as error:  # the engine goes on, whatever became of its record
            self._complain(str(error))
            return b""
        if len(self._spec) + len(taken) <= self._half // _ROOM_TO_WAIT:
            return taken
        told = f"a snapshot takes {len(taken)} bytes, there are {2 * self._half} for two and what "
        self._complain(told + "lies between; raise --flight-recorder-bytes")
        return b""

    def _complain(self, why: str) -> None:
        if not self._is_mute:
            log.warning("what the flight recorder holds cannot be replayed: %s", why)
        self._is_mute = True


class RecorderPair:
    """Two recorders of one core."""

    def __init__(self, one: CoreRecorder, other: CoreRecorder) -> None:
        self._both = one, other

    def received(self, message: CoreInput, now: float) -> None:
        for each in self._both:
            each.received(message, now)

    def launched(
        self, plan: StepPlan | None, peers: list[StepLoad] | None, now: float, is_paused: bool
    ) -> None:
        for each in self._both:
            each.launched(plan, peers, now, is_paused)

    def completed(self, result: StepResult, now: float) -> None:
        for each in self._both:
            each.completed(result, now)

    def flushed(self, now: float) -> None:
        for each in self._both:
            each.flushed(now)

    def rested(self, now: float) -> None:
        for each in self._both:
            each.rested(now)


class Recorders:
    """What the flags ask to be recorded of one engine.

    Args:
        descriptor: of the flight recorder's memory; NO_RECORDING = there is none.
        cleanup: closes what is opened here.

    Raises:
        ConfigError: the journal cannot be written.
    """

    def __init__(
        self, observe: ObserveConfig, spec: CoreSpec, descriptor: int, cleanup: ExitStack
    ) -> None:
        self.recorder: CoreRecorder | None = None
        """For the core; None when nothing is recorded."""
        self._flight: FlightRecorder | None = None
        if descriptor != NO_RECORDING:
            memory = mapped(descriptor)
            self.recorder = self._flight = FlightRecorder(memory, spec)
        if observe.journal:
            journal = Journal(observe.journal, spec, observe.journal_bytes)
            cleanup.callback(journal.close)
            flight = self._flight
            self.recorder = journal if flight is None else RecorderPair(journal, flight)

    def follow(self, core: EngineCore, now: float) -> None:
        """The core that has the recorder, before anything is told to it."""
        if self._flight is not None:
            self._flight.follow(core, now)
