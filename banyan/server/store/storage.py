"""Storage: files and batches of one server, opened at their first use."""

import asyncio
from pathlib import Path

from banyan.config.schema import ServerConfig
from banyan.server.store.batches import BatchStore
from banyan.server.store.files import FileStore
from banyan.server.store.folder import Folder

_HOME = "~/.local/state/banyan"


class Storage:
    """What /v1/files and /v1/batches keep.

    Args:
        path: folder to keep it in; it is not made before something is kept.
    """

    def __init__(self, path: Path) -> None:
        self._folder = Folder(path)
        self._is_open = False
        self._opening = asyncio.Lock()
        self.files = FileStore(self._folder)
        self.batches = BatchStore(self._folder)

    async def ready(self) -> "Storage":
        """As `open`, with the disk's time spent in a thread."""
        if not self._is_open:
            async with self._opening:
                await asyncio.to_thread(self.open)
        return self

    async def ready_if_used(self) -> "Storage":
        """As `ready` where something is kept; else the stores are empty and the disk untouched."""
        if not self._is_open and not await asyncio.to_thread(self._folder.has_content):
            return self
        return await self.ready()

    def open(self) -> "Storage":
        """Claim the folder and read it; RequestError 503 when that cannot be."""
        if not self._is_open:
            self._folder.claim()
            self.files.load()
            self.batches.load()
            growing = [b for b in self.batches.batches.values() if not b.is_over]
            self.files.sweep([id for b in growing for id in (b.output_file_id, b.error_file_id)])
            self._is_open = True
        return self

    def close(self) -> None:
        """Stop working on batches; what is unfinished goes on at the next start."""
        if self.batches.work is not None:
            self.batches.work.cancel()

    def release(self) -> None:
        """Let another process open the same folder."""
        self._folder.release()


def storage_path(server: ServerConfig) -> Path:
    """The folder of a server: --file-storage-path, or one of its port in the user's state."""
    return Path(server.storage_path or f"{_HOME}/{server.port}").expanduser()
