"""FileStore: KV pages in files of a folder that several servers may share.

    FOLDER/IDENTITY/ab/ab12….page     a page, in a segment that it shares with others
    FOLDER/IDENTITY/new/PID-….tmp     the segment that is being filled

A page gets its name after its bytes are written, so it exists completely or not at all. Pages are
not flushed to disk (unless `fsync`): after a power failure files may be torn, which lengths and
checksums detect. Damaged pages are removed when they are read.

The capacity counts the files of all models in the folder. Writers enforce it: after writing 1/16 of
the capacity a server counts the files, and removes the least recently used until 15/16 are left. So
N servers together exceed the capacity by at most N/16 of it.

Segments are files of several pages, because creating a file costs more than writing a page. Up to
PAGES pages are written to one file, which has a name (hard link) for each of them: a page exists
while its name exists, and the file ends with its last name. Without hard links, or if every page is
flushed to disk, a segment is one page.

    record: magic 8 | identity 32 | bytes of the page, u64 | bytes of its name, u8 | name
            | checksum SUM_BYTES | page
"""

import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.kv_transfer.store import SUM_BYTES, Damaged, Missing, StoreOptions, checksum

log = logger(__name__)

_SHARES = 16
"""The capacity is checked after writing this fraction of it."""
_SEGMENT_SHARES = 256
"""A segment with more than this fraction of the capacity takes no further page."""
_DEFAULT_BYTES = 16 << 30
_TOUCH_S = 60.0
"""A page read again within this time keeps its time of last use."""
_STALE_S = 600.0
"""Unfinished files older than this were left by processes that died."""
_SPILL = 5
"""On a full disk 1 / this of the files is removed."""


PAGES = 16
"""Pages of one segment. They are evicted together, so they should be of about the same age."""
_MAGIC = b"BANYANP3"
_FIXED = 8 + 32 + 8 + 1
_LONGEST = _FIXED + 255 + SUM_BYTES
"""Longest head and checksum of a page."""
_OPEN_S = 60.0
"""A segment takes no more pages this long after its first."""


class PageIO(Protocol):
    """Moves the bytes of files. `write` and `read` may run at once, in two threads."""

    def write(self, descriptor: int, at: int, parts: Sequence[bytes | memoryview]) -> None:
        """Write all `parts`, one after another, from byte `at` of a file on."""
        ...

    def read(self, descriptor: int, at: int, size: int) -> bytes:
        """Read up to `size` bytes from byte `at` of a file on."""
        ...

    def close(self) -> None: ...


