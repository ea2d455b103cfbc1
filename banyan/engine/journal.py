"""Journal: a file with all inputs of an EngineCore, in order, and a hash of every plan.

Plans depend on these inputs only, so the records reproduce every plan (`sim/replay.py`). The file
is memory-mapped: records survive a crash of the process. Its size is fixed. When it is full,
recording stops with a log line, and the last record is `Full`.

Layout: magic with version, then records. Each record is two little-endian uint32, length and
CRC-32, followed by that many bytes of msgpack. A length of 0 ends the file. The first record is the
CoreSpec, the others are JournalRecord. The flight recorder (engine/flight_recorder.py) uses the
same format.
"""

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from zlib import crc32

import msgspec

from banyan.base.errors import ConfigError, ModelError
from banyan.base.log import logger
from banyan.base.os import open_regular
from banyan.engine.core import CoreInput
from banyan.engine.core_spec import CoreSpec
from banyan.engine.flight_recorder_memory import HEAD
from banyan.engine.flight_recorder_memory import JOURNAL_MAGIC as MAGIC
from banyan.messages.plan import StepLoad, StepPlan, StepResult

log = logger(__name__)

_HASH_BYTES = 8
_NEW_FIELDS = 3
"""Last fields of StepPlan that the first journals did not have: forget, contents, pieces."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
_ENDING_BYTES = 64
"""Bytes reserved for the record `Full` and the end mark."""


class Received(msgspec.Struct, frozen=True, array_like=True, tag="in"):
    now: float
    message: CoreInput


class Launched(msgspec.Struct, frozen=True, array_like=True, tag="launch"):
    """One attempt to plan a step; an empty hash: there was no plan."""

    now: float
    plan_hash: bytes
    peers: list[StepLoad] | None
    """None: other replicas had not agreed yet, and the plan was kept for later."""
    is_paused: bool = False
    """The step ran only because other replicas had work."""


class Completed(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    now: float
    result: msgspec.Raw
    """A StepResult, encoded separately because a msgspec union may hold one untagged type only."""


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    now: float


class Full(msgspec.Struct, frozen=True, array_like=True, tag="full"):
    """The file is full; later inputs are not recorded."""


class Began(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """State of the core at the beginning of a recording, or of a half of the flight recorder."""

    now: float
    wall_s: float
    """Seconds since 1970 at `now`."""
    build: str
    """Version of Banyan that wrote the record."""
    core: bytes
    """Snapshot (engine/snapshot.py); b"" if there was not enough space."""


JournalRecord = Received | Launched | Completed | Flushed | Full | Began


def plan_hash(plan: StepPlan | None) -> bytes:
    """8 bytes that differ when plans differ; b"" for no plan."""
    if plan is None:
        return b""
    fields = msgspec.structs.astuple(plan)
    if not any(fields[-_NEW_FIELDS:]):  # as before there were any, so that old journals replay
        fields = fields[:-_NEW_FIELDS]
    return blake2b(msgspec.msgpack.encode(fields), digest_size=_HASH_BYTES).digest()


class Records:
    """Encodes calls as records; a subclass stores them. Implements `engine.core.CoreRecorder`."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def append(self, body: bytes) -> None:
        """Store a record."""
        raise NotImplementedError

    def before(self, size: int, now: float) -> None:
        """Called before an input of `size` bytes is stored; all earlier inputs are recorded."""

    def rested(self, now: float) -> None:
        """Called when the core has become idle."""

    def received(self, message: CoreInput, now: float) -> None:
        self._store(Received(now, message))

    def launched(
        self, plan: StepPlan | None, peers: list[StepLoad] | None, now: float, is_paused: bool
    ) -> None:
        record = Launched(now, plan_hash(plan), peers, is_paused)
        self.append(self._encoder.encode(record))

    def completed(self, result: StepResult, now: float) -> None:
        if result.hidden:  # large, and no decision depends on them
            result = msgspec.structs.replace(result, hidden=[])
        self._store(Completed(now, msgspec.Raw(self._encoder.encode(result))))

    def flushed(self, now: float) -> None:
        self._store(Flushed(now))

    def _store(self, record: Received | Completed | Flushed) -> None:
        body = self._encoder.encode(record)
        self.before(len(body), record.now)
        self.append(body)


