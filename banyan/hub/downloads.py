"""Resumable, verified downloads of files from the Hugging Face hub, and the models that its cache
on this machine holds: list and remove them.

A file grows by HTTP range requests as `<hash>.incomplete` next to the finished blobs. When its hash
matches the hub's, it is renamed into place, so an interrupted download continues where it stopped.
The cache has huggingface_hub's layout, so its other users find the files.
"""

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urljoin

from huggingface_hub import (
    CachedRepoInfo,
    CachedRevisionInfo,
    constants,
    hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
    scan_cache_dir,
)
from huggingface_hub.errors import (
    CacheNotFound,
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] # httpx's, under whatever name
)
from huggingface_hub.utils import (
    WeakFileLock,
    tqdm,
)

from banyan.base.errors import CapacityError, ModelError
from banyan.base.log import logger, printable
from banyan.formats.shards import has_weights
from banyan.hub.catalogue import entries, find, megabytes
from banyan.hub.metadata import (
    MAX_HOPS,
    FileFacts,
    HubFile,
    Place,
    check_host,
    file_facts,
    raise_for_status,
    request,
)

log = logger(__name__)

_MAX_FAILURES = 5
"""Consecutive attempts without progress before the download fails."""
_MAX_WAIT_S = 120.0
"""A longer Retry-After is reported as an error instead of waiting."""
_SPARE_BYTES = 64 << 20
"""Disk space that a download leaves free."""
_AGAIN = (408, 429, 500, 502, 503, 504)
_EXPIRED = (401, 403)
"""Status codes of an expired signed URL."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Again(Exception):
    """The attempt ended early; another one may continue."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


def fetch_files(place: Place, files: Sequence[HubFile], revision: str) -> None:
    """Download the files that the cache does not have yet, and name them in a snapshot.

    Args:
        revision: the branch or tag that led to this commit, or the commit.

    Raises:
        CapacityError: the disk is too small.
        ModelError: a wrong hash, a redirect to an unknown host, or too many failed attempts.
        Exception: huggingface_hub's errors if the hub refuses.
    """
    missing = [file for file in files if not (_snapshot(place) / file.name).exists()]
    wanted = {facts.name: (file, facts) for file in missing for facts in [file_facts(place, file)]}
    _check_space(place, [f for _, f in wanted.values() if not _blob(place, f).exists()])
    for file, facts in wanted.values():
        if facts.size > constants.MAX_HTTP_DOWNLOAD_SIZE and not place.endpoint:
            # the public hub sends larger files by a protocol of its library only
            hf_hub_download(
                place.repo,
                file.name,
                revision=place.commit,
                cache_dir=place.folder.parent,
                token=place.token or None,
            )
            continue
        if not _blob(place, facts).exists():
            _fetch(place, file, facts)
        _link(_blob(place, facts), _snapshot(place) / file.name)
    if revision != place.commit:
        _write_ref(place, revision)


def _snapshot(place: Place) -> Path:
    return place.folder / "snapshots" / place.commit


def _blob_name(facts: FileFacts) -> str:
    """The name of the content: its hash, or a hash of the ETag if the hub states none."""
    if facts.sha256 or facts.git_sha1:
        return facts.sha256 or facts.git_sha1
    return "etag-" + hashlib.sha256(f"{facts.etag}\0{facts.size}".encode()).hexdigest()[:40]


def _blob(place: Place, facts: FileFacts) -> Path:
    return place.folder / "blobs" / _blob_name(facts)


def _part(place: Place, facts: FileFacts) -> Path:
    return place.folder / "blobs" / f"{_blob_name(facts)}.incomplete"


