"""Journal: what went into an EngineCore, and a hash of every plan that came out, in order.

Records lie in a memory-mapped file, so a crash of the process loses none of them. File layout, all
integers little-endian:

    magic 8 | header length u32 | header crc u32 | header, msgpack | records …
    record: length u32 | crc u32 | payload, msgpack.  Length 0 = end.

A record's length is written last, so a record is there as a whole or not at all. A full journal
says so in its last record and takes no more. Knows nothing of who drives the core.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import msgspec

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.engine.spec import CoreSpec
from banyan.messages.plan import CopyResult, StepPlan, StepResult
from banyan.messages.requests import Message

log = logger(__name__)

MAGIC = b"BANYANJ1"
_WORDS = struct.Struct("<II")
_DIGEST_BYTES = 8


class Header(msgspec.Struct, frozen=True):
    """What the core was built from, and the bytes that the file has room for."""

    core: CoreSpec
    size: int


class Received(msgspec.Struct, frozen=True, array_like=True, tag="received"):
    now: float
    message: Message


class Copied(msgspec.Struct, frozen=True, array_like=True, tag="copied"):
    now: float
    result: CopyResult


class Launched(msgspec.Struct, frozen=True, array_like=True, tag="launched"):
    """An attempt to launch; `digest` is b"" when it gave no plan."""

    now: float
    digest: bytes
    peers: list[int] = []


class Completed(msgspec.Struct, frozen=True, array_like=True, tag="completed"):
    now: float
    result: StepResult


class Full(msgspec.Struct, frozen=True, array_like=True, tag="full"):
    """What came after this was not recorded."""


Record = Received | Copied | Launched | Completed | Full


class JournalError(ConfigError):
    """A file that is no journal, or one that was damaged."""


def digest_of(plan: StepPlan | None) -> bytes:
    """Eight bytes that stand for the whole plan."""
    if plan is None:
        return b""
    return blake2b(msgspec.msgpack.encode(plan), digest_size=_DIGEST_BYTES).digest()


class Journal:
    """Writes one journal. Satisfies `engine.loop.Recorder`.

    Args:
        path: file, replaced when it exists, readable by its owner only: it holds prompts.
        core: what the recorded core was built from.
        max_bytes: room in the file; ConfigError when not even the header fits.
    """

    def __init__(self, path: str, core: CoreSpec, max_bytes: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._full = self._encoder.encode(Full())
        header = self._encoder.encode(Header(core, max_bytes))
        self._end = len(MAGIC) + _WORDS.size + len(header)
        if max_bytes < self._end + 2 * _WORDS.size + len(self._full):
            raise ConfigError(f"a journal of {max_bytes} bytes is too small", hint="Allow 1 MiB")
        self.path = path
        self.is_full = False
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, max_bytes)
        self._map = mmap.mmap(self._file, max_bytes)
        self._map[: self._end] = MAGIC + _WORDS.pack(len(header), crc32(header)) + header

    def received(self, message: Message | CopyResult, now: float) -> None:
        if isinstance(message, CopyResult):
            self._write(Copied(now, message))
        else:
            self._write(Received(now, message))

    def launched(self, plan: StepPlan | None, now: float) -> None:
        self._write(Launched(now, digest_of(plan), plan.peers if plan is not None else []))

    def completed(self, result: StepResult, now: float) -> None:
        self._write(Completed(now, result))

    def close(self) -> None:
        """Give the unused room back."""
        self._map.close()
        os.ftruncate(self._file, self._end)
        os.close(self._file)

    def _write(self, record: Record) -> None:
        if self.is_full:
            return
        payload = self._encoder.encode(record)
        reserve = 2 * _WORDS.size + len(self._full)
        if self._end + _WORDS.size + len(payload) + reserve > len(self._map):
            log.warning("journal full path=%s bytes=%d", self.path, len(self._map))
            self.is_full = True
            payload = self._full
        at = self._end + _WORDS.size
        self._map[at : at + len(payload)] = payload
        self._map[self._end : at] = _WORDS.pack(len(payload), crc32(payload))
        self._end = at + len(payload)


class JournalReader:
    """Reads one journal, however it ended. JournalError says which record is damaged."""

    def __init__(self, path: str) -> None:
        self._bytes = Path(path).read_bytes()
        if not self._bytes.startswith(MAGIC):
            raise JournalError(f"{path} is not a journal of this version")
        header, self._start = self._payload(len(MAGIC), "header")
        try:
            self.header = msgspec.msgpack.decode(header, type=Header)
        except (msgspec.DecodeError, AssertionError) as error:
            raise JournalError(f"the header of {path} does not decode: {error}") from None

    def records(self) -> Iterator[Record]:
        """Every whole record. A cut-off tail ends the file; a damaged record raises."""
        decoder = msgspec.msgpack.Decoder(Record)
        at, index = self._start, 0
        while len(self._bytes) - at >= _WORDS.size:
            length, _ = _WORDS.unpack_from(self._bytes, at)
            if at + _WORDS.size + length > len(self._bytes) < self.header.size:
                return  # shorter than it was made: cut off inside this record
            if not length:
                if any(self._bytes[at:]):
                    raise JournalError(f"record {index} is damaged: something follows the end")
                return
            payload, at = self._payload(at, f"record {index}")
            try:
                yield decoder.decode(payload)
            except (msgspec.DecodeError, RecursionError) as error:
                raise JournalError(f"record {index} does not decode: {error}") from None
            index += 1

    def _payload(self, at: int, what: str) -> tuple[bytes, int]:
        """(payload, where the next record begins) of what lies at `at`."""
        start = at + _WORDS.size
        if start > len(self._bytes):
            raise JournalError(f"the file ends inside the {what}")
        length, crc = _WORDS.unpack_from(self._bytes, at)
        payload = self._bytes[start : start + length]
        if len(payload) < length:
            raise JournalError(f"{what} is damaged: {length} bytes, {len(payload)} follow")
        if crc32(payload) != crc:
            raise JournalError(f"{what} is damaged: its checksum is wrong")
        return payload, start + length
