"""BatchStore: the state of every batch, in a file each."""

import asyncio
from dataclasses import dataclass, field

import msgspec

from banyan.base.errors import RequestError
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
        """Store a new state of a batch; it is on disk at return."""
        self.batches[batch.id] = batch
        async with self._saving:
            content = msgspec.json.encode(self.batches[batch.id])
            await asyncio.to_thread(self.folder.write, batch.id + ".json", content)

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