def _link(blob: Path, pointer: Path) -> None:
    """Name a blob in the snapshot; a copy where the file system has no links."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    fresh = pointer.with_name(f".{os.getpid()}-{blob.name[:16]}.new")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        shutil.copyfile(blob, fresh)
    os.replace(fresh, pointer)


def _write_ref(place: Place, revision: str) -> None:
    ref = place.folder / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    fresh = ref.with_name(f".{os.getpid()}-{place.commit[:16]}.new")
    fresh.write_text(place.commit)
    os.replace(fresh, ref)


def _check_space(place: Place, wanted: Sequence[FileFacts]) -> None:
    """Check the disk before the first byte."""
    needed = sum(f.size - min(f.size, _size(_part(place, f))) for f in wanted)
    if not needed:
        return
    place.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place.folder).free
    if needed + _SPARE_BYTES > free:
        raise CapacityError(
            f"{printable(place.repo)} needs {megabytes(needed)} more on the disk of "
            f"{str(place.folder.parent)!r}, which has {megabytes(free)} free",
            hint="free some (banyan list, banyan rm NAME), or name another disk: --download-dir",
        )


def _fetch(place: Place, file: HubFile, facts: FileFacts) -> None:
    blob, part = _blob(place, facts), _part(place, facts)
    lock = place.folder.parent / ".locks" / place.folder.name / f"{blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        log.info("downloading %s, %s done", printable(facts.name), _progress(part, facts))
        if not facts.sha256 and not facts.git_sha1:
            text = "the hub states no hash of %s: only its size is checked"
            log.warning(text, printable(facts.name))
        try:
            with _log_interrupt(part, facts):
                _fill(place, file, facts, part)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise CapacityError(
                f"the disk is full at {_progress(part, facts)} of {printable(facts.name)}",
                hint="free disk space, then run the same command to resume",
            ) from None
        _check_hash(part, facts)
        os.replace(part, blob)


@contextmanager
def _log_interrupt(part: Path, facts: FileFacts) -> Generator[None]:
    try:
        yield
    except KeyboardInterrupt:
        text = "stopped at %s of %s; run the same command to resume"
        log.warning(text, _progress(part, facts), printable(facts.name))
        raise


def _progress(part: Path, facts: FileFacts) -> str:
    return f"{megabytes(_size(part))} of {megabytes(facts.size)}"


def _fill(place: Place, listed: HubFile, facts: FileFacts, part: Path) -> None:
    """Download until the part is complete; retry while attempts make progress."""
    failures = 0
    if _size(part) > facts.size:
        part.unlink()
    with (
        open(part, "ab", buffering=0) as file,
        tqdm(
            total=facts.size,
            initial=file.tell(),
            desc=facts.name[-40:],
            unit="B",
            unit_scale=True,
            disable=None,
        ) as bar,
    ):
        while (had := file.tell()) < facts.size:
            try:
                if failures:
                    facts = _same(facts, file_facts(place, listed))
                _attempt(place, facts, file, bar)
            except (HTTPError, TimeoutError, ConnectionError, _Again) as error:
                if isinstance(error, HTTPError) and _is_refusal(error):
                    raise
                failures = 1 if file.tell() > had else failures + 1
                _wait_or_give_up(error, failures, part, facts)
        file.flush()
        os.fsync(file.fileno())


def _is_refusal(error: Exception) -> bool:
    """Whether the hub refused the request, so that a retry is useless."""
    status = _status_of(error)
    return status is not None and status not in _AGAIN


def _status_of(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _wait_or_give_up(error: Exception, failures: int, part: Path, facts: FileFacts) -> None:
    wait_s = error.wait_s if isinstance(error, _Again) else 0.0
    why = printable(str(error).strip().rstrip(".") or type(error).__name__)
    kept = f"{_progress(part, facts)} of {printable(facts.name)} are kept"
    if wait_s > _MAX_WAIT_S:
        raise ModelError(
            f"{why}; the hub asks to wait {wait_s:.0f} s, and {kept}",
            hint="wait, then run the same command to resume",
        )
    if failures > _MAX_FAILURES:
        raise ModelError(
            f"no data received in {failures} attempts ({why}), and {kept}",
            hint="check the network, then run the same command to resume",
        )
    wait_s = wait_s or (0.0 if failures == 1 else min(2.0 ** (failures - 2), 8.0))
    log.info("%s; resuming at %s in %.0f s", why, _progress(part, facts), wait_s)
    time.sleep(wait_s)


class _Bar(Protocol):
    def update(self, n: float | None = 1) -> object: ...


class _File(Protocol):
    """An unbuffered file, opened for appending."""

    def tell(self) -> int: ...
    def write(self, data: bytes, /) -> int | None: ...
    def truncate(self, size: int, /) -> int: ...
    def seek(self, offset: int, /) -> int: ...


def _attempt(place: Place, facts: FileFacts, file: _File, bar: _Bar) -> None:
    """Request the missing bytes once and append them.

    Raises:
        _Again: the response ended early or the server asks for a retry.
    """
    at = file.tell()
    address = facts.address
    for _ in range(MAX_HOPS):
        timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with request("GET", address, facts.url, place, timeout_s, start=at) as answer:
            following = answer.headers.get("location") if answer.status_code // 100 == 3 else None
            if following is None:
                _check_status(answer.status_code, answer.headers, facts)
                raise_for_status(answer)
                if answer.status_code not in (200, 206):
                    raise ModelError(f"the hub answers {answer.status_code} where bytes belong")
                _begin_at(_start_of(answer.status_code, answer.headers, at, facts), file, bar)
                return _take(answer.iter_bytes(), file, bar, facts)
            following = urljoin(address, following)
        check_host(facts.url, following, place)
        address = following
    raise ModelError(f"{printable(facts.name)} is redirected more than {MAX_HOPS} times")


def _same(before: FileFacts, now: FileFacts) -> FileFacts:
    """The facts of a new address; the content may not change in the middle of a file."""
    if (before.etag, before.size) != (now.etag, now.size):
        raise ModelError(
            f"{printable(now.name)} has changed on the hub while it was fetched",
            hint="fetch it again",
        )
    return now


def _check_status(status: int, headers: Mapping[str, str], facts: FileFacts) -> None:
    if status in _AGAIN:
        raise _Again(f"the hub answers {status}", _retry_after_s(headers))
    if status in _EXPIRED and facts.address != facts.url:
        raise _Again(f"the address of {printable(facts.name)} answers {status}")


def _start_of(status: int, headers: Mapping[str, str], at: int, facts: FileFacts) -> int:
    """Position of the first byte of the response: `at`, or 0 if the server ignored the range."""
    if status == 200:
        return 0
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("content-range", ""))
    if found is None or int(found[1]) != at or found[2] not in ("*", str(facts.size)):
        said = printable(headers.get("content-range", ""), 60)
        raise ModelError(
            f"asked for byte {at:,} of {printable(facts.name)}, the hub sends {said!r}",
            hint="try again, or another HF_ENDPOINT",
        )
    return at


def _begin_at(start: int, file: _File, bar: _Bar) -> None:
    at = file.tell()
    if start < at:
        file.truncate(start)
        file.seek(start)
        bar.update(start - at)


def _take(pieces: Iterator[bytes], file: _File, bar: _Bar, facts: FileFacts) -> None:
    """Write the pieces as they arrive, so an interruption loses nothing received."""
    for piece in pieces:
        if file.tell() + len(piece) > facts.size:
            raise ModelError(
                f"{printable(facts.name)} should have {facts.size:,} bytes, and more are sent",
                hint="try again, or another HF_ENDPOINT",
            )
        left = memoryview(piece)
        while left:
            written = file.write(left) or 0  # type: ignore[arg-type]
            bar.update(written)
            left = left[written:]
    if file.tell() < facts.size:
        raise _Again("the answer ended early")


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header; 0 if it is absent or unreadable."""
    said = headers.get("retry-after", "").strip()
    if said.isdecimal():
        return float(said[:9])
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0


