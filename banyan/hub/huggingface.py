"""Models from the Hugging Face hub: the cache on this machine and, unless offline, the network.

If the hub is unreachable, a complete model in the cache is used, with a warning. Errors of the hub
become a ModelError with a hint.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeVar

from huggingface_hub import (
    constants,
    hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
    snapshot_download,  # pyright: ignore[reportUnknownVariableType]
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from banyan.base.errors import BanyanError, ModelError
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.schema import LoadConfig
from banyan.formats.shards import TORCH, has_weights, weight_files
from banyan.hub.catalogue import meant
from banyan.hub.downloads import fetch_files
from banyan.hub.metadata import HubFile, Place, is_safe_name, list_repository
from banyan.model_config.checkpoint import MODEL_FILES, PICKLED, WITHOUT_FILES, pickled

T = TypeVar("T")

log = logger(__name__)

_WEIGHTS = (".safetensors", ".gguf")


class Hub:
    """
    Args:
        model: source, revision, cache folder, and whether the network may be used.
    """

    def __init__(self, model: LoadConfig, environment: Environment) -> None:
        self._source = model.source
        self._revision = model.revision or None
        if self._revision and not is_safe_name(self._revision):
            shown = printable(self._revision, 80)
            raise ModelError(f"--revision {shown!r} is no name of a branch, a tag or a commit")
        self._is_offline = model.offline or environment.hf_offline
        self._needs_weights = model.load_format not in WITHOUT_FILES
        self._cache = cache_folder(model, environment)
        self._token = environment.hf_token
        self._endpoint = environment.hf_endpoint

    def folder(self, repo: str) -> str:
        """The local folder with a repository's safetensors, configuration and tokenizer."""

        def fetch() -> str:
            place, files = self._listed(repo)
            patterns = _patterns(repo, [f.name for f in files])
            wanted = [f for f in files if any(fnmatch(f.name, p) for p in patterns)]
            if not self._needs_weights:
                wanted = [f for f in wanted if not has_weights([f.name])]
            self._fetch(place, wanted)
            return str(place.folder / "snapshots" / place.commit)

        return self._brought(fetch, lambda: self._whole_snapshot(repo))

    def file(self, repo: str, name: str) -> str:
        """The local path of one GGUF file of a repository."""

        def fetch() -> str:
            place, files = self._listed(repo)
            wanted = [f for f in files if f.name == name]
            if not wanted:
                raise _no_such_file(repo, name, [f.name for f in files])
            self._fetch(place, wanted)
            return str(place.folder / "snapshots" / place.commit / name)

        return self._brought(fetch, lambda: self._one(repo, name))

    def _brought(self, fetch: Callable[[], str], cached: Callable[[], str]) -> str:
        """The path from `fetch`; from the cache when offline or if the hub is unreachable."""
        if self._is_offline:
            return self._guarded(cached)
        try:
            return fetch()
        except BanyanError:
            raise
        except Exception as error:
            failure = self._failure(error)
            found = self._held(cached) if is_away(error) else None
            if found is None:
                raise failure from error
            log.warning(
                "%s: using the copy in the cache (%s), because the hub is unreachable: %s",
                printable(self._source),
                os.path.basename(os.path.dirname(found) if os.path.isfile(found) else found)[:12],
                reason(error),
            )
            return found

    def _held(self, cached: Callable[[], str]) -> str | None:
        try:
            return cached()
        except (OSError, ValueError, BanyanError):
            return None

    def _listed(self, repo: str) -> tuple[Place, tuple[HubFile, ...]]:
        place = Place(repo, "", self._repo_folder(repo), self._endpoint, self._token)
        commit, files = list_repository(place, self._revision or "")
        return replace(place, commit=commit), files

    def _fetch(self, place: Place, files: Sequence[HubFile]) -> None:
        fetch_files(place, files, self._revision or constants.DEFAULT_REVISION)

    def _repo_folder(self, repo: str) -> Path:
        return self._cache / f"models--{repo.replace('/', '--')}"

    def _whole_snapshot(self, repo: str) -> str:
        """The cached folder, if every weight file is complete."""
        folder = snapshot_download(
            repo, revision=self._revision, cache_dir=self._cache, local_files_only=True
        )
        if not os.path.isfile(os.path.join(folder, "config.json")):
            raise LocalEntryNotFoundError(f"{folder} has no config.json")
        is_gguf = any(name.endswith(_WEIGHTS[1]) for name in os.listdir(folder))
        if self._needs_weights and not is_gguf:
            try:
                weight_files(folder)
            except ModelError as error:
                raise LocalEntryNotFoundError(error.text) from None
        return folder

    def _one(self, repo: str, name: str) -> str:
        return hf_hub_download(
            repo, name, revision=self._revision, cache_dir=self._cache, local_files_only=True
        )

    def _guarded(self, ask: Callable[[], T]) -> T:
        """Call `ask`; turn any error (hub, HTTP, network, disk) into a ModelError."""
        try:
            return ask()
        except BanyanError:
            raise
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> ModelError:
        name = printable(self._source)
        page = f"{self._endpoint or constants.ENDPOINT}/{repo_of(self._source)}"
        if self._is_offline and any(self._repo_folder(repo_of(self._source)).glob("blobs/*")):
            return ModelError(
                f"{name!r} is only partly in the cache on this machine",
                hint="fetch the rest with network: banyan pull",
            )
        if self._is_offline:
            return ModelError(
                f"{name!r} is not in the cache on this machine, and --offline forbids fetching it",
                hint="fetch it once with network, or name a folder",
            )
        if isinstance(error, GatedRepoError) or _status(error) == 403:
            who = "the account of this HF_TOKEN" if self._token else "an anonymous user"
            return ModelError(
                f"{name!r} is gated: its makers require accepted terms, and {who} is refused",
                hint=f"accept them at {page}, then set HF_TOKEN or run: hf auth login",
            )
        if isinstance(error, RevisionNotFoundError):
            return ModelError(f"{name!r} has no such revision", hint="leave --revision out")
        if isinstance(error, EntryNotFoundError):
            return ModelError(f"{name!r}: {reason(error)}", hint=f"its files: {page}/tree/main")
        if isinstance(error, RepositoryNotFoundError) or _status(error) == 401:
            near = meant(self._source) or "check the name"
            return ModelError(
                f"the hub has no {repo_of(self._source)!r}, or keeps it private",
                hint=f"{near}; for a private one set HF_TOKEN or run: hf auth login",
            )
        if _status(error) == 429:
            return ModelError(
                f"the hub answers {name!r} with 429: too many requests{_patience(error)}",
                hint="try again then; an account's HF_TOKEN is allowed more",
            )
        return ModelError(
            f"cannot fetch {name!r}: {reason(error)}",
            hint="check the name, the network and HF_TOKEN; --offline uses what was fetched before",
        )


