"""The scorecard: what became of each line, kept in a file and shown as a page."""

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

What must hold whatever happens to a server, and what came out when it was tried. `make trust`
wrote this page: each line is a command that anybody can repeat, its verdict is the command's exit
status, and its figure is what the command printed. A line that fails says so. Lines need not be of
one day, and each says its own. The load is that of the machine (average over a minute) when the
line began and when it ended: times of a machine that has more to do than it has processors say
little about the server.

"""


@dataclass(frozen=True)
class Outcome:
    """What became of one line."""

    id: str
    verdict: str
    figures: list[str]
    failed: list[str]
    """Names of tests."""
    took_s: float
    command: str = ""
    """As it was run; "" = the line's own."""
    loads: str = ""
    """Load of the machine, one minute's, before and at its end."""
    day: str = ""
    """Of its end, UTC, as 2026-11-23; "" = that is not known."""

    @property
    def figure(self) -> str:
        failed = [f"failed: {', '.join(self.failed)}"] if self.failed else []
        return "; ".join([*self.figures, *failed])


def load(path: Path) -> dict[str, Outcome]:
    if not path.exists():
        return {}
    return {id: Outcome(**kept) for id, kept in json.loads(path.read_text()).items()}


def save(path: Path, found: Mapping[str, Outcome]) -> None:
    path.write_text(json.dumps({id: asdict(outcome) for id, outcome in found.items()}, indent=1))


def read_page(path: Path) -> dict[str, Outcome]:
    """What a page shows, where nothing else is left of it."""
    found: dict[str, Outcome] = {}
    for row in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        if len(cells) == 8 and cells[4].startswith("**") and cells[4] != f"**{NOT_TRIED}**":
            id, _, _, figure, verdict, loads, day, command = cells
            found[id] = Outcome(
                id, verdict.split("**")[1], [figure], [], 0.0, command.strip("`"), loads, day
            )
    return found


def page(lines: Sequence[Line], found: Mapping[str, Outcome], left_out: Mapping[str, str]) -> str:
    holding = [line for line in lines if line.id in found and found[line.id].verdict == "holds"]
    cut = sum(_is_of_another_length(line, found[line.id]) for line in holding)
    cut_words = f" ({cut} of them tried at another length than the line asks for)" if cut else ""
    heads = ("line", "what is done", "target", "figure", "verdict", "load", "day", "command")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for line in lines:
        outcome = found.get(line.id)
        figure = _cell(outcome.figure) if outcome else ""
        verdict = f"**{outcome.verdict if outcome else NOT_TRIED}**"
        if outcome and _is_of_another_length(line, outcome):
            verdict += " at another length"
        cells = (
            line.id,
            line.what,
            line.target,
            figure,
            verdict,
            outcome.loads if outcome else "",
            outcome.day if outcome else "",
            f"`{_cell((outcome.command if outcome else '') or line.command)}`",
        )
        rows.append("| " + " | ".join(cells) + " |")
    limits = [f"- **{ids}**: {why}" for ids, why in left_out.items()]
    return (
        HEAD
        + f"{machine()}: {len(holding)} of {len(lines)} lines hold{cut_words}.\n\n"
        + "\n".join(rows)
        + "\n\n## What is not in it\n\n"
        + "\n".join(limits)
        + "\n"
    )


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
