"""Findings, and the table of their sentences (`rules.tsv`): severity, the problem with its
numbers, the remedy, and the source of the rule. `rules_page` prints the table as
docs/ascend_rules.md.
"""

import csv
from collections.abc import Iterator, Mapping
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
    """A line of the table; `text` and `use` have the numbers' names in braces."""

    rule: str
    severity: str
    text: str
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
                row["rule"], _SEVERITIES[row["severity"]], row["text"], row["do"], row["source"]
            )
            for row in rows
        }
    )


def finding_of(found: Breach, *, is_mild: bool = False) -> Finding:
    """The finding of a breach; a mild one is a warning, whatever its severity in the table."""
    sentence = sentences()[found.rule]
    numbers = {name: printable(str(value), _LONGEST) for name, value in found.numbers.items()}
    return Finding(
        rule=found.rule,
        severity=WARNING if is_mild else sentence.severity,
        text=sentence.text.format(**numbers),
        use=sentence.use.format(**numbers),
        source=sentence.source,
    )


_HEAD = """# Rules of a launch on Ascend NPUs

Printed by `banyan check --rules`; a test keeps this file equal to it.

Each start with `--device npu` is checked by these rules: errors end it, warnings are logged.
`banyan check` does the same for any command line, also for machines that are not this one, and
`banyan doctor --device npu` for the machine itself (23). Words in braces are the numbers of the
case. `flag` rules come from the documents' table of flags for A2 and A3, which
`banyan config --device npu` prints.

*Source*: the documents' feature table, parameter guide and install page; the operators' published
contracts; torch_npu (what its parsers take); SGLang (what its launcher refuses).

"""


def rules_page() -> str:
    return _HEAD + "".join(_table_lines())


def _table_lines() -> Iterator[str]:
    yield "| rule | | problem | what to do | source |\n|---|---|---|---|---|\n"
    for each in sentences().values():
        problem, use = (part.replace("|", "\\|") for part in (each.text, each.use))
        yield f"| {each.rule} | {each.severity} | {problem} | {use} | {each.source} |\n"