def _check_hash(part: Path, facts: FileFacts) -> None:
    stated = facts.sha256 or facts.git_sha1
    if not stated:
        return
    kind = "sha256" if facts.sha256 else "git hash"

    def start() -> Any:
        return hashlib.sha256() if facts.sha256 else hashlib.sha1(b"blob %d\0" % facts.size)

    with open(part, "rb") as file:
        found = hashlib.file_digest(file, start).hexdigest()
    if found != stated:
        part.unlink()
        raise ModelError(
            f"{printable(facts.name)} has the {kind} {found[:16]}…, the hub states "
            f"{stated[:16]}…: the download is damaged and was deleted",
            hint="fetch it again",
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


_PREFIX = "models--"


@dataclass(frozen=True)
class LocalModel:
    """One model on this machine.

    Attributes:
        source: its name: owner/name, or owner/name/file.gguf.
        path: the file or folder.
        used_s: last access of its weights according to the file system, in Unix seconds.
        is_part: an unfinished download; `path` is the partial file.
    """

    source: str
    path: str
    size_bytes: int
    used_s: float
    is_part: bool = False

    @property
    def name(self) -> str:
        """The catalogue's short name; "" = none."""
        near = (e.name for e in entries() if self.source.lower() in (e.source.lower(),))
        return next(near, "")


def held_models(cache: Path) -> list[LocalModel]:
    """Every model in this hub cache, most recently used first; unfinished downloads come last."""
    whole = [held for repo in _repos(cache) for held in _of(repo)]
    whole.sort(key=lambda held: held.used_s, reverse=True)
    return [*whole, *_parts(cache)]


def remove(cache: Path, name: str) -> int:
    """Delete a model by short name, by owner/name (all its files), or one file of it.

    Returns:
        freed bytes.

    Raises:
        ModelError: it is not in this cache.
    """
    known = find(name)
    source = known.source if known is not None else name.removeprefix("hf:")
    owner, _, rest = source.partition("/")
    repo_name, _, file = rest.partition("/")
    folder = cache / f"{_PREFIX}{owner}--{repo_name}"
    is_name = all(part not in ("", ".", "..") for part in (owner, repo_name))
    if not is_name or not folder.is_dir() or folder.parent != cache:
        raise _not_here(cache, name)
    before = _bytes_of(folder)
    repo = next((repo for repo in _repos(cache) if repo.repo_path == folder), None)
    if file and repo is not None and any(held.source != source for held in _of(repo)):
        if not _remove_file(repo, file):
            raise _not_here(cache, name)
        return before - _bytes_of(folder)
    if repo is not None:
        hashes = [revision.commit_hash for revision in repo.revisions]
        scan_cache_dir(cache).delete_revisions(*hashes).execute()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(cache / ".locks" / folder.name, ignore_errors=True)
    if folder.exists():
        raise ModelError(f"{str(folder)!r} could not be deleted", hint="check who owns it")
    return before


def _not_here(cache: Path, name: str) -> ModelError:
    there = [held.name or held.source for held in held_models(cache)]
    listed = printable(", ".join(dict.fromkeys(there)))
    return ModelError(
        f"{printable(name)!r} is not in the cache {str(cache)!r}",
        hint=f"there are: {listed}" if there else "there is nothing in it",
    )


def _repos(cache: Path) -> list[CachedRepoInfo]:
    try:
        found = scan_cache_dir(cache).repos
    except (CacheNotFound, ValueError):
        return []
    return sorted((r for r in found if r.repo_type == "model"), key=lambda repo: repo.repo_id)


def _of(repo: CachedRepoInfo) -> Iterator[LocalModel]:
    """The models in one repository: each GGUF file, and the newest revision with safetensors."""
    by_age = sorted(repo.revisions, key=lambda revision: revision.last_modified, reverse=True)
    seen: set[str] = set()
    for revision in by_age:
        for file in sorted(revision.files, key=lambda file: file.file_name):
            name = file.file_path.relative_to(revision.snapshot_path).as_posix()
            if not name.endswith(".gguf") or name in seen:
                continue
            seen.add(name)
            used_s = file.blob_last_accessed
            yield LocalModel(
                f"{repo.repo_id}/{name}", str(file.file_path), file.size_on_disk, used_s
            )
    newest = next((revision for revision in by_age if _has_weights(revision)), None)
    if newest is not None:
        files = [file for file in newest.files if not file.file_name.endswith(".gguf")]
        size = sum(file.size_on_disk for file in files)
        used_s = max(file.blob_last_accessed for file in files)
        yield LocalModel(repo.repo_id, str(newest.snapshot_path), size, used_s)


def _has_weights(revision: CachedRevisionInfo) -> bool:
    return has_weights(file.file_name for file in revision.files)


def _parts(cache: Path) -> Iterator[LocalModel]:
    for path in sorted(cache.glob(f"{_PREFIX}*/blobs/*.incomplete")):
        facts = path.stat()
        repo = path.parents[1].name.removeprefix(_PREFIX).replace("--", "/", 1)
        yield LocalModel(repo, str(path), facts.st_size, facts.st_mtime, is_part=True)


def _remove_file(repo: CachedRepoInfo, name: str) -> bool:
    """Delete one file of a repository with several; False if it is not there."""
    files = [(r, file) for r in repo.revisions for file in r.files]
    mine = [f for r, f in files if f.file_path == r.snapshot_path / name]
    others = {f.blob_path for _, f in files} - {f.blob_path for f in mine}
    others |= {f.blob_path for _, f in files if f not in mine}
    for file in mine:
        file.file_path.unlink(missing_ok=True)
        if file.blob_path not in others:
            os.unlink(file.blob_path)
    return bool(mine)


def _bytes_of(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)
