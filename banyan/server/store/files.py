"""FileStore: files that clients uploaded and that batches made, bounded in number and size.

A file is two files of the folder: its content under its id, and what is known about it beside.
Without the second the first is not (yet) a file. Names that clients give are never paths.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec

from banyan.base.errors import RequestError
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
    """What is known about one file."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    owner: str = EVERYBODY


class FileStore:
    """The files of one folder, by id, oldest first. Its methods are called on one event loop."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files: dict[str, StoredFile] = {}
        self._growing: dict[str, int] = {}
        """Bytes of what is being written: uploads by id, the outputs of a batch by the batch's."""

    def load(self) -> None:
        """Read what lies in the folder."""
        found = self._folder.read_all(f"{_PREFIX}*{_FACTS}", StoredFile)
        self._files = {f.id: f for f in sorted(found, key=lambda f: (f.created_at, f.id))}

    def sweep(self, growing: Sequence[str]) -> None:
        """Remove what a crash has left: content that is neither a file nor `growing` into one."""
        kept = {*self._files, *(id + _FACTS for id in self._files), *growing}
        for path in self._folder.path.glob(f"{_PREFIX}*"):
            if path.name not in kept:
                self._folder.remove(path.name)

    def all(self, owner: str) -> list[StoredFile]:
        return [f for f in self._files.values() if may_see(f.owner, owner)]

    def find(self, id: str, owner: str) -> StoredFile:
        """RequestError 404 when there is none that `owner` may see."""
        found = self._files.get(id)
        if found is None or not may_see(found.owner, owner):
            raise _no_such(id)
        return found

    def path(self, id: str) -> Path:
        """Where the content of a file of this id lies, or will lie."""
        return self._folder.path / id

    async def content(self, id: str) -> bytes:
        """The whole content; RequestError 404 when there is no such file."""
        if id not in self._files:
            raise _no_such(id)
        return await asyncio.to_thread(self.path(id).read_bytes)

    async def pieces(self, stored: StoredFile) -> AsyncGenerator[bytes, None]:
        """The content, a bounded part at a time, however slowly it is taken."""
        file = await asyncio.to_thread(self.path(stored.id).open, "rb")
        try:
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield piece
        finally:
            file.close()

    async def add(self, filename: str, purpose: str, content: bytes, owner: str) -> StoredFile:
        """Keep a new file; on the disk when this returns.

        Raises:
            RequestError: 507, there is no room.
        """
        id = self.fresh_id()
        self.grow(id, len(content))  # before anything is waited for: others ask for room as well
        try:
            await asyncio.to_thread(self._folder.write, id, content)
            return await self.publish(id, filename, purpose, owner)
        finally:
            self.grown(id)

    async def publish(self, id: str, filename: str, purpose: str, owner: str) -> StoredFile:
        """Make a file of the content that lies under `id`."""
        name = filename[:MAX_NAME_CHARS]

        def write() -> StoredFile:
            size = self.path(id).stat().st_size
            stored = StoredFile(id, name, purpose, size, int(time.time()), owner)
            self._folder.write(id + _FACTS, msgspec.json.encode(stored))
            return stored

        self._files[id] = stored = await asyncio.to_thread(write)
        return stored

    async def remove(self, id: str, owner: str) -> None:
        """Forget a file; RequestError 404 when there is none that `owner` may see."""
        del self._files[self.find(id, owner).id]
        # The facts go first: a crash in between leaves content that nobody can ask for.
        await self._folder.discard(id + _FACTS, id)

    def grow(self, what: str, num_bytes: int) -> None:
        """Take room for bytes that `what` writes, until it has `grown` into a file.

        Raises:
            RequestError: 507, there is none.
        """
        num_files = len(self._files.keys() | self._growing.keys() | {what})
        total = sum(f.num_bytes for f in self._files.values()) + sum(self._growing.values())
        if num_files > MAX_FILES or total + num_bytes > MAX_TOTAL_BYTES:
            raise RequestError(
                f"no room for {num_bytes} bytes: {len(self._files)} files and {total} bytes are "
                f"kept; at most {MAX_FILES} files and {MAX_TOTAL_BYTES} bytes are",
                status=507,
                code=STORAGE_FULL,
                hint="Delete files that are no longer needed",
            )
        self._growing[what] = self._growing.get(what, 0) + num_bytes

    def grown(self, what: str) -> None:
        """What grew is a file now, or nothing."""
        self._growing.pop(what, None)

    def has_grown_to(self, what: str, num_bytes: int) -> None:
        """Count what an earlier process has left."""
        self._growing[what] = num_bytes

    def fresh_id(self) -> str:
        return _PREFIX + fresh_id()


def _no_such(id: str) -> RequestError:
    return RequestError(f"No such file: {id[:80]!r}", param="file_id", status=404, code="not_found")
