"""Store: KV pages outside the process that computed them, by name. One protocol, one table, the
identity that pages of one model share, and the checksum that stores keep with each page. HostTier
keeps pages in host memory, least recently used first out. A store may follow it that outlives the
process; it gets every page as well.

`identity` hashes everything except the tokens that determines a page's bytes. Weights are hashed
completely, because two files of the same size may differ in one row. That takes about one second
per GiB and core. The result is cached under the files' size, inode and times, which change with
every write.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b, shake_128
from pathlib import Path
from typing import Protocol, cast

import numpy as np

from banyan.base.errors import ConfigError, ModelError
from banyan.base.table import Table, load_named
from banyan.config.rules.cache import DYNAMIC

_PIECE_BYTES = 32 << 20
_DIGEST_BYTES = 32
_MOST_THREADS = 8
_CODE = (".py", ".cpp", ".h", ".inl")


class Missing(Exception):
    """The store has no such page."""


class Damaged(Exception):
    """The store has something under this name that is not the page; it has been removed."""


class Store(Protocol):
    """Pages by name. A name identifies the content, so a page is never overwritten.

    `has` and `read` run in one thread, `write` and `delete` in another. Failures are OSErrors; the
    caller does not retry.
    """

    @property
    def capacity_bytes(self) -> int:
        """Most bytes it keeps; the least recently used pages go first. 0 = limited elsewhere."""
        ...

    def has(self, name: bytes) -> bool: ...

    def read(self, name: bytes) -> bytes | memoryview:
        """A whole page, checked.

        Raises:
            Missing, Damaged, OSError.
        """
        ...

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        """Keep a page atomically: readers never see a part of it."""
        ...

    def delete(self, name: bytes) -> None:
        """Forget a page; unknown names do nothing."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StoreOptions:
    """Options of a store.

    Attributes:
        identity: 32 bytes that differ whenever pages of equal tokens may hold other bytes.
        page_bytes: size of a page of each group.
        extra: the store's own keys of --hicache-storage-backend-extra-config.
    """

    identity: bytes
    page_bytes: Sequence[int]
    extra: dict[str, object] = field(default_factory=dict[str, object])


OpenStore = Callable[[StoreOptions], Store]
"""Opens a store; ConfigError if it cannot."""

STORES: Table[OpenStore] = Table(
    "cache store",
    {
        "file": "banyan.kv_transfer.file_store:open_files",
        "dynamic": "banyan.kv_transfer.store:open_by_name",
        "mooncake": "banyan.kv_transfer.mooncake_store:open_mooncake_store",
        "nixl": "banyan.kv_transfer.nixl_store:open_nixl_files",
    },
    plugins="banyan.stores",
)


_MODULE, _CLASS, _NAME = "module_path", "class_name", "backend_name"


def open_by_name(options: StoreOptions) -> Store:
    """The store of --hicache-storage-backend dynamic: a class of an installed package, which is
    called with the options and satisfies `Store`.

    Raises:
        ConfigError: the class is not named, or cannot be imported.
    """
    rest = dict(options.extra)
    module, name = rest.pop(_MODULE, None), rest.pop(_CLASS, None)
    rest.pop(_NAME, None)
    if not isinstance(module, str) or not isinstance(name, str) or not module or not name:
        raise ConfigError(
            f"--hicache-storage-backend {DYNAMIC} needs {_MODULE} and {_CLASS} in "
            "--hicache-storage-backend-extra-config",
            hint="name an installed class that satisfies banyan.kv_transfer.store.Store",
        )
    open_store = load_named(f"--hicache-storage-backend {DYNAMIC}", f"{module}:{name}", "")
    return cast(OpenStore, open_store)(replace(options, extra=rest))


def identity(facts: Iterable[object]) -> bytes:
    """32-byte hash of `facts`; the `repr` of each must be the same in every process."""
    made = blake2b(digest_size=_DIGEST_BYTES, person=b"banyan identity")
    for fact in facts:
        text = repr(fact).encode()
        made.update(len(text).to_bytes(8, "little") + text)
    return made.digest()


def digest_of_files(files: Sequence[Path], notes: Path | None = None) -> bytes:
    """Hash of the content of files, in their order.

    Args:
        notes: folder of cached results; default: ~/.cache/banyan/weights.

    Raises:
        ModelError: a file cannot be read.
    """
    notes = notes or Path.home() / ".cache" / "banyan" / "weights"
    try:
        known = notes / identity(map(_signature, files)).hex()
        with suppress(OSError, ValueError):
            found = bytes.fromhex(known.read_text())
            if len(found) == _DIGEST_BYTES:
                return found
        digest = identity(_hash(file) for file in files)
    except OSError as error:
        raise ModelError(
            f"weights cannot be read for the cache store: {error.strerror}: {error.filename}"
        ) from None
    with suppress(OSError):  # without the cache they are read again at the next start
        notes.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = known.with_suffix(f".{os.getpid()}")
        draft.write_text(digest.hex())
        draft.rename(known)
    return digest