class Journal(Records):
    """Writes records into a file.

    Args:
        path: created or overwritten. A symbolic link is refused, because its target may be
            anything.
        spec: the spec of the core.
        size: bytes of the file. They are allocated at the start: with a sparse file, a full disk
            would kill the process at a write into the mapping.

    Raises:
        ConfigError: the file cannot be written, or the disk has too little space.
    """

    def __init__(self, path: str, spec: CoreSpec, size: int) -> None:
        super().__init__()
        self._path = path
        header = self._encoder.encode(spec)
        self._end = len(MAGIC)
        if size < self._end + len(header) + 1024:
            raise ConfigError(f"--journal-bytes {size} does not even hold the header")
        try:
            self._descriptor = os.open(path, _FLAGS, 0o600)
        except OSError as error:
            raise _unusable(path, size, error) from None
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            self._map = mmap.mmap(self._descriptor, size)
        except OSError as error:
            with suppress(OSError):  # a device cannot be truncated
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            raise _unusable(path, size, error) from None
        self._map[: self._end] = MAGIC
        self._is_full = False
        self._append(header)

    def close(self) -> None:
        """Truncate the file after the last record."""
        if self._map.closed:
            return
        self._map.flush()
        self._map.close()
        os.ftruncate(self._descriptor, self._end)
        os.close(self._descriptor)

    def append(self, body: bytes) -> None:
        if not self._is_full:
            self._append(body)

    def _append(self, body: bytes) -> None:
        end = self._end + HEAD.size + len(body)
        if end + _ENDING_BYTES > len(self._map):
            self._is_full = True
            log.warning("journal %s is full at %d bytes: recording stops", self._path, self._end)
            body = self._encoder.encode(Full())
            end = self._end + HEAD.size + len(body)
        # The head is written last. Without it a reader does not see the record.
        self._map[self._end + HEAD.size : end] = body
        HEAD.pack_into(self._map, self._end, len(body), crc32(body))
        self._end = end


def _unusable(path: str, size: int, error: OSError) -> ConfigError:
    why = "it is a link" if error.errno == errno.ELOOP else error.strerror
    return ConfigError(
        f"--journal {path!r} cannot be written with {size} bytes: {why}",
        hint="name another file, or fewer --journal-bytes",
    )


def read_journal(path: str) -> tuple[CoreSpec, Iterator[JournalRecord]]:
    """Read the spec and the records, in order. An incomplete last record is skipped.

    Raises:
        ModelError: the file is not a journal, or a record does not decode (with its number).
    """
    try:
        with open_regular(path) as file:
            content = file.read()
    except OSError as error:
        raise ModelError(f"{path!r} cannot be read: {error.strerror}") from None
    if not content.startswith(MAGIC):
        raise ModelError(f"{path!r} is not a journal of this version")
    bodies = _bodies(path, memoryview(content), len(MAGIC))
    try:
        spec = msgspec.msgpack.decode(next(bodies), type=CoreSpec)
    except (StopIteration, msgspec.DecodeError) as error:
        raise ModelError(f"{path!r} has no readable header: {error}") from None
    return spec, _records(path, bodies)


def _records(path: str, bodies: Iterator[memoryview]) -> Iterator[JournalRecord]:
    decoder = msgspec.msgpack.Decoder(JournalRecord)
    for number, body in enumerate(bodies, 1):
        try:
            yield decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ModelError(f"{path!r} record {number} does not decode: {error}") from None


def _bodies(path: str, content: memoryview, start: int) -> Iterator[memoryview]:
    """The bytes of every record; number 0 is the header. An incomplete last record is skipped."""
    number = 0
    while start + HEAD.size <= len(content):
        length, checksum = HEAD.unpack_from(content, start)
        start += HEAD.size
        if not length and not checksum:
            return
        body = content[start : start + length]
        if len(body) < length:
            log.warning(
                "journal %s is cut off inside record %d: what follows is lost", path, number
            )
            return
        if crc32(body) != checksum:
            raise ModelError(f"{path!r} record {number} is damaged: its checksum is wrong")
        yield body
        start += length
        number += 1
