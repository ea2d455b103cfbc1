"""The outcome of each documented flag on an Ascend NPU: works, not applicable, or refused.

`support.tsv` has the documents' columns for A2 and A3, and the reason if this build differs
(`here`). A flag that this build lacks on every device is also lacking here.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from banyan.config.flags.flag import REFUSED as ABSENT_REFUSED
from banyan.config.flags.flag import Absent, Flag
from banyan.config.flags.table import Known, find

WORKS, NOT_APPLICABLE, REFUSED = "works", "not applicable", "refused"
_TAKEN = ("yes", "experimental", "")
"""Columns of flags that the documents' build accepts; some have no entry for a chip."""
_OTHERS = "gpu-only"
_OWN_REASONS = MappingProxyType(
    {
        WORKS: "",
        NOT_APPLICABLE: "nothing depends on it in this build",
        REFUSED: "this build has it on no device",
    }
)


@dataclass(frozen=True)
class DeviceOutcome:
    """
    Attributes:
        column: what the documents say; "" for nothing.
        verdict: WORKS, NOT_APPLICABLE or REFUSED.
        is_lowered: the column decided, and not what this build has.
        why: where what this build has differs from the column.
    """

    column: str
    verdict: str
    is_lowered: bool
    why: str = ""


@cache
def device_outcomes(soc: str) -> Mapping[str, DeviceOutcome]:
    """Of every documented flag, by its name in the tables."""
    found: dict[str, DeviceOutcome] = {}
    with open(Path(__file__).parent / "support.tsv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            known = find(row["flag"], abbreviate=False)
            found.setdefault(known.name, _outcome(known, row[soc], row["here"]))
    return MappingProxyType(found)


def _outcome(known: Known, column: str, here: str) -> DeviceOutcome:
    own = _own(known)
    if column in _TAKEN or here:
        return DeviceOutcome(column, own, is_lowered=False, why=here or _OWN_REASONS[own])
    if own == REFUSED:
        return DeviceOutcome(column, REFUSED, is_lowered=True)
    keeps_nothing = column == _OTHERS or own == NOT_APPLICABLE
    return DeviceOutcome(column, NOT_APPLICABLE if keeps_nothing else REFUSED, is_lowered=True)


def _own(known: Known) -> str:
    """The outcome of a flag in this build, on any device."""
    if isinstance(known, Flag):
        return WORKS
    if isinstance(known, Absent):
        return REFUSED if known.outcome == ABSENT_REFUSED else NOT_APPLICABLE
    return _own(find(known.successor, abbreviate=False))
