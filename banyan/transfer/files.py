"""FileStore: a file per page in a folder that several servers may share.

    FOLDER/IDENTITY/ab/ab12….page     one page: head, checksum, bytes
    FOLDER/IDENTITY/new/PID-N.tmp     being written

A page is written under another name and renamed, so a file is there as a whole or not at all. It is
not flushed to the disk (`fsync` does): after a power failure files may be torn, which their length
and checksum tell. Damaged files are removed when they are read.

The bound counts the files of all models in the folder. It is looked after by whoever writes: after
every 1/16 of the bound that a server has written it counts anew, and removes those read or written
longest ago until 15/16 are left. So N servers stay below the bound by themselves, and go beyond it
by no more than N/16 of it together.
"""

import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.transfer.base import Damaged, Missing, StoreOptions
from banyan.transfer.checksum import SUM_BYTES, checksum

log = logger(__name__)

_MAGIC = b"BANYANP2"
_SHARES = 16
"""The bound is looked after in such parts of it."""
_DEFAULT_BYTES = 16 << 30
_TOUCH_S = 60.0
"""A page read again within this time is not marked again as used."""
_STALE_S = 600.0
"""Files under way for longer were left by processes that died."""
_SPILL = 5
"""On a full disk, the part of the files that goes to make room: 1 / this."""


class PageIO(Protocol):
    """How the bytes of files are moved. `write` and `read` may run at once, in two threads."""

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
        """All of `parts`, one behind another, into an empty file."""
        ...

    def read(self, descriptor: int, size: int) -> bytes:
        """A file from its begin, as much as there is of `size` bytes."""
        ...

    def close(self) -> None: ...


class SystemIO:
    """By calls of the system. Satisfies PageIO."""

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:  # once, unless the disk takes less
            done = os.writev(descriptor, left)
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left:
                left[0] = left[0][done:]

    def read(self, descriptor: int, size: int) -> bytes:
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(size)

    def close(self) -> None:
        pass