def digest_of_code(folders: Iterable[str]) -> bytes:
    """Hash of the code in these folders of the package: other code may compute other bytes."""
    root = Path(__file__).parent.parent
    found = (
        file for folder in folders for file in (root / folder).rglob("*") if file.suffix in _CODE
    )
    return digest_of_files(sorted(found))


def _signature(file: Path) -> tuple[int, ...]:
    found = file.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return (found.st_dev, found.st_ino, found.st_size, *times)


def _hash(file: Path) -> tuple[int, tuple[bytes, ...]]:
    """Length and the hash of each piece, computed by several threads."""
    with open(file, "rb") as opened:
        descriptor = opened.fileno()
        size = os.fstat(descriptor).st_size

        def piece(start: int) -> bytes:
            content = os.pread(descriptor, _PIECE_BYTES, start)
            if len(content) != min(_PIECE_BYTES, size - start):
                raise OSError(0, "the file changes while it is read", str(file))
            return blake2b(content, digest_size=_DIGEST_BYTES).digest()

        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, "weights-digest") as pool:
            return size, tuple(pool.map(piece, range(0, size, _PIECE_BYTES)))


SUM_BYTES = 16
_WORD = 4


def checksum(head: bytes, payload: bytes | memoryview | np.ndarray) -> bytes:
    """Checksum of a page under its name, SUM_BYTES long.

    It detects errors of memory, disks and networks. A cryptographic hash of a page would cost as
    much as copying it five times. This is a multilinear hash (Lemire and Kaser, "Strongly
    universal string hashing is fast", 2014): the sum of all 32-bit words, each times a random odd
    64-bit number, modulo 2^64. A change in one word is always detected; any other change is missed
    with probability 2^-32.

    Args:
        head: name of the page; all of it is hashed.
    """
    content = np.frombuffer(payload, np.uint8)
    whole = len(content) // _WORD * _WORD
    words = content[:whole].view(np.uint32)
    total = int(np.einsum("i,i->", words, _factors(len(words)))) if len(words) else 0
    made = blake2b(head, digest_size=SUM_BYTES)
    made.update(len(content).to_bytes(8, "little") + (total & _MASK).to_bytes(8, "little"))
    made.update(content[whole:].tobytes())
    return made.digest()


_MASK = (1 << 64) - 1


@lru_cache(maxsize=8)  # one size of page for each cache group
def _factors(count: int) -> np.ndarray:
    """[count] odd uint64; the same in every process."""
    drawn = np.frombuffer(shake_128(b"banyan page checksum").digest(8 * count), "<u8")
    return drawn | np.uint64(1)


Allocate = Callable[[int], np.ndarray]
"""Allocates host memory, [n] uint8, that the device can copy fastest (pinned)."""


class HostTier:
    """Satisfies Store.

    Args:
        capacity_bytes: of all pages; a larger page is not kept.
        next_tier: store that gets every page too; None = no store.
    """

    def __init__(self, capacity_bytes: int, allocate: Allocate, next_tier: Store | None) -> None:
        self._capacity = capacity_bytes
        self._allocate = allocate
        self._next_tier = next_tier
        self._pages: OrderedDict[bytes, np.ndarray] = OrderedDict()
        """Least recently used first."""
        self._used = 0
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    def has(self, name: bytes) -> bool:
        with self._lock:
            if name in self._pages:
                return True
        return self._next_tier is not None and self._next_tier.has(name)

    def read(self, name: bytes) -> bytes | memoryview:
        with self._lock:
            page = self._pages.get(name)
            if page is not None:
                self._pages.move_to_end(name)
                return page.data
        if self._next_tier is None:
            raise Missing
        payload = self._next_tier.read(name)
        self._keep(name, payload)
        return payload

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        self._keep(name, payload)
        if self._next_tier is not None:
            self._next_tier.write(name, payload)

    def delete(self, name: bytes) -> None:
        with self._lock:
            page = self._pages.pop(name, None)
            self._used -= 0 if page is None else len(page)
        if self._next_tier is not None:
            self._next_tier.delete(name)

    def close(self) -> None:
        with self._lock:
            self._pages.clear()
            self._used = 0
        if self._next_tier is not None:
            self._next_tier.close()

    def _keep(self, name: bytes, payload: bytes | memoryview) -> None:
        size = len(payload)
        if size > self._capacity:
            return
        with self._lock:
            if name in self._pages:
                self._pages.move_to_end(name)
                return
            while self._used + size > self._capacity:
                _, gone = self._pages.popitem(last=False)
                self._used -= len(gone)
            page = self._allocate(size)
            page[:] = np.frombuffer(payload, np.uint8)
            self._pages[name] = page
            self._used += size
