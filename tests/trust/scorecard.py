"""The scorecard: the outcome of each line, kept in a file and shown as a page."""

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.trust.battery import Line

NOT_TRIED = "not tried"
HEAD = """# Trust

This page lists properties that a server must keep under failures, overload and malformed input,
and the result of the last try of each. `make trust` runs the tests and writes the page. Run some
lines alone with, for example:

    make trust LINES=T7,T19

"""
EXPLANATION = """
The exit status of a line's command decides its result. The bullets of a line are the figures that
the command printed. Each line has its own day. The load is the machine's (average over a minute)
at the start and the end: times on an overloaded machine say little about the server.
"""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one line."""

    id: str
    verdict: str
    figures: list[str]
    failed: list[str]
    """Names of tests."""
    took_s: float
    command: str = ""
    """The command that was run; "" = the line's own."""
    loads: str = ""
    """Load of the machine (one minute's average) at the start and the end."""
    day: str = ""
    """Of its end, UTC, as 2026-11-23; "" = unknown."""

    @property
    def all_figures(self) -> list[str]:
        failed = [f"failed: {', '.join(self.failed)}"] if self.failed else []
        return [*self.figures, *failed]

    @property
    def figure(self) -> str:
        return "; ".join(self.all_figures)


def load(path: Path) -> dict[str, Outcome]:
    if not path.exists():
        return {}
    return {id: Outcome(**kept) for id, kept in json.loads(path.read_text()).items()}


def save(path: Path, found: Mapping[str, Outcome]) -> None:
    path.write_text(json.dumps({id: asdict(outcome) for id, outcome in found.items()}, indent=1))


def read_page(path: Path) -> dict[str, Outcome]:
    """Outcomes from an existing page, for lines that are not run again."""
    text = path.read_text() if path.exists() else ""
    found: dict[str, Outcome] = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        id, _, rest = section.partition("\n")
        result = re.search(r"^- Result: \*\*(.+?)\*\*.*?, (\S*), load (.*)$", rest, re.MULTILINE)
        if result is None or result[1] == NOT_TRIED:
            continue
        command = re.search(r"^```\n(.+)$", rest, re.MULTILINE)
        figures = re.findall(r"^  - (.+)$", rest, re.MULTILINE)
        run = command[1] if command else ""
        found[id] = Outcome(id, result[1], figures, [], 0.0, run, result[3], result[2])
    return found


def page(lines: Sequence[Line], found: Mapping[str, Outcome], left_out: Mapping[str, str]) -> str:
    holding = [line for line in lines if line.id in found and found[line.id].verdict == "holds"]
    cut = sum(_is_of_another_length(line, found[line.id]) for line in holding)
    cut_words = f" ({cut} of them tried at another length than the line asks for)" if cut else ""
    rows = ["| line | what is tried | result |", "|---|---|---|"]
    for line in lines:
        cells = (f"[{line.id}](#{line.id.lower()})", _cell(line.what), _result(line, found))
        rows.append("| " + " | ".join(cells) + " |")
    limits = [f"- **{ids}**: {why}" for ids, why in left_out.items()]
    return (
        HEAD
        + f"{machine()}: {len(holding)} of {len(lines)} lines hold{cut_words}.\n\n"
        + "\n".join(rows)
        + "\n\n## Limits\n\n"
        + "\n".join(limits)
        + "\n\n## Details\n"
        + EXPLANATION
        + "".join(_details(line, found) for line in lines)
    )


def _result(line: Line, found: Mapping[str, Outcome]) -> str:
    outcome = found.get(line.id)
    if outcome is None:
        return f"**{NOT_TRIED}**"
    length = " at another length" if _is_of_another_length(line, outcome) else ""
    return f"**{outcome.verdict}**{length}"


def _details(line: Line, found: Mapping[str, Outcome]) -> str:
    """The section of one line."""
    outcome = found.get(line.id)
    rows = [f"\n### {line.id}\n", f"- Tried: {line.what}", f"- Target: {line.target}"]
    dated = f", {outcome.day}, load {outcome.loads}" if outcome else ""
    rows.append(f"- Result: {_result(line, found)}{dated}")
    rows += [f"  - {figure}" for figure in outcome.all_figures] if outcome else []
    command = (outcome.command if outcome else "") or line.command
    return "\n".join([*rows, "", "```", command, "```", ""])


def _is_of_another_length(line: Line, outcome: Outcome) -> bool:
    return outcome.command not in ("", line.command)


def machine() -> str:
    """Where it ran."""
    cpu = Path("/proc/cpuinfo")
    names = [x.partition(":")[2].strip() for x in cpu.read_text().splitlines() if "model name" in x]
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
