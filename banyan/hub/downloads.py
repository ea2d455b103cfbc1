"""Resumable, verified downloads of large files from the Hugging Face hub.

huggingface_hub writes the cache and fetches small files. A large file grows by HTTP range requests
as `<sha256>.incomplete` next to the finished blobs. When its hash matches the hub's, it is renamed
into place, so an interrupted download continues where it stopped.
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
from typing import Protocol
from urllib.parse import urljoin, urlsplit

from huggingface_hub import (
    constants,
    get_hf_file_metadata,  # pyright: ignore[reportUnknownVariableType]
    hf_hub_url,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage] # httpx's, under whatever name
)
from huggingface_hub.utils import (
    WeakFileLock,
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
    get_session,
    hf_raise_for_status,
    tqdm,
)

from banyan.base.errors import CapacityError, ModelError
from banyan.base.log import logger, printable
from banyan.hub.catalogue import megabytes

log = logger(__name__)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_HUB_DOMAINS = ("huggingface.co", "hf.co")
_MAX_HOPS = 5
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


@dataclass(frozen=True)
class Place:
    """One repository: its source on the hub and its folder in the cache.

    Attributes:
        commit: the revision's full hash.
        folder: the repository's folder in the cache.
        endpoint: "" = the public hub.
        token: "" = the token of `hf auth login`, if any.
    """

    repo: str
    commit: str
    folder: Path
    endpoint: str = ""
    token: str = ""


@dataclass(frozen=True)
class _Facts:
    """One file on the hub."""

    name: str
    url: str
    address: str
    """Download URL; may be on another host and expire after an hour."""
    sha256: str
    size: int


class _Again(Exception):
    """The attempt ended early; another one may continue."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


def fetch_large(place: Place, names: Sequence[str]) -> None:
    """Download the files that the cache does not have yet.

    A file without a sha256 on the hub is left to huggingface_hub, with a warning.

    Raises:
        CapacityError: the disk is too small.
        ModelError: a wrong hash, a redirect to an unknown host, or too many failed attempts.
        Exception: huggingface_hub's errors if the hub refuses.
    """
    wanted: list[_Facts] = []
    for name in names:
        if (place.folder / "snapshots" / place.commit / name).exists():
            continue
        facts = _ask(place, name)
        if facts is not None and not _blob(place, facts).exists():
            wanted.append(facts)
    _check_space(place, wanted)
    for facts in wanted:
        _fetch(place, facts)


def _ask(place: Place, name: str) -> _Facts | None:
    url = hf_hub_url(
        place.repo, name, revision=place.commit, endpoint=place.endpoint or constants.ENDPOINT
    )
    said = get_hf_file_metadata(url, token=place.token or None, endpoint=place.endpoint or None)
    if said.etag is None or not _SHA256.fullmatch(said.etag) or said.size is None:
        log.warning("the hub states no sha256 of %s: only its size is checked", printable(name))
        return None
    if said.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return None
    _check_host(url, said.location, place)
    return _Facts(name, url, said.location, said.etag, said.size)


def _blob(place: Place, facts: _Facts) -> Path:
    return place.folder / "blobs" / facts.sha256


def _part(place: Place, facts: _Facts) -> Path:
    return place.folder / "blobs" / f"{facts.sha256}.incomplete"


def _check_space(place: Place, wanted: Sequence[_Facts]) -> None:
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


def _fetch(place: Place, facts: _Facts) -> None:
    blob, part = _blob(place, facts), _part(place, facts)
    lock = place.folder.parent / ".locks" / place.folder.name / f"{facts.sha256}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        log.info("downloading %s, %s done", printable(facts.name), _progress(part, facts))
        try:
            with _log_interrupt(part, facts):
                _fill(place, facts, part)
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
def _log_interrupt(part: Path, facts: _Facts) -> Generator[None]:
    try:
        yield
    except KeyboardInterrupt:
        text = "stopped at %s of %s; run the same command to resume"
        log.warning(text, _progress(part, facts), printable(facts.name))
        raise


def _progress(part: Path, facts: _Facts) -> str:
    return f"{megabytes(_size(part))} of {megabytes(facts.size)}"


def _fill(place: Place, facts: _Facts, part: Path) -> None:
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
                    facts = _ask(place, facts.name) or facts
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


def _wait_or_give_up(error: Exception, failures: int, part: Path, facts: _Facts) -> None:
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


def _attempt(place: Place, facts: _Facts, file: _File, bar: _Bar) -> None:
    """Request the missing bytes once and append them.

    Raises:
        _Again: the response ended early or the server asks for a retry.
    """
    at = file.tell()
    headers = build_hf_headers(token=place.token or None)
    headers |= {"Accept-Encoding": "identity", "Range": f"bytes={at}-"}
    address = facts.address
    for _ in range(_MAX_HOPS):
        if urlsplit(address).netloc != urlsplit(facts.url).netloc:
            headers.pop("authorization", None)  # never send the token to another host
        with get_session().stream(
            "GET",
            address,
            headers=headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            follow_redirects=False,
        ) as answer:
            following = answer.headers.get("location") if answer.status_code // 100 == 3 else None
            if following is None:
                _check_status(answer.status_code, answer.headers, facts)
                if answer.status_code not in (200, 206):
                    hf_raise_for_status(answer)
                _begin_at(_start_of(answer.status_code, answer.headers, at, facts), file, bar)
                return _take(answer.iter_bytes(), file, bar, facts)
            following = urljoin(address, following)
        _check_host(facts.url, following, place)
        address = following
    raise ModelError(f"{printable(facts.name)} is redirected more than {_MAX_HOPS} times")


def _check_status(status: int, headers: Mapping[str, str], facts: _Facts) -> None:
    if status in _AGAIN:
        raise _Again(f"the hub answers {status}", _retry_after_s(headers))
    if status in _EXPIRED and facts.address != facts.url:
        raise _Again(f"the address of {printable(facts.name)} answers {status}")


def _start_of(status: int, headers: Mapping[str, str], at: int, facts: _Facts) -> int:
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


def _take(pieces: Iterator[bytes], file: _File, bar: _Bar, facts: _Facts) -> None:
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


def _check_host(url: str, address: str, place: Place) -> None:
    """Refuse redirects to unknown hosts.

    Allowed are the endpoint's own host, the hub's hosts and, if HF_ENDPOINT names a mirror, any
    https host. A redirect from https to http is refused.
    """
    own, other = urlsplit(url), urlsplit(address)
    host = (other.hostname or "").lower()
    if own.netloc == other.netloc and own.scheme == other.scheme:
        return
    is_hubs = any(host == domain or host.endswith("." + domain) for domain in _HUB_DOMAINS)
    is_mirror = not any((own.hostname or "").endswith(domain) for domain in _HUB_DOMAINS)
    if other.scheme == "https" and host and (is_hubs or is_mirror):
        return
    raise ModelError(
        f"{printable(place.repo)}: {own.netloc} leads to {other.scheme}://{printable(host, 80)}, "
        "which is not one of the hub's hosts",
        hint="nothing was downloaded from it; check HF_ENDPOINT",
    )


def _check_hash(part: Path, facts: _Facts) -> None:
    with open(part, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != facts.sha256:
        part.unlink()
        raise ModelError(
            f"{printable(facts.name)} has the sha256 {found[:16]}…, the hub states "
            f"{facts.sha256[:16]}…: the download is damaged and was deleted",
            hint="fetch it again",
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
