"""Storage: the files and batches of one server, opened at the first use."""

import asyncio
from pathlib import Path

from banyan.config.schema import ServerConfig
from banyan.server.store.batches import BatchStore
from banyan.server.store.files import UploadedFiles
from banyan.server.store.folder import Folder

_HOME = "~/.local/state/banyan"


class Storage:
    """The stored objects of /v1/files and /v1/batches.

    Args:
        path: their folder; created when something is stored.
    """

    def __init__(self, path: Path) -> None:
        self._folder = Folder(path)
        self._is_open = False
        self._opening = asyncio.Lock()
        self.files = UploadedFiles(self._folder)
        self.batches = BatchStore(self._folder)

    async def ready(self) -> "Storage":
        """Like `open`, in a thread."""
        if not self._is_open:
            async with self._opening:
                await asyncio.to_thread(self.open)
        return self

    async def ready_if_used(self) -> "Storage":
        """Like `ready` if something is stored; otherwise the disk is not touched."""
        if not self._is_open and not await asyncio.to_thread(self._folder.has_content):
            return self
        return await self.ready()

    def open(self) -> "Storage":
        """Lock the folder and read it; RequestError 503 if that fails."""
        if not self._is_open:
            self._folder.claim()
            self.files.load()
            self.batches.load()
            growing = [b for b in self.batches.batches.values() if not b.is_over]
            self.files.sweep([id for b in growing for id in (b.output_file_id, b.error_file_id)])
            self._is_open = True
        return self

    def close(self) -> None:
        """Stop running batches; unfinished ones continue at the next start."""
        for work in self.batches.work.values():
            work.cancel()

    def release(self) -> None:
        """Unlock the folder for another process."""
        self._folder.release()


def storage_path(server: ServerConfig) -> Path:
    """The folder of a server: --file-storage-path, or one named by its port in the user's state."""
    return Path(server.storage_path or f"{_HOME}/{server.port}").expanduser()
