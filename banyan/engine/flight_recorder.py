"""FlightRecorder: the latest records of an engine, in memory shared with the server process.

The records survive a crash of the engine (engine/flight_recorder_memory.py). The memory has two
halves. Each begins with a snapshot of the core (engine/snapshot.py), so a replay can begin there.
When one half is full, the other one is overwritten; if possible while the engine is idle, because a
snapshot takes time.
"""

import mmap
import time
from contextlib import ExitStack
from zlib import crc32

from banyan.base.install import VERSION
from banyan.base.log import logger
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
"""Bytes reserved for records of plans without an input before them."""
_IDLE_DIVISOR = 2
"""A half with less than 1 / this left is changed when the engine becomes idle."""


class FlightRecorder(Records):
    """Records one core into shared memory.

    Args:
        memory: the shared memory in its final size.
        spec: the spec of the core.
    """

    def __init__(self, memory: mmap.mmap, spec: CoreSpec) -> None:
        super().__init__()
        self._memory = memory
        self._spec = self._encoder.encode(spec)
        self._half = half_bytes(len(memory))
        self._core: EngineCore | None = None
        self._number = 0
        self._end = self._limit = 0
        """Offsets in the current half; equal = it is full."""
        self._is_whole = True
        """No record is missing since the last snapshot."""
        self._has_warned = False
        """A warning about missing snapshots has been logged."""
        memory[: len(RING_MAGIC)] = RING_MAGIC

    def follow(self, core: EngineCore, now: float) -> None:
        """Start to record a new core."""
        self._core = core
        self._begin(now)

    def before(self, size: int, now: float) -> None:
        if not self._is_whole or self._end + HEAD.size + size + _SPARE > self._limit:
            self._begin(now)

    def rested(self, now: float) -> None:
        if self._limit - self._end < self._half // _IDLE_DIVISOR:
            self._begin(now)

    def append(self, body: bytes) -> None:
        """Store a record; without space drop it, and all others until the next snapshot."""
        end = self._end + HEAD.size + len(body)
        if not self._is_whole or end + HEAD.size > self._limit:
            self._is_whole = False
            return
        # The head is written last. Without it a reader does not see the record.
        self._memory[end : end + HEAD.size] = _END
        self._memory[self._end + HEAD.size : end] = body
        HEAD.pack_into(self._memory, self._end, len(body), crc32(body))
        self._end = end

    def _begin(self, now: float) -> None:
        """Continue in the other half, which is overwritten."""
        body = self._encoder.encode(Began(now, time.time(), VERSION, self._snapshot()))
        start = len(RING_MAGIC) + self._number % 2 * self._half
        HALF.pack_into(self._memory, start, 0, 0)
        self._end, self._limit = start + HALF.size, start + self._half
        was_whole, self._is_whole = self._is_whole and self._number > 0, True
        self.append(self._spec)
        self.append(body)
        self._number += 1
        HALF.pack_into(self._memory, start, self._number, was_whole)

    def _snapshot(self) -> bytes:
        """A snapshot of the core; b"" if it fails or leaves too little space for records."""
        assert self._core is not None
        try:
            taken = snapshot.take(self._core)
        except TypeError as error:  # the engine must not stop because of its recorder
            self._warn(str(error))
            return b""
        if len(self._spec) + len(taken) <= self._half // _IDLE_DIVISOR:
            return taken
        self._warn(
            f"a snapshot takes {len(taken)} bytes, and there are {2 * self._half} bytes for two "
            "snapshots and the records; raise --flight-recorder-bytes"
        )
        return b""

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            log.warning("the flight recorder's records cannot be replayed: %s", why)
        self._has_warned = True


class RecorderPair:
    """Forwards the calls of one core to two recorders."""

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
    """The recorders of one engine that the flags select.

    Args:
        descriptor: descriptor of the flight recorder's memory; NO_RECORDING = no flight recorder.
        cleanup: closes the journal.

    Raises:
        ConfigError: the journal cannot be written.
    """

    def __init__(
        self, observe: ObserveConfig, spec: CoreSpec, descriptor: int, cleanup: ExitStack
    ) -> None:
        self.recorder: CoreRecorder | None = None
        """Recorder for the core; None if nothing is recorded."""
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
        """Start to record a core; call it before the core receives input."""
        if self._flight is not None:
            self._flight.follow(core, now)
