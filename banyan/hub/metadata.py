"""What a hub states of a repository and its files, checked before anything is used.

HF_ENDPOINT may name any mirror, so every field is taken for hostile: answers are read up to a
bound, redirects lead to known hosts only, and no field becomes a path before it is checked.
"""

import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import (
    build_hf_headers,  # pyright: ignore[reportUnknownVariableType]
    get_session,
    hf_raise_for_status,
)

from banyan.base.errors import ModelError
from banyan.base.json_types import is_list, is_object, unique_json
from banyan.base.log import printable

MAX_HOPS = 5
MAX_FILES = 10_000
_MAX_ANSWER_BYTES = 16 << 20
_MAX_ERROR_BYTES = 64 << 10
_MAX_NAME_BYTES = 1024
_MAX_PART_BYTES = 240
"""Of one folder or file name: file systems allow 255."""
_MAX_SIZE = 1 << 50
_ANSWER_TIMEOUT_S = 4.0
"""Timeout of the first request, so that a start without network fails soon."""
_ANSWER_S = 60.0
"""Longest time that the list of files may take."""
_HUB_DOMAINS = ("huggingface.co", "hf.co")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_STATED = ("x-repo-commit", "x-linked-etag", "x-linked-size", "etag")
_ANOTHER = "try again, or another HF_ENDPOINT"


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
class HubFile:
    """One file as the repository's list states it.

    Attributes:
        size: None = not stated.
        sha256, git_sha1: hash of the content, and of git's object; "" = not stated.
    """

    name: str
    size: int | None
    sha256: str
    git_sha1: str


@dataclass(frozen=True)
class FileFacts:
    """What the hub answers for one file.

    Attributes:
        address: download URL; may be on another host and expire after an hour.
        etag: the hub's name of the content.
        sha256, git_sha1: what the bytes are checked against; "" = not stated.
    """

    name: str
    url: str
    address: str
    etag: str
    sha256: str
    git_sha1: str
    size: int


def list_repository(place: Place, revision: str) -> tuple[str, tuple[HubFile, ...]]:
    """The commit of a revision, and its files.

    Args:
        place: its commit is not read.

    Raises:
        ModelError: a field of the answer is unsafe, or the answer is too long.
        Exception: huggingface_hub's errors if the hub refuses or is away.
    """
    endpoint = place.endpoint or constants.ENDPOINT
    url = f"{endpoint}/api/models/{place.repo}"
    if revision:
        url += f"/revision/{quote(revision, safe='')}"
    found = _read_json(f"{url}?blobs=true", place)
    commit, listed = found.get("sha"), found.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _refused(place, f"names the commit {_shown(commit)}: 40 hexadecimal digits expected")
    if not is_list(listed):
        raise _refused(place, "lists no files")
    if len(listed) > MAX_FILES:
        raise _refused(place, f"lists {len(listed):,} files: {MAX_FILES:,} are read")
    files = tuple(_listed(place, item) for item in listed)
    _check_names(place, [file.name for file in files])
    return commit, files


def file_facts(place: Place, stated: HubFile) -> FileFacts:
    """Ask the hub where a file lies, and what it is.

    A host other than the hub's is not contacted: the answer that leads to it states all facts.

    Raises:
        ModelError: a field is unsafe, or contradicts the list of files.
        Exception: huggingface_hub's errors if the hub refuses or is away.
    """
    endpoint = place.endpoint or constants.ENDPOINT
    url = hf_hub_url(place.repo, stated.name, revision=place.commit, endpoint=endpoint)
    address, headers = url, dict[str, str]()
    for _ in range(MAX_HOPS + 1):
        with request("HEAD", address, url, place, constants.HF_HUB_ETAG_TIMEOUT) as answer:
            raise_for_status(answer)
            following = _redirect(answer.status_code, answer.headers)
            wanted = _STATED if following else (*_STATED, "content-length")
            headers |= {n: answer.headers[n] for n in wanted if answer.headers.get(n)}
        if following is None:
            return _facts(place, stated, url, address, headers)
        following = urljoin(address, following)
        check_host(url, following, place)
        is_elsewhere = _origin(following) != _origin(address)
        address = following
        if is_elsewhere and not _is_hub(following):
            return _facts(place, stated, url, address, headers)
    raise ModelError(f"{printable(stated.name)} is redirected more than {MAX_HOPS} times")


