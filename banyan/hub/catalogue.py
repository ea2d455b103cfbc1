"""The catalogue: good small models by short name, in their makers' own repositories.

`catalogue.tsv` holds repository, file, architecture, licence and the sampling settings that the
maker recommends. Sizes are approximate; exact sizes and hashes come from the hub.
"""

import csv
import difflib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from banyan.families import FAMILIES

_FILE = Path(__file__).parent / "catalogue.tsv"

TALK_TOKENS = 4096
"""Context length that `needed_bytes` counts."""
_PROGRAM_BYTES = 400 << 20
"""Memory of the server's processes, in addition to weights and cache."""
_CACHE_NUMBER_BYTES = 2


@dataclass(frozen=True)
class CatalogueEntry:
    """One model.

    Attributes:
        name: the short name, in lower case.
        kind: "chat" | "thinking" (before it answers) | "code" | "embedding".
        repo, file: the maker's repository and GGUF file; file "" = the repository's safetensors.
        architecture: a key of `FAMILIES`.
        size_bytes: approximate download size.
        token_bytes: KV cache per token.
        is_gated: the download needs a hub account that has accepted the maker's terms.
        sampling: recommended sampling settings, for files that do not contain them.
        note: a remark for people; may be "".
    """

    name: str
    kind: str
    repo: str
    file: str
    architecture: str
    size_bytes: int
    token_bytes: int
    licence: str
    is_gated: bool
    sampling: tuple[tuple[str, float], ...]
    note: str

    @property
    def source(self) -> str:
        """The name of this model without the catalogue."""
        return f"{self.repo}/{self.file}" if self.file else self.repo

    @property
    def needed_bytes(self) -> int:
        """Memory for weights, TALK_TOKENS of KV cache, and the server's processes."""
        return self.size_bytes + TALK_TOKENS * self.token_bytes + _PROGRAM_BYTES

    @property
    def is_served(self) -> bool:
        return self.architecture in FAMILIES


@cache
def entries() -> tuple[CatalogueEntry, ...]:
    """All models of the catalogue, in file order."""
    with open(_FILE, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return tuple(_entry(row) for row in rows)


def _entry(row: dict[str, str]) -> CatalogueEntry:
    layers, heads, dim = (int(n) for n in (row["cache"] or "0x0x0").split("x"))
    pairs = [pair.split("=") for pair in row["sampling"].split()]
    return CatalogueEntry(
        name=row["name"],
        kind=row["kind"],
        repo=row["repo"],
        file=row["file"],
        architecture=row["architecture"],
        size_bytes=int(row["megabytes"]) * 10**6,
        token_bytes=2 * layers * heads * dim * _CACHE_NUMBER_BYTES,
        licence=row["licence"],
        is_gated=row["access"] == "gated",
        sampling=tuple((name, _number(text)) for name, text in pairs),
        note=row["note"],
    )


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)


def find(name: str) -> CatalogueEntry | None:
    """The model of this short name, ignoring case."""
    return next((e for e in entries() if e.name == name.lower()), None)


def recognise(source: str, path: str = "") -> CatalogueEntry | None:
    """The model of a short name, a hub name, or a local file with the maker's file name."""
    known = find(source)
    if known is not None:
        return known
    asked = source.removeprefix("hf:").lower()
    file = os.path.basename(path)
    return next(
        (e for e in entries() if asked == e.source.lower() or (e.file and file == e.file)), None
    )


def near(name: str) -> list[str]:
    """Up to three short names similar to `name`."""
    asked = _plain(name.rpartition("/")[2])
    names = {_plain(e.name): e.name for e in entries()} | {"demo": "demo"}
    if not asked or asked in names:
        return [names[asked]] if asked else []
    begun = [full for plain, full in names.items() if plain.startswith(asked)]
    close = [names[plain] for plain in difflib.get_close_matches(asked, names, 3, 0.6)]
    return list(dict.fromkeys([*begun, *close]))[:3]


def _plain(name: str) -> str:
    small = name.lower().removesuffix(".gguf").removesuffix("-gguf").removesuffix("-instruct")
    return "".join(c for c in small if c.isalnum())


def meant(name: str) -> str:
    """ "did you mean A or B?"; "" if no name is similar."""
    found = near(name)
    return f"did you mean {' or '.join(found)}?" if found else ""


def megabytes(size: int) -> str:
    """A size for people: 639 MB, 1.8 GB."""
    if size >= 10**9:
        return f"{size / 10**9:.1f} GB"
    return f"{size / 10**6:.0f} MB" if size >= 10**6 else f"{size / 1000:.0f} kB"
