"""Models in the hub's cache on this machine: list and remove them."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from banyan.base.errors import ModelError
from banyan.base.log import printable
from banyan.formats.shards import has_weights
from banyan.hub.catalogue import entries, find

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