class SystemIO:
    """PageIO by system calls."""

    def write(self, descriptor: int, at: int, parts: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:  # once, unless the disk takes less
            done = os.pwritev(descriptor, left, at)
            at += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left:
                left[0] = left[0][done:]

    def read(self, descriptor: int, at: int, size: int) -> bytes:
        return os.pread(descriptor, size, at)

    def close(self) -> None:
        pass


def head_of(identity: bytes, name: bytes, size: int) -> bytes:
    """Head of a page of `size` bytes, before its checksum."""
    return _MAGIC + identity + size.to_bytes(8, "little") + bytes((len(name),)) + name


def record_bytes(name: bytes, size: int) -> int:
    """Size of the record of a page of `size` bytes."""
    return _FIXED + len(name) + SUM_BYTES + size


def find_page(io: PageIO, descriptor: int, size: int, identity: bytes, name: bytes) -> bytes | None:
    """The page of this name in a segment of `size` bytes; None if it is missing or damaged."""
    at, before = 0, _MAGIC + identity
    for _ in range(PAGES):
        head = os.pread(descriptor, _LONGEST, at)
        if len(head) < _FIXED or not head.startswith(before):
            return None
        held = int.from_bytes(head[40:48], "little")
        page = at + _FIXED + head[48] + SUM_BYTES
        if page + held > size:
            return None
        if head[_FIXED : _FIXED + head[48]] == name:
            stored = head[page - at - SUM_BYTES : page - at]
            content = io.read(descriptor, page, held)
            whole = len(content) == held
            is_right = whole and stored == checksum(head[: _FIXED + head[48]], content)
            return content if is_right else None
        at = page + held
    return None


class Segment:
    """A file that is being filled, by one thread.

    Args:
        draft: its name while it is filled; the file does not exist yet.
        most_bytes: no page begins after so many bytes.
        is_shared: several pages, with hard links; else one page, to whose name it is renamed.
        fsync: flush the page before it gets its name; excludes is_shared.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(
        self, draft: str, identity: bytes, io: PageIO, most_bytes: int, is_shared: bool, fsync: bool
    ) -> None:
        assert not (is_shared and fsync)
        self._draft = draft
        self._identity = identity
        self._io = io
        self._most_bytes = most_bytes
        self._is_shared = is_shared
        self._fsync = fsync
        self._began = time.monotonic()
        self._at = 0
        self._names: set[bytes] = set()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(draft, flags, 0o600)

    def takes(self, name: bytes) -> bool:
        """Whether a page of this name may be added. A name occurs once per segment: a page that was
        found damaged is written again in another segment."""
        if not self._names:
            return True
        is_full = len(self._names) >= PAGES or self._at >= self._most_bytes
        is_young = time.monotonic() - self._began < _OPEN_S
        return self._is_shared and is_young and not is_full and name not in self._names

    def add(self, name: bytes, payload: bytes | memoryview, path: str) -> None:
        """Keep a page as `path`, unless that exists by now.

        Raises:
            OSError: it is not kept, and the segment must be closed.
        """
        head = head_of(self._identity, name, len(payload))
        self._io.write(self._descriptor, self._at, [head + checksum(head, payload), payload])
        if self._fsync:
            os.fsync(self._descriptor)
        self._names.add(name)
        self._at += record_bytes(name, len(payload))
        place = os.link if self._is_shared else os.rename
        with suppress(FileExistsError):
            try:
                place(self._draft, path)
            except FileNotFoundError:  # first page in its folder
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                place(self._draft, path)

    def close(self) -> None:
        """Take no more pages; pages with names stay."""
        os.close(self._descriptor)
        with suppress(OSError):  # renamed to the page's name, or removed as stale
            os.unlink(self._draft)


def can_link(draft: str) -> bool:
    """Whether the folder of `draft` has hard links; `draft` does not exist yet."""
    second = f"{draft}.link"
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        os.link(draft, second)
        return os.stat(draft).st_nlink == 2
    except OSError:
        return False
    finally:
        for path in (draft, second):
            with suppress(OSError):
                os.unlink(path)


class FileStore:
    """
    Args:
        folder: created if it does not exist.
        identity: as in `StoreOptions`.
        capacity_bytes: of all files in the folder.
        fsync: flush each page to disk before it gets its name.
        io: moves the bytes; None = system calls.
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
        self._model_folder = folder / identity.hex()[:32]
        self._new = self._model_folder / "new"
        self._prefix = f"{self._model_folder}{os.sep}"
        self._drafts = f"{self._new}{os.sep}{os.getpid()}-{secrets.token_hex(8)}"
        self._capacity = capacity_bytes
        self._fsync = fsync
        self._io: PageIO = io or SystemIO()
        self._number = 0
        self._unseen = capacity_bytes
        """Bytes that may have been written since the files were counted."""
        self._segment: Segment | None = None
        for made in (
            folder,
            self._model_folder,
            self._new,
        ):  # `parents=True` would create the parents readable for all
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._remove_stale()
        self._is_shared = not fsync and can_link(self._draft())
        if not (fsync or self._is_shared):
            log.info(
                "%s has no hard links: each page of the cache is a file",
                printable(str(folder), 120),
            )

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    def has(self, name: bytes) -> bool:
        return os.path.exists(self._path(name))

    def read(self, name: bytes) -> memoryview:
        path = self._path(name)
        try:
            content = self._content(path, name)
        except FileNotFoundError:
            raise Missing from None
        if content is None:
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise Damaged(f"{path} is not the page that its name says; it was removed")
        return memoryview(content)

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        path = self._path(name)
        if os.path.exists(path):
            return
        size = record_bytes(name, len(payload))
        self._keep_below(size)
        try:
            self._add(name, payload, path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self._shrink(self._used() * (_SPILL - 1) // _SPILL):
                raise
            self._add(name, payload, path)
        self._unseen += size

    def delete(self, name: bytes) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def close(self) -> None:
        self._close_segment()
        self._io.close()

    # -- one page -----------------------------------------------------------------------------

    def _path(self, name: bytes) -> str:
        digest = name.hex()
        return f"{self._prefix}{digest[:2]}{os.sep}{digest}.page"

    def _content(self, path: str, name: bytes) -> bytes | None:
        """A page; None if the file is not a plain file or not this page."""
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
            content = find_page(self._io, descriptor, found.st_size, self._identity, name)
            if content is not None and time.time() - found.st_mtime > _TOUCH_S:
                with suppress(OSError):  # the folder may be read-only
                    os.utime(descriptor)
            return content
        finally:
            os.close(descriptor)

    def _draft(self) -> str:
        self._number += 1
        return f"{self._drafts}-{self._number}.tmp"

    def _add(self, name: bytes, payload: bytes | memoryview, path: str) -> None:
        if self._segment is not None and not self._segment.takes(name):
            self._close_segment()
        if self._segment is None:
            most = self._capacity // _SEGMENT_SHARES
            self._segment = Segment(
                self._draft(), self._identity, self._io, most, self._is_shared, self._fsync
            )
        try:
            self._segment.add(name, payload, path)
        except OSError:  # nothing may follow half a page
            self._close_segment()
            raise
        if self._fsync:
            _sync_folder(os.path.dirname(path))

    def _close_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    # -- the bound ----------------------------------------------------------------------------

    def _keep_below(self, size: int) -> None:
        if self._unseen + size <= self._capacity // _SHARES:
            return
        self._unseen = 0
        self._shrink(self._capacity * (_SHARES - 1) // _SHARES - size)

    def _used(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _shrink(self, target: int) -> bool:
        """Remove the least recently used segments until `target` bytes are left; whether any was
        removed."""
        self._close_segment()  # an open segment would keep its pages
        files = sorted(self._files())
        used = sum(size for _, size, _ in files)
        has_removed = False
        for _, size, paths in files:
            if used <= target:
                break
            for path in paths:
                with suppress(OSError):  # another server may have removed it
                    os.unlink(path)
                    has_removed = True
            used -= size
        return has_removed

    def _files(self) -> list[tuple[float, int, list[str]]]:
        """(time of last use, bytes, paths of its pages) of every segment in the folder, of all
        models."""
        found: dict[tuple[int, int], tuple[float, int, list[str]]] = {}
        for model in _entries(self._folder):
            for part in _entries(model.path):
                for page in _entries(part.path):
                    with suppress(OSError):  # it may be removed meanwhile
                        if page.name.endswith(".page"):
                            at = page.stat(follow_symlinks=False)
                            segment = (at.st_mtime, at.st_size, list[str]())
                            found.setdefault((at.st_dev, at.st_ino), segment)[2].append(page.path)
        return list(found.values())

    def _remove_stale(self) -> None:
        for draft in _entries(self._new):
            with suppress(OSError):
                if time.time() - draft.stat(follow_symlinks=False).st_mtime > _STALE_S:
                    os.unlink(draft.path)


def open_files(options: StoreOptions, io: PageIO | None = None) -> FileStore:
    """The store of --hicache-storage-backend file.

    Args:
        io: as for `FileStore`.

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
    """Pages of the folder become part of answers, so no other user may write there."""
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
    except OSError:  # no folder, or removed meanwhile
        return []


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
