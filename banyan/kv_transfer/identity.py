"""Whose pages these are: a hash of everything but the tokens that the bytes of a page depend on.

Weights count by their whole content, because two of the same sizes may differ in one row. Reading
them takes about a second for each GiB and core, once: the result is noted under what the system
says of the files (size, inode, times), which changes with every write.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from banyan.base.errors import ModelError

_PIECE_BYTES = 32 << 20
_DIGEST_BYTES = 32
_MOST_THREADS = 8
_CODE = (".py", ".cpp", ".h", ".inl")


def identity(facts: Iterable[object]) -> bytes:
    """32 bytes that stand for `facts`, each of which has a `repr` that is the same everywhere."""
    made = blake2b(digest_size=_DIGEST_BYTES, person=b"banyan identity")
    for fact in facts:
        text = repr(fact).encode()
        made.update(len(text).to_bytes(8, "little") + text)
    return made.digest()


def digest_of_files(files: Sequence[Path], notes: Path | None = None) -> bytes:
    """Hash of the content of files, in their order.

    Args:
        notes: folder where results are kept; default: ~/.cache/banyan/weights.

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
    with suppress(OSError):  # then they are read again at the next start
        notes.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = known.with_suffix(f".{os.getpid()}")
        draft.write_text(digest.hex())
        draft.rename(known)
    return digest


def digest_of_code(rooms: Iterable[str]) -> bytes:
    """Hash of what these folders of the package hold: other code may compute other bytes."""
    root = Path(__file__).parent.parent
    found = (file for room in rooms for file in (root / room).rglob("*") if file.suffix in _CODE)
    return digest_of_files(sorted(found))


def _signature(file: Path) -> tuple[int, ...]:
    found = file.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return (found.st_dev, found.st_ino, found.st_size, *times)


def _hash(file: Path) -> tuple[int, tuple[bytes, ...]]:
    """Length, and the hash of each piece; several threads share the work."""
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