class FileStore:
    """
    Args:
        folder: made when it is not there.
        identity: see `StoreOptions`.
        capacity_bytes: bound of all files in the folder.
        fsync: flush each page to the disk before it counts.
        io: moves the bytes; None = calls of the system.
    """

    def __init__(
        self,
        folder: Path,
        identity: bytes,
        capacity_bytes: int,
        fsync: bool = False,
        io: PageIO | None = None,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._home = folder / identity.hex()[:32]
        self._new = self._home / "new"
        self._capacity = capacity_bytes
        self._fsync = fsync
        self._io: PageIO = io or SystemIO()
        self._number = 0
        self._unseen = capacity_bytes
        """Bytes that were perhaps written since the files were counted."""
        for made in (folder, self._home, self._new):  # `parents` are made for all to read
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._remove_stale()

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    def has(self, name: bytes) -> bool:
        return self._path(name).exists()

    def read(self, name: bytes) -> memoryview:
        path = self._path(name)
        try:
            content = self._content(path)
        except FileNotFoundError:
            raise Missing from None
        if content is None or not self._is_whole(name, content):
            path.unlink(missing_ok=True)
            raise Damaged(f"{path} is not the page that its name says; it was removed")
        with suppress(OSError):  # whoever evicts may have been quicker
            if time.time() - path.stat().st_mtime > _TOUCH_S:
                os.utime(path)
        return memoryview(content)[len(self._head(name)) + SUM_BYTES :]

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        path = self._path(name)
        if path.exists():
            return
        head = self._head(name)
        size = len(head) + SUM_BYTES + len(payload)
        self._keep_below(size)
        try:
            self._place(path, head, payload)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self._shrink(self._used() * (_SPILL - 1) // _SPILL):
                raise
            self._place(path, head, payload)
        self._unseen += size

    def delete(self, name: bytes) -> None:
        self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        self._io.close()

    # -- one page -----------------------------------------------------------------------------

    def _path(self, name: bytes) -> Path:
        digest = name.hex()
        return self._home / digest[:2] / f"{digest}.page"

    def _head(self, name: bytes) -> bytes:
        return _MAGIC + self._identity + name

    def _is_whole(self, name: bytes, content: bytes) -> bool:
        head = self._head(name)
        told = content[len(head) : len(head) + SUM_BYTES]
        payload = memoryview(content)[len(head) + SUM_BYTES :]
        return content.startswith(head) and told == checksum(head, payload)

    def _content(self, path: Path) -> bytes | None:
        """A file's bytes; None for what is no plain file."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return None
            return self._io.read(descriptor, found.st_size)
        finally:
            os.close(descriptor)

    def _place(self, path: Path, head: bytes, payload: bytes | memoryview) -> None:
        self._number += 1
        draft = self._new / f"{os.getpid()}-{self._number}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(draft, flags, 0o600), "wb", buffering=0) as file:
                self._io.write(file.fileno(), [head + checksum(head, payload), payload])
                if self._fsync:
                    os.fsync(file.fileno())
            try:
                os.rename(draft, path)
            except FileNotFoundError:  # the first page of its folder
                path.parent.mkdir(exist_ok=True, mode=0o700)
                os.rename(draft, path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        if self._fsync:
            _sync_folder(path.parent)

    # -- the bound ----------------------------------------------------------------------------

    def _keep_below(self, size: int) -> None:
        if self._unseen + size <= self._capacity // _SHARES:
            return
        self._unseen = 0
        self._shrink(self._capacity * (_SHARES - 1) // _SHARES - size)

    def _used(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _shrink(self, target: int) -> bool:
        """Remove pages, those used longest ago first, until `target` bytes are left; whether any
        was there to go."""
        files = sorted(self._files())
        used = sum(size for _, size, _ in files)
        has_removed = False
        for _, size, path in files:
            if used <= target:
                break
            with suppress(OSError):  # another server may have removed it
                os.unlink(path)
                has_removed = True
            used -= size
        return has_removed

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """(time of last use, bytes, path) of every page of every model in the folder."""
        for model in _entries(self._folder):
            for part in _entries(model.path):
                for page in _entries(part.path):
                    with suppress(OSError):  # it may go while the folder is read
                        if page.name.endswith(".page"):
                            found = page.stat(follow_symlinks=False)
                            yield found.st_mtime, found.st_size, page.path

    def _remove_stale(self) -> None:
        for draft in _entries(self._new):
            with suppress(OSError):
                if time.time() - draft.stat(follow_symlinks=False).st_mtime > _STALE_S:
                    os.unlink(draft.path)


def open_files(options: StoreOptions, io: PageIO | None = None) -> FileStore:
    """The store of --hicache-storage-backend file.

    Args:
        io: see `FileStore`.

    Extra keys: "path" (default ~/.cache/banyan/pages), "max_bytes" (default 16 GiB, or half of
    what is free), "fsync".
    """
    extra = dict(options.extra)
    path = extra.pop("path", "") or str(Path.home() / ".cache" / "banyan" / "pages")
    limit, fsync = extra.pop("max_bytes", 0), extra.pop("fsync", False)
    if extra:
        raise ConfigError(
            f"--hicache-storage-backend-extra-config has no {printable(next(iter(extra)), 60)!r}",
            hint="path, max_bytes and fsync are what the file store takes",
        )
    if not isinstance(path, str) or isinstance(limit, bool) or not isinstance(limit, int):
        raise ConfigError(
            "--hicache-storage-backend-extra-config: path must be a text and max_bytes a number"
        )
    if not isinstance(fsync, bool):
        raise ConfigError("--hicache-storage-backend-extra-config: fsync must be true or false")
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(folder)
        capacity = limit or min(_DEFAULT_BYTES, shutil.disk_usage(folder).free // 2)
        least = _SHARES * max(options.page_bytes, default=0)
        if capacity < least:
            raise ConfigError(
                f"the cache store in {printable(path, 120)!r} may hold {capacity:,} bytes; "
                f"{least:,} are {_SHARES} pages, the least that is of use",
                hint="give max_bytes more, or name another path",
            )
        return FileStore(folder, options.identity, capacity, fsync, io)
    except OSError as error:
        raise ConfigError(
            f"the cache store cannot use {printable(path, 120)!r}: {error.strerror}",
            hint="name a folder that can be written, as path in "
            "--hicache-storage-backend-extra-config",
        ) from None


def _check_owner(folder: Path) -> None:
    """What lies in the folder becomes part of answers: nobody else may write there."""
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"the cache store in {printable(str(folder), 120)!r} can be written by others",
            hint="name a folder of your own that only you can write (chmod 700)",
        )


def _entries(folder: Path | str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # no folder, or gone by now
        return []


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
