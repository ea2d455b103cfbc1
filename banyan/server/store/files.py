"""FileStore: files that clients uploaded and that batches made, bounded in number and size.

A file is two files of the folder: its content under its id, and what is known about it beside.
Without the second the first is not (yet) a file. Names that clients give are never paths.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from banyan.base.errors import RequestError
from banyan.server.store.folder import Folder

MAX_FILES = 1000
MAX_TOTAL_BYTES = 4 << 30
MAX_NAME_CHARS = 255

_FACTS = ".json"
_PREFIX = "file-"


class StoredFile(msgspec.Struct, frozen=True):
    """What is known about one file."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int


class FileStore:
    """The files of one folder, by id, oldest first. Its methods are called on one event loop."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files: dict[str, StoredFile] = {}

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

    def all(self) -> list[StoredFile]:
        return list(self._files.values())

    def find(self, id: str) -> StoredFile:
        """RequestError 404 when there is none."""
        if id not in self._files:
            raise RequestError(
                f"No such file: {id[:80]!r}", param="file_id", status=404, code="not_found"
            )
        return self._files[id]

    def path(self, id: str) -> Path:
        """Where the content of a file of this id lies, or will lie."""
        return self._folder.path / id

    async def content(self, id: str) -> bytes:
        """The whole content; RequestError 404 when there is no such file."""
        return await asyncio.to_thread(self.path(self.find(id).id).read_bytes)

    async def add(self, filename: str, purpose: str, content: bytes) -> StoredFile:
        """Keep a new file; on the disk when this returns.

        Raises:
            RequestError: 507, there is no room.
        """
        self.check_room(len(content))
        id = self.fresh_id()
        await asyncio.to_thread(self._folder.write, id, content)
        return await self.publish(id, filename, purpose)

    async def publish(self, id: str, filename: str, purpose: str) -> StoredFile:
        """Make a file of the content that lies under `id`."""
        size = self.path(id).stat().st_size
        stored = StoredFile(id, filename[:MAX_NAME_CHARS], purpose, size, int(time.time()))
        await asyncio.to_thread(self._folder.write, id + _FACTS, msgspec.json.encode(stored))
        self._files[id] = stored
        return stored

    async def remove(self, id: str) -> None:
        """Forget a file; RequestError 404 when there is none."""
        del self._files[self.find(id).id]
        # The facts go first: a crash in between leaves content that nobody can ask for.
        self._folder.remove(id + _FACTS)
        self._folder.remove(id)
        await asyncio.to_thread(self._folder.sync)

    def check_room(self, num_bytes: int) -> None:
        """RequestError 507 when a file of this size has no room."""
        total = sum(f.num_bytes for f in self._files.values())
        if len(self._files) >= MAX_FILES or total + num_bytes > MAX_TOTAL_BYTES:
            raise RequestError(
                f"{len(self._files)} files of {total} bytes are kept; at most {MAX_FILES} files "
                f"and {MAX_TOTAL_BYTES} bytes are",
                status=507,
                code="storage_full",
                hint="Delete files that are no longer needed",
            )

    def fresh_id(self) -> str:
        return _PREFIX + os.urandom(16).hex()
