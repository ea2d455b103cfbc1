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
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.transfer.base import Damaged, Missing, StoreOptions

log = logger(__name__)

_MAGIC = b"BANYANP1"
_SUM_BYTES = 16
_SHARES = 16
"""The bound is looked after in such parts of it."""
_DEFAULT_BYTES = 16 << 30
_TOUCH_S = 60.0
"""A page read again within this time is not marked again as used."""
_STALE_S = 600.0
"""Files under way for longer were left by processes that died."""
_SPILL = 5
"""On a full disk, the part of the files that goes to make room: 1 / this."""


class FileStore:
    """
    Args:
        folder: made when it is not there.
        identity: see `StoreOptions`.
        capacity_bytes: bound of all files in the folder.
        fsync: flush each page to the disk before it counts.
    """

    def __init__(
        self, folder: Path, identity: bytes, capacity_bytes: int, fsync: bool = False
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._home = folder / identity.hex()[:32]
        self._new = self._home / "new"
        self._capacity = capacity_bytes
        self._fsync = fsync
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

    def read(self, name: bytes) -> bytes:
        path = self._path(name)
        try:
            content = _content(path)
        except FileNotFoundError:
            raise Missing from None
        if content is None or not self._is_whole(name, content):
            path.unlink(missing_ok=True)
            raise Damaged(f"{path} is not the page that its name says; it was removed")
        with suppress(OSError):  # whoever evicts may have been quicker
            if time.time() - path.stat().st_mtime > _TOUCH_S:
                os.utime(path)
        return content[len(self._head(name)) + _SUM_BYTES :]

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        path = self._path(name)
        if path.exists():
            return
        head = self._head(name)
        size = len(head) + _SUM_BYTES + len(payload)
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
        pass

    # -- one page -----------------------------------------------------------------------------

    def _path(self, name: bytes) -> Path:
        digest = name.hex()
        return self._home / digest[:2] / f"{digest}.page"

    def _head(self, name: bytes) -> bytes:
        return _MAGIC + self._identity + name

    def _is_whole(self, name: bytes, content: bytes) -> bool:
        head = self._head(name)
        told = content[len(head) : len(head) + _SUM_BYTES]
        payload = memoryview(content)[len(head) + _SUM_BYTES :]
        return content.startswith(head) and told == _checksum(head, payload)

    def _place(self, path: Path, head: bytes, payload: bytes | memoryview) -> None:
        self._number += 1
        draft = self._new / f"{os.getpid()}-{self._number}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(draft, flags, 0o600), "wb") as file:
                file.write(head + _checksum(head, payload))
                file.write(payload)
                if self._fsync:
                    file.flush()
                    os.fsync(file.fileno())
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


def open_files(options: StoreOptions) -> FileStore:
    """The store of --hicache-storage-backend file.

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
        return FileStore(folder, options.identity, capacity, fsync)
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


def _content(path: Path) -> bytes | None:
    """A file's bytes; None for what is no plain file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise
    with open(descriptor, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def _checksum(head: bytes, payload: bytes | memoryview) -> bytes:
    made = blake2b(head, digest_size=_SUM_BYTES)
    made.update(payload)
    return made.digest()


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
