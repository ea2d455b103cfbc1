"""--hicache-storage-backend nixl: the file store, with I/O by NIXL's POSIX plugin.

The plugin moves bytes asynchronously in the kernel. Folders may be shared with the file store. An
agent is used by one thread at a time, so there is one for writes and one for reads, each with a
buffer that is registered once.
"""

import errno
import os
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from banyan.base.errors import ConfigError
from banyan.kv_transfer.file_store import FileStore, open_files
from banyan.kv_transfer.store import StoreOptions

_HEAD_BYTES = 4096
"""More than the head of a page in its file."""
_LOOK_S = 20e-6


class _Agent:
    """One NIXL agent and its buffer; ConfigError if NIXL is missing."""

    def __init__(self, name: str, size_bytes: int) -> None:
        api = _api()
        self._name = name
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
            self._agent.create_backend("POSIX")
            self.buffer = np.empty(size_bytes, np.uint8)
            place = (self.buffer.ctypes.data, size_bytes, 0, "")
            self._memory: Any = self._agent.register_memory([place], "DRAM")
        except Exception as error:
            raise ConfigError(
                f"--hicache-storage-backend nixl: its POSIX plugin does not start: {error}",
                hint="use file, which needs no plugin",
            ) from None

    def move(self, way: str, descriptor: int, at: int, size: int) -> None:
        """Copy `size` bytes of the buffer to ("WRITE") or from ("READ") a file at byte `at`.

        Raises:
            OSError: they were not moved.
        """
        agent, handle, file = self._agent, None, None
        try:
            file = agent.register_memory([(at, size, descriptor, "")], "FILE")
            here = agent.get_xfer_descs([(self.buffer.ctypes.data, size, 0)], "DRAM")
            there = agent.get_xfer_descs([(at, size, descriptor)], "FILE")
            handle = agent.initialize_xfer(way, here, there, self._name)
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(_LOOK_S)
                state = agent.check_xfer_state(handle)
        except Exception as error:  # the plugin has its own exceptions
            raise OSError(errno.EIO, f"nixl: {error}") from None
        finally:
            if handle is not None:
                agent.release_xfer_handle(handle)
            if file is not None:
                agent.deregister_memory(file)
        if state != "DONE":
            raise OSError(errno.EIO, f"nixl ends a transfer with {state}")

    def close(self) -> None:
        self._agent.deregister_memory(self._memory)


class NixlIO:
    """Satisfies PageIO.

    Args:
        size_bytes: of the largest file.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._writing = _Agent("banyan-write", size_bytes)
        self._reading = _Agent("banyan-read", size_bytes)

    def write(self, descriptor: int, at: int, parts: Sequence[bytes | memoryview]) -> None:
        size = 0
        for part in parts:
            self._writing.buffer[size : size + len(part)] = np.frombuffer(part, np.uint8)
            size += len(part)
        try:
            self._writing.move("WRITE", descriptor, at, size)
        except OSError:
            free = os.fstatvfs(descriptor)
            if free.f_bavail * free.f_frsize < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
            raise

    def read(self, descriptor: int, at: int, size: int) -> bytes:
        if not 0 < size <= self._size_bytes:
            return b""  # longer than any page; the caller's check fails
        self._reading.move("READ", descriptor, at, size)
        return self._reading.buffer[:size].tobytes()

    def close(self) -> None:
        self._writing.close()
        self._reading.close()


def open_nixl_files(options: StoreOptions) -> FileStore:
    """The file store with NIXL I/O. It has the extra keys of the file store."""
    plain = open_files(options)  # report errors of the folder first
    plain.close()
    return open_files(options, NixlIO(max(options.page_bytes, default=0) + _HEAD_BYTES))


def _api() -> Any:
    for name in ("nixl._api", "nixl_cu12._api", "nixl_cu13._api"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise ConfigError(
        "--hicache-storage-backend nixl needs a package that is not installed",
        hint="run: pip install --no-deps nixl nixl-cu12; or use file, which needs none",
    )
