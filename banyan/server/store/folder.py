"""Folder: the private folder on disk with the files and batches of one server.

It is created at the first use and locked, so that two servers never run the same batch. Small files
are replaced as a whole, so that a crash leaves the old one or the new one.
"""

import asyncio
import fcntl
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from banyan.base.errors import RequestError

T = TypeVar("T")

EVERYBODY = ""
"""Owner of objects that were created without a key."""

_LOCK = "lock"
_DRAFT = ".draft"


class Folder:
    """A folder that belongs to one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1

    def has_content(self) -> bool:
        """Whether a server has stored anything here before."""
        return (self.path / _LOCK).exists()

    def claim(self) -> None:
        """Create the folder and lock it until the process ends.

        Raises:
            RequestError: 503; it cannot be created, or another server has locked it.
        """
        if self._lock >= 0:
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(f"files cannot be kept in {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise _unusable(f"another server keeps its files in {self.path}") from None
        self._lock = lock

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file; it is on disk at return.

        Raises:
            RequestError: 507; the disk is full or broken.
        """
        draft = self.path / (name + _DRAFT)
        try:
            with open(draft, "wb", opener=_private) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.path / name)
            self.sync()
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise RequestError(
                f"{len(content)} bytes cannot be written to {self.path}: {error.strerror}",
                status=507,
                code="storage_full",
                hint="Delete files, or give --file-storage-path a folder with room",
            ) from None

    def read_all(self, pattern: str, kind: type[T]) -> list[T]:
        """Decode every JSON file whose name matches.

        Raises:
            RequestError: 503; a file cannot be decoded.
        """
        found = []
        for path in sorted(self.path.glob(pattern)):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=kind))
            except (msgspec.DecodeError, OSError) as error:
                raise _unusable(f"{path} cannot be read: {error}") from None
        return found

    def sync(self) -> None:
        """Sync the names of new and removed files to disk."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, *names: str) -> None:
        """Remove files in this order; their names are gone from disk at return."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        self.sync()

    async def discard(self, *names: str) -> None:
        """Like `remove`, in a thread."""
        await asyncio.to_thread(self.remove, *names)


def owner_of(tenant: bytes) -> str:
    """The owner that is stored on disk for a caller: a digest, never the key."""
    return tenant.hex()


def may_see(owner: str, asker: str) -> bool:
    """Whether `asker` may see objects of `owner`."""
    return owner in (EVERYBODY, asker)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _unusable(text: str) -> RequestError:
    return RequestError(
        text,
        status=503,
        code="storage_unavailable",
        hint="Start with --file-storage-path FOLDER, one for each server",
    )
