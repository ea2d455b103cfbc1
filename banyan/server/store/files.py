"""FileStore: uploaded files and the outputs of batches, limited in number and size.

A stored file is two files of the folder: its content under its id, and its facts as ID.json.
Content without facts is not (yet) a stored file. Names from clients are never used as paths.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

import msgspec

from banyan.base.errors import RequestError
from banyan.base.fair_share import FairShare
from banyan.base.ids import fresh_id
from banyan.server.store.folder import EVERYBODY, Folder, may_see

MAX_FILES = 1000
MAX_TOTAL_BYTES = 4 << 30
MAX_NAME_CHARS = 255
STORAGE_FULL = "storage_full"
PIECE_BYTES = 256 << 10

_FACTS = ".json"
_PREFIX = "file-"


class StoredFile(msgspec.Struct, frozen=True):
    """The facts of one stored file."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    owner: str = EVERYBODY


class Reservations:
    """Bytes that are being written: by file id for uploads, by batch id for outputs. They count
    with the stored files against the limits of the storage.

    Args:
        files: the stored files.
    """

    def __init__(self, files: Mapping[str, StoredFile]) -> None:
        self._files = files
        self._reserved: dict[str, tuple[str, int]] = {}
        """(owner, bytes)."""

    def add(self, what: str, num_bytes: int, owner: str) -> None:
        """Reserve bytes that `what` will write, until `end`.

        Raises:
            RequestError: 507; the storage is full, or the owner's share of it.
        """
        caller = owner.encode()
        number, size = FairShare(MAX_FILES), FairShare(MAX_TOTAL_BYTES)
        held = {f.id: (f.owner, f.num_bytes) for f in self._files.values()} | self._reserved
        for holder, taken in held.values():
            number.take(holder.encode())
            size.take(holder.encode(), taken)
        if not number.fits(caller, what not in held) or not size.fits(caller, num_bytes):
            raise RequestError(
                f"no room for {num_bytes} bytes: {number.total} files and {size.total} bytes are "
                f"kept, {number.held_by(caller)} files and {size.held_by(caller)} bytes of them "
                f"yours; at most {MAX_FILES} files and {MAX_TOTAL_BYTES} bytes are",
                status=507,
                code=STORAGE_FULL,
                hint="Delete files that are no longer needed",
            )
        self._reserved[what] = (owner, held.get(what, (owner, 0))[1] + num_bytes)

    def end(self, what: str) -> None:
        """End the reservation: `what` is a stored file now, or was dropped."""
        self._reserved.pop(what, None)

    def set(self, what: str, num_bytes: int, owner: str) -> None:
        """Count the bytes that an earlier process has written."""
        self._reserved[what] = (owner, num_bytes)


class UploadedFiles:
    """The files of one folder, by id, oldest first. Call its methods on one event loop."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files: dict[str, StoredFile] = {}
        self.reservations = Reservations(self._files)

    def load(self) -> None:
        """Read the files in the folder."""
        found = self._folder.read_all(f"{_PREFIX}*{_FACTS}", StoredFile)
        self._files.clear()
        self._files |= {f.id: f for f in sorted(found, key=lambda f: (f.created_at, f.id))}

    def sweep(self, growing: Sequence[str]) -> None:
        """Remove the leftovers of a crash: content without facts that is not in `growing`."""
        kept = {*self._files, *(id + _FACTS for id in self._files), *growing}
        for path in self._folder.path.glob(f"{_PREFIX}*"):
            if path.name not in kept:
                self._folder.remove(path.name)

    def all(self, owner: str) -> list[StoredFile]:
        return [f for f in self._files.values() if may_see(f.owner, owner)]

    def find(self, id: str, owner: str) -> StoredFile:
        """The file; RequestError 404 if `owner` has none with this id."""
        found = self._files.get(id)
        if found is None or not may_see(found.owner, owner):
            raise _no_such(id)
        return found

    def path(self, id: str) -> Path:
        """The path of the content of this id."""
        return self._folder.path / id

    async def content(self, id: str) -> bytes:
        """The whole content; RequestError 404 if there is no such file."""
        if id not in self._files:
            raise _no_such(id)
        return await asyncio.to_thread(self.path(id).read_bytes)

    async def pieces(self, stored: StoredFile) -> AsyncGenerator[bytes, None]:
        """The content in pieces of PIECE_BYTES."""
        file = await asyncio.to_thread(self.path(stored.id).open, "rb")
        try:
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield piece
        finally:
            file.close()

    async def add(self, filename: str, purpose: str, content: bytes, owner: str) -> StoredFile:
        """Store a new file; it is on disk at return.

        Raises:
            RequestError: 507; the storage is full.
        """
        id = self.fresh_id()
        # Before the first await: concurrent uploads reserve too.
        self.reservations.add(id, len(content), owner)
        try:
            await asyncio.to_thread(self._folder.write, id, content)
            return await self.publish(id, filename, purpose, owner)
        finally:
            self.reservations.end(id)

    async def publish(self, id: str, filename: str, purpose: str, owner: str) -> StoredFile:
        """Turn the content under `id` into a stored file."""
        name = filename[:MAX_NAME_CHARS]

        def write() -> StoredFile:
            size = self.path(id).stat().st_size
            stored = StoredFile(id, name, purpose, size, int(time.time()), owner)
            self._folder.write(id + _FACTS, msgspec.json.encode(stored))
            return stored

        self._files[id] = stored = await asyncio.to_thread(write)
        return stored

    async def remove(self, id: str, owner: str) -> None:
        """Delete a file; RequestError 404 if `owner` has none with this id."""
        del self._files[self.find(id, owner).id]
        # The facts first: a crash in between leaves content that no client can reach.
        await self._folder.discard(id + _FACTS, id)

    def fresh_id(self) -> str:
        return _PREFIX + fresh_id()


def _no_such(id: str) -> RequestError:
    return RequestError(f"No such file: {id[:80]!r}", param="file_id", status=404, code="not_found")
