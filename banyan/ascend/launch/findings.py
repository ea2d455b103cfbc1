"""Findings, and the one table of their sentences: severity, what is wrong with the numbers, what to
do, and where the rule is from (`rules.tsv`)."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from banyan.base.log import printable

ERROR, WARNING = "error", "warning"
_SEVERITIES = MappingProxyType({"E": ERROR, "W": WARNING})
_LONGEST = 300


@dataclass(frozen=True)
class Sentence:
    """A line of the table; `says` and `use` have the places of the numbers in braces."""

    rule: str
    severity: str
    says: str
    use: str
    source: str


@dataclass(frozen=True)
class Breach:
    """A rule that a launch does not keep, with the numbers of its sentence."""

    rule: str
    numbers: Mapping[str, object]


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        rule: number of the rule, and a letter for the case.
        severity: ERROR or WARNING.
    """

    rule: str
    severity: str
    text: str
    use: str
    source: str

    @property
    def is_error(self) -> bool:
        return self.severity == ERROR

    @property
    def line(self) -> str:
        return f"{self.text} ({self.use}) [{self.rule}, {self.source}]"


def breach(rule: str, **numbers: object) -> Breach:
    return Breach(rule, numbers)


@cache
def sentences() -> Mapping[str, Sentence]:
    with open(Path(__file__).parent / "rules.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return MappingProxyType(
        {
            row["rule"]: Sentence(
                row["rule"], _SEVERITIES[row["severity"]], row["says"], row["do"], row["source"]
            )
            for row in rows
        }
    )


def told(found: Breach, *, is_mild: bool = False) -> Finding:
    """The finding of a breach; a mild one is a warning, whatever the table says."""
    sentence = sentences()[found.rule]
    numbers = {name: printable(str(value), _LONGEST) for name, value in found.numbers.items()}
    return Finding(
        rule=found.rule,
        severity=WARNING if is_mild else sentence.severity,
        text=sentence.says.format(**numbers),
        use=sentence.use.format(**numbers),
        source=sentence.source,
    )
