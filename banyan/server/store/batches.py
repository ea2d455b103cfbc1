"""BatchStore: the state of every batch, in a file each. AnswerLog: appends a batch's answers to its
output and error files, synced in groups.

A synced answer is never lost and never written again. Lines without a synced answer run again.
"""

import asyncio
import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import orjson

from banyan.base.errors import CapacityError, ConfigError, RequestError
from banyan.base.fair_share import FairShare
from banyan.base.ids import fresh_id
from banyan.server.store.folder import EVERYBODY, Folder, may_see

MAX_BATCHES = 1000

FINAL = ("completed", "failed", "cancelled")
"""Final statuses of a batch."""

_PREFIX = "batch_"


class Fault(msgspec.Struct, frozen=True):
    """Why a batch cannot run: an error in a line of its input (from 1; 0 = no line)."""

    code: str
    message: str
    line: int = 0
    param: str = ""


class StoredBatch(msgspec.Struct, frozen=True):
    """One batch. The ids of its output files are chosen at creation; the files exist at the end.

    Attributes:
        model: the served model at creation; only a server of this model runs the batch.
        times: status -> time at which it was entered, in seconds of the epoch.
        owner: digest of the key that created it.
        labels: metric labels of its lines, as in the header.
        succeeded, failed: answered lines; counted in memory only while it runs.
        deaths: custom_id -> engines that died while they ran this line.
    """

    id: str
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    completion_window: str
    created_at: int
    metadata: dict[str, str] | None = None
    status: str = "validating"
    times: dict[str, int] = {}
    faults: list[Fault] = []
    total: int = 0
    succeeded: int = 0
    failed: int = 0
    model: str = ""
    deaths: dict[str, int] = {}
    owner: str = EVERYBODY
    labels: str = ""

    @property
    def is_over(self) -> bool:
        return self.status in FINAL

    def is_for(self, model: str) -> bool:
        """Whether a server of `model` can continue it; cancelling needs no model."""
        return not self.is_over and (self.model == model or self.status == "cancelling")


@dataclass
class BatchStore:
    """The batches of one folder, by id, oldest first."""

    folder: Folder
    batches: dict[str, StoredBatch] = field(default_factory=dict)
    work: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])
    """The task that runs the batches of an owner, by owner."""
    suspects: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while lines run that may have killed an engine: no others of that kind run then."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a batch is cancelled."""
    _saving: asyncio.Lock = field(default_factory=asyncio.Lock)

    def load(self) -> None:
        """Read the batches in the folder."""
        found = self.folder.read_all(f"{_PREFIX}*.json", StoredBatch)
        self.batches = {b.id: b for b in sorted(found, key=lambda b: (b.created_at, b.id))}

    def all(self, owner: str) -> list[StoredBatch]:
        return [b for b in self.batches.values() if may_see(b.owner, owner)]

    def find(self, id: str, owner: str) -> StoredBatch:
        """The batch; RequestError 404 if `owner` has none with this id."""
        found = self.batches.get(id)
        if found is None or not may_see(found.owner, owner):
            raise RequestError(
                f"No batch found with id {id[:80]!r}",
                param="batch_id",
                status=404,
                code="not_found",
            )
        return found

    def next(self, model: str, owner: str) -> StoredBatch | None:
        """The oldest batch of `owner` that a server of `model` can continue."""
        mine = (b for b in self.batches.values() if b.owner == owner)
        return next((b for b in mine if b.is_for(model)), None)

    @property
    def num_working(self) -> int:
        """Owners whose batches run now."""
        return sum(not work.done() for work in self.work.values())

    async def save(self, batch: StoredBatch) -> None:
        """Store a new state of a batch; it is on disk at return.

        Raises:
            RequestError: 507; the disk is full or broken, and the batch is as it was before.
        """
        before = self.batches.get(batch.id)
        self.batches[batch.id] = batch
        try:
            async with self._saving:
                content = msgspec.json.encode(self.batches[batch.id])
                await asyncio.to_thread(self.folder.write, batch.id + ".json", content)
        except RequestError:
            if self.batches[batch.id] is batch and before is not None:
                self.batches[batch.id] = before
            elif before is None:
                del self.batches[batch.id]
            raise

    async def make_room(self, owner: str) -> None:
        """Delete the oldest finished batch of the owner that has most if there are too many.

        Raises:
            RequestError: 429; `owner` has that many unfinished batches.
        """
        share, caller = FairShare(MAX_BATCHES), owner.encode()
        for batch in self.batches.values():
            share.take(batch.owner.encode())
        if share.fits(caller):
            return
        heaviest = share.heaviest(caller, 1).decode()
        mine = (b for b in self.batches.values() if b.owner in (heaviest, owner) and b.is_over)
        oldest = next(mine, None)
        if oldest is None:
            raise RequestError(
                f"{share.total} batches are waiting, {share.held_by(caller)} of them yours; at "
                f"most {MAX_BATCHES} are kept",
                status=429,
                code="too_many_batches",
            )
        del self.batches[oldest.id]
        await self.folder.discard(oldest.id + ".json")

    def fresh_id(self) -> str:
        return _PREFIX + fresh_id()