def request(
    method: str, address: str, url: str, place: Place, timeout_s: float, start: int | None = None
) -> AbstractContextManager[Any]:
    """One request whose answer is read in pieces; redirects are not followed.

    The token is sent to the host of `url` and to the hub only.

    Args:
        url: the address at the hub that led to `address`.
        start: the first byte that is wanted; None = no range is named.
    """
    headers = build_hf_headers(token=place.token or None)
    headers["Accept-Encoding"] = "identity"
    if start is not None:
        headers["Range"] = f"bytes={start}-"
    if _origin(address) != _origin(url) and not _is_hub(address):
        headers.pop("authorization", None)
    return get_session().stream(
        method, address, headers=headers, timeout=timeout_s, follow_redirects=False
    )


def raise_for_status(answer: Any) -> None:
    """Raise huggingface_hub's error for a status of 400 and above; read a bounded part of its text.

    Raises:
        ModelError: the answer is compressed, though it was asked not to be.
    """
    coding = answer.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        said = printable(coding, 40)
        raise ModelError(f"the hub sends {said!r} where plain bytes were asked for", hint=_ANOTHER)
    if answer.status_code < 400:
        return
    text = b""
    if answer.request.method != "HEAD":
        for piece in answer.iter_bytes(_MAX_ERROR_BYTES):
            text += piece
            if len(text) >= _MAX_ERROR_BYTES:
                break
    unread = ("content-length", "transfer-encoding")
    headers = [(n, v) for n, v in answer.headers.multi_items() if n.lower() not in unread]
    kept = text[:_MAX_ERROR_BYTES]
    hf_raise_for_status(
        type(answer)(answer.status_code, headers=headers, content=kept, request=answer.request)
    )


def check_host(url: str, address: str, place: Place) -> None:
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
    if other.scheme == "https" and host and "@" not in other.netloc and (is_hubs or is_mirror):
        return
    raise ModelError(
        f"{printable(place.repo)}: {own.netloc} leads to {other.scheme}://{printable(host, 80)}, "
        "which is not one of the hub's hosts",
        hint="nothing was downloaded from it; check HF_ENDPOINT",
    )


def is_safe_name(name: str) -> bool:
    """Whether `name`, joined to a folder, stays in that folder on every file system."""
    parts = name.split("/")
    return (
        len(name.encode("utf-8", "replace")) <= _MAX_NAME_BYTES
        and "\\" not in name
        and name.isprintable()
        and all(part.strip(" .") for part in parts)
        and all(len(part.encode("utf-8", "replace")) <= _MAX_PART_BYTES for part in parts)
    )


def _read_json(url: str, place: Place) -> dict[str, object]:
    address, deadline = url, time.monotonic() + _ANSWER_S
    for _ in range(MAX_HOPS + 1):
        with request("GET", address, url, place, _ANSWER_TIMEOUT_S) as answer:
            raise_for_status(answer)
            following = _redirect(answer.status_code, answer.headers)
            if following is None:
                return _parse(place, _read(answer, place, deadline))
        following = urljoin(address, following)
        check_host(url, following, place)
        if _origin(following) != _origin(address) and not _is_hub(following):
            raise _refused(place, "keeps its list of files on another host")
        address = following
    raise _refused(place, f"redirects the list of files more than {MAX_HOPS} times")


