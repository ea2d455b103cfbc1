"""Identity of pages: a hash of everything except the tokens that determines a page's bytes.

Weights are hashed completely, because two files of the same size may differ in one row. That takes
about one second per GiB and core. The result is cached under the files' size, inode and times,
which change with every write.
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
