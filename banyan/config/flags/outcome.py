"""The outcome of a flag's value on a device: works, nothing to do, missing, or refused.

A flag that owns a field works, and a row of `absent.tsv` has one outcome, on every device. A row of
`outcomes.tsv` says where a device differs: the flag, the values (none: every value), the devices,
the outcome and a reason of `reasons.tsv`. Values are words, `LOW..HIGH` for numbers, or `!` before
the values that are excepted. `npu` stands for both chips, A2 and A3.

Everything that shows or applies an outcome reads it here: the start, `banyan config`, `banyan
check`, `--help`, docs/server_arguments.md and the README's counts.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

from banyan.config.flags.flag import BELONGS, IDLE, INT, Absent, Flag
from banyan.config.flags.flag import REFUSED as ABSENT_REFUSED
from banyan.config.flags.table import CONFIG_FILE, Known, find, known_flags, read_rows
from banyan.config.schema import Config

WORKS, NOTHING, MISSING, REFUSED = "works", "nothing to do", "missing", "refused"
VERDICTS = (WORKS, NOTHING, MISSING, REFUSED)
DEVICES = ("cpu", "cuda", "A2", "A3")
_WORDS = {"nothing": NOTHING, "missing": MISSING, "refused": REFUSED}
_ABSENT = {IDLE: NOTHING, BELONGS: MISSING, ABSENT_REFUSED: REFUSED}
_CHIPS = ("A2", "A3")


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        verdict: WORKS, NOTHING (accepted: nothing is left to do for it), MISSING (accepted: it
            tunes a feature that is absent) or REFUSED (ends the start).
        why: the reason; "" if it works.
        use: what to do instead.
    """

    verdict: str
    why: str = ""
    use: str = ""

    @property
    def text(self) -> str:
        """For a line of a page or of `banyan config`."""
        return f"{self.verdict}: {self.why} ({self.use})" if self.why else self.verdict


@dataclass(frozen=True)
class OutcomeRow:
    """A row of the table: where the outcome of a flag depends on the device."""

    flag: str
    values: tuple[str, ...]
    devices: tuple[str, ...]
    outcome: Outcome

    def covers(self, value: object) -> bool:
        """Whether the row is about this value; None asks for every value."""
        if not self.values:
            return True
        if value is None:
            return False
        texts = (
            [str(each) for each in cast(tuple[object, ...], value)]
            if isinstance(value, tuple)
            else [str(value)]
        )
        words = [word.removeprefix("!") for word in self.values]
        is_listed = any(_is_of(text, word) for text in texts for word in words)
        return is_listed != self.values[0].startswith("!")


WORKING = Outcome(WORKS)
_NUMBERS = (1, 2, 16, 128, 1 << 20)
"""Tried for a flag as a whole."""
DEFAULT = "this is the default"


def outcome_of(known: Known, value: object, device: str) -> Outcome:
    """The one answer to what a flag's value does on a device.

    Args:
        value: a checked value that is not the default; None = any value.
        device: one of DEVICES, or the name of another package's device.
    """
    if isinstance(known, Absent) and value is not None and known.asks_for_nothing(value):
        return Outcome(NOTHING, DEFAULT, "leave it out")
    rows = [row for row in outcome_rows().get(known.name, ()) if device in row.devices]
    for row in rows:
        if row.covers(value):
            return row.outcome
    if isinstance(known, Flag):
        return WORKING if value is not None else _of_any_value(known, rows)
    if isinstance(known, Absent):
        return Outcome(_ABSENT[known.outcome], known.why, known.use)
    successor = find(known.successor, abbreviate=False)
    return outcome_of(successor, known.value, device)


def _of_any_value(flag: Flag, rows: Sequence[OutcomeRow]) -> Outcome:
    """WORKING unless the rows cover every value but the default: ranks of a GPU other than one."""
    if not rows:
        return WORKING
    part, _, name = flag.field.partition(".")
    default = getattr(getattr(Config(), part), name)
    values: list[object] = [each for each in flag.choices if each not in (default, "")]
    if flag.kind == INT:
        values = [n for n in _NUMBERS if flag.low <= n <= flag.high and n != default]
    covering = [next((row for row in rows if row.covers(value)), None) for value in values]
    found = [row for row in covering if row is not None]
    return found[0].outcome if found and len(found) == len(values) else WORKING


@cache
def outcome_rows() -> dict[str, tuple[OutcomeRow, ...]]:
    """The rows of the table, by the name of the flag."""
    reasons = {row["reason"]: row for row in read_rows("reasons.tsv")}
    found: dict[str, tuple[OutcomeRow, ...]] = {}
    for row in read_rows("outcomes.tsv"):
        known, reason = find(row["flag"], abbreviate=False), reasons[row["reason"]]
        devices = tuple(
            each
            for name in row["devices"].split()
            for each in (_CHIPS if name == "npu" else [name])
        )
        outcome = Outcome(_WORDS[row["outcome"]], reason["why"], reason["use"])
        line = OutcomeRow(known.name, tuple(row["values"].split()), devices, outcome)
        found[known.name] = (*found.get(known.name, ()), line)
    return found


def counts(device: str) -> Counter[str]:
    """Number of documented flags with each verdict on a device; the flag --config counts too."""
    found = Counter({WORKS: 1})
    for known in known_flags():
        spellings = known.documented + (len(known.old) if isinstance(known, Flag) else 0)
        found[outcome_of(known, None, device).verdict] += spellings
    return found


def differing(device: str) -> Iterator[tuple[str, Outcome]]:
    """What does not work on a device: the flag, with the values where only some do not."""
    for known in known_flags():
        if not known.documented or known.name == CONFIG_FILE:
            continue
        whole = outcome_of(known, None, device)
        if whole.verdict != WORKS:
            yield f"--{known.name}", whole
        for row in outcome_rows().get(known.name, ()):
            if row.values and device in row.devices:
                yield f"--{known.name} {' '.join(row.values)}", row.outcome


def remark(known: Known) -> str:
    """For the help: the devices on which the flag, or some of its values, does not work."""
    parts = list[str]()
    for row in outcome_rows().get(known.name, ()):
        values = f" {_shortened(row.values)}" if row.values else ""
        names = ", ".join(_device_names(row.devices))
        parts.append(f"{names}{':' + values if values else ''} {row.outcome.verdict}")
    return f" ({'; '.join(parts)})" if parts else ""


def _device_names(devices: Sequence[str]) -> list[str]:
    if set(_CHIPS) <= set(devices):
        return [*(name for name in devices if name not in _CHIPS), "npu"]
    return list(devices)


def _shortened(values: Sequence[str]) -> str:
    return " ".join(values) if len(values) <= 4 else "other values"


def _is_of(text: str, word: str) -> bool:
    """Whether a value's text is the word, or a number within the range that the word gives."""
    low, dots, high = word.partition("..")
    if not dots:
        return text == word
    try:
        number = float(text)
    except ValueError:
        return False
    return float(low) <= number <= float(high or math.inf)
