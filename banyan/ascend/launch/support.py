"""What the documents' table of flags says of an Ascend NPU, by chip (`support.tsv`).

The outcome of a flag in this build is in `config/flags/outcomes.tsv`.
"""

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from banyan.config.flags.table import find

EXCLUDED = ("planned", "no", "special")
"""Columns of flags that the documents' build does not take on Ascend NPUs."""


@cache
def documented_columns(soc: str) -> Mapping[str, str]:
    """The column of every documented flag, by its name in the tables of flags."""
    found: dict[str, str] = {}
    with open(Path(__file__).parent / "support.tsv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            found.setdefault(find(row["flag"], abbreviate=False).name, row[soc])
    return MappingProxyType(found)