def _read(answer: Any, place: Place, deadline: float) -> bytes:
    found = bytearray()
    for piece in answer.iter_bytes():
        found += piece
        if len(found) > _MAX_ANSWER_BYTES:
            limit = _MAX_ANSWER_BYTES >> 20
            raise _refused(place, f"lists its files in more than {limit} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the list of files took more than {_ANSWER_S:.0f} s")
    return bytes(found)


def _parse(place: Place, body: bytes) -> dict[str, object]:
    try:
        found = unique_json(body.decode())
    except (ValueError, RecursionError):
        found = None
    if not is_object(found):
        raise _refused(place, "answers without a JSON object")
    return found


def _listed(place: Place, item: object) -> HubFile:
    name = item.get("rfilename") if is_object(item) else None
    if not is_object(item) or not isinstance(name, str) or not is_safe_name(name):
        raise _refused(place, f"lists the file {_shown(name)}, which is not a safe name")
    size, lfs, git = item.get("size"), item.get("lfs"), item.get("blobId")
    sha256 = lfs.get("sha256", lfs.get("oid")) if is_object(lfs) else None
    if size is not None and not (type(size) is int and 0 <= size <= _MAX_SIZE):
        raise _refused(place, f"states the size {_shown(size)} of {printable(name)}")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise _refused(place, f"states the sha256 {_shown(sha256)} of {printable(name)}")
    is_git = isinstance(git, str) and _COMMIT.fullmatch(git)
    git = git if is_git and sha256 is None else ""
    return HubFile(name, size if isinstance(size, int) else None, sha256 or "", str(git))


def _check_names(place: Place, names: list[str]) -> None:
    """No name twice, and none that is a file and a folder."""
    files = set(names)
    if len(files) != len(names):
        raise _refused(place, "lists a file twice")
    for name in names:
        parts = name.split("/")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in files:
                raise _refused(place, f"lists {printable(name)} in a folder that is a file")


def _facts(
    place: Place, stated: HubFile, url: str, address: str, said: Mapping[str, str]
) -> FileFacts:
    name = printable(stated.name)
    commit = said.get("x-repo-commit", place.commit)
    if commit != place.commit:
        raise _refused(place, f"answers for the commit {_shown(commit)}, not {place.commit}")
    etag = (said.get("x-linked-etag") or said.get("etag", "")).removeprefix("W/").strip('"')
    if not etag:
        raise _refused(place, f"states no ETag of {name}")
    text = said.get("x-linked-size") or said.get("content-length", "")
    if text and not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise _refused(place, f"states the size {_shown(text)} of {name}")
    size = int(text) if text else stated.size
    if size is None:
        raise _refused(place, f"states no size of {name}")
    if stated.size is not None and size != stated.size:
        raise _refused(place, f"states two sizes of {name}: {stated.size:,} and {size:,}")
    sha256 = etag if _SHA256.fullmatch(etag) else stated.sha256
    if stated.sha256 and sha256 != stated.sha256:
        raise _refused(place, f"states two hashes of {name}")
    git_sha1 = etag if not sha256 and etag == stated.git_sha1 else ""
    return FileFacts(stated.name, url, address, etag, sha256, git_sha1, size)


def _redirect(status: int, headers: Mapping[str, str]) -> str | None:
    return headers.get("location") if status // 100 == 3 else None


def _origin(address: str) -> tuple[str, str]:
    parts = urlsplit(address)
    return parts.scheme, parts.netloc


def _is_hub(address: str) -> bool:
    """Whether this is the public hub itself, which may see the token."""
    parts = urlsplit(address)
    return parts.scheme == "https" and parts.netloc in _HUB_DOMAINS


def _shown(value: object) -> str:
    return repr(printable(str(value), 80))


def _refused(place: Place, what: str) -> ModelError:
    where = printable(urlsplit(place.endpoint or constants.ENDPOINT).netloc, 80)
    return ModelError(f"{printable(place.repo)}: {where} {what}", hint=_ANOTHER)