def cache_folder(model: LoadConfig, environment: Environment) -> Path:
    """The hub's cache folder on this machine."""
    return Path(model.download_dir or environment.hf_cache or constants.HF_HUB_CACHE).expanduser()


def repo_of(source: str) -> str:
    """owner/name of owner/name/file."""
    return printable("/".join(source.removeprefix("hf:").split("/")[:2]))


def is_away(error: Exception) -> bool:
    """Whether the hub was unreachable or overloaded, rather than refusing the request."""
    status = _status(error)
    if status is not None:
        return status == 429 or status >= 500
    return isinstance(error, HTTPError | OfflineModeIsEnabled | LocalEntryNotFoundError | OSError)


def reason(error: Exception) -> str:
    """The first meaningful line of an error's text, without its final dot."""
    lines = str(error).strip().splitlines() or [""]
    said = lines[0].strip()
    if len(lines) > 1 and said.endswith("Error."):  # the reason is on the next line
        said = next((line.strip() for line in lines[1:] if line.strip()), said)
    return printable(said.rstrip(". ")) or type(error).__name__


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _patience(error: Exception) -> str:
    if not isinstance(error, HfHubHTTPError):
        return ""
    said = str(error.response.headers.get("retry-after", ""))
    return f", wait {said} s" if said.isdecimal() else ""


def _patterns(repo: str, names: Sequence[str]) -> Sequence[str]:
    """Names of the files that are fetched; a repository without usable weights is refused before
    anything large is fetched."""
    if any(name.endswith(_WEIGHTS[0]) for name in names):
        return MODEL_FILES
    if has_weights(names):
        return (*MODEL_FILES, TORCH.pattern)
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        raise ModelError(
            f"{repo} holds GGUF files only: {printable(', '.join(gguf[:8]))}",
            hint=f"name one of them: {repo}/{gguf[0]}",
        )
    if any(name.endswith(PICKLED) for name in names):
        raise pickled(repo)
    raise ModelError(f"{repo} holds no *.safetensors and no *.gguf")


def _no_such_file(repo: str, name: str, names: Sequence[str]) -> ModelError:
    gguf = [found for found in names if found.endswith(".gguf")]
    there = printable(", ".join(gguf[:8])) or "no GGUF file at all"
    return ModelError(
        f"{repo} has no file {printable(name)!r}; it has {there}",
        hint=f"name one of them: {repo}/{gguf[0]}" if gguf else "name another repository",
    )