_BEGINNING = b'{"id":"batch_req_'
"""The beginning of every answer."""


class AnswerLog:
    """Appends answers to two files, which may be one.

    Args:
        output: file of successful answers.
        errors: file of failed answers.
        take_room: reserves bytes before they are written; raises if the storage is full.
    """

    def __init__(
        self, output: Path, errors: Path, take_room: Callable[[int], None] | None = None
    ) -> None:
        self._paths = (output, errors)
        self._open: dict[Path, int] = {}
        self.answered: dict[str, bool] = {}
        """custom_id of every answer in the files -> whether it succeeded."""
        self.num_found = 0
        """Bytes that an earlier process has written."""
        self._take_room = take_room

    def recover(self) -> None:
        """Read the answers of an earlier process, and cut off an unfinished last line.

        Raises:
            CapacityError: another process is writing there.
            ConfigError: the file contains something other than answers; it is not changed.
        """
        for path in dict.fromkeys(self._paths):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._open[path] = fd
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CapacityError(f"another process writes to {path.name}") from None
            length = self._read(path)
            self.num_found += length
            os.ftruncate(fd, length)
            os.fsync(fd)

    def _read(self, path: Path) -> int:
        """Read the answers of a file; returns its length without an unfinished last line."""
        whole, broken = 0, 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                answer = _answer_in(line)
                if answer is None and not broken and _is_begun(line):
                    broken = number
                elif answer is None or broken:
                    raise ConfigError(
                        f"{path.name} is no file of answers: line {broken or number} is no answer",
                        hint="name a new file; this one is left as it is",
                    )
                else:
                    self.answered[answer[0]] = answer[1]
                    whole += len(line)
        return whole

    async def keep(self, answers: Sequence[tuple[str, bool, bytes]]) -> None:
        """As `append`, in a thread, once there is room.

        Raises:
            RequestError: 507, there is none.
        """
        if self._take_room is not None:
            self._take_room(sum(len(line) for _, _, line in answers))
        await asyncio.to_thread(self.append, answers)

    def append(self, answers: Sequence[tuple[str, bool, bytes]]) -> None:
        """Write (custom_id, whether it succeeded, line) of a group; on the disk at return.

        Raises:
            CapacityError: the disk is full or broken; nothing more may be appended.
        """
        try:
            for path, succeeded in zip(self._paths, (True, False), strict=True):
                lines = b"".join(line for _, kind, line in answers if kind is succeeded)
                if lines:
                    _write(self._open[path], lines)
        except OSError as error:
            raise CapacityError(
                f"the answers of {len(answers)} lines cannot be written: {error.strerror}",
                hint="free room on the disk",
            ) from None
        self.answered.update((id, kind) for id, kind, _ in answers)

    @property
    def num_succeeded(self) -> int:
        return sum(self.answered.values())

    @property
    def num_failed(self) -> int:
        return len(self.answered) - self.num_succeeded

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def answer_line(id: str, custom_id: str, response: dict[str, object]) -> bytes:
    """One line of an output or error file."""
    answer = {"id": "batch_req_" + id, "custom_id": custom_id, "response": response, "error": None}
    return orjson.dumps(answer) + b"\n"


def _answer_in(line: bytes) -> tuple[str, bool] | None:
    """custom_id and success of a complete line; None if it is no answer."""
    if not line.endswith(b"\n"):
        return None
    try:
        answer = orjson.loads(line)
        id, status = answer["custom_id"], answer["response"]["status_code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return (id, status == 200) if isinstance(id, str) else None


def _is_begun(line: bytes) -> bool:
    """Whether this may be an unfinished answer: its beginning, or the zeros and newlines that a
    file system leaves for unwritten data."""
    text = line.strip(b"\0\n")
    return text[: len(_BEGINNING)] == _BEGINNING[: len(text)]


def _write(fd: int, content: bytes) -> None:
    """Append all of `content`; it is on disk at return."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.fsync(fd)
