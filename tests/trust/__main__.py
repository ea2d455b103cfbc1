"""`make trust`: runs the battery line by line and writes docs/trust.md as it goes.

With --only T7,T8 it runs those and keeps what the others gave last. A variable of a line that is
set already stays as it is, so that a line can be shorter or longer: FAULTS=10 make trust LINES=T3
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tests.trust.battery import BATTERY, LEFT_OUT, Line
from tests.trust.scorecard import Outcome, load, page, read_page, save

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".trust"
PATIENCE_S = 30.0
"""For tests to end what they have started."""


class Run:
    """One line while pytest works on it."""

    def __init__(self, line: Line) -> None:
        self._log = KEPT / f"{line.id}.log"
        self.line = line = line.with_variables(os.environ)
        words = dict(pair.split("=", 1) for pair in line.variables.split())
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **words}
        self._load = os.getloadavg()[0]
        command = f"{sys.executable} -m pytest -q -s -p no:cacheprovider {line.tests}"
        nice = "exec nice -n 19 " if line.is_background else "exec "
        self._began = time.monotonic()
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                ["sh", "-c", nice + command],
                cwd=ROOT,
                env=variables,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> Outcome:
        """Wait for it, no longer than its limit."""
        left_s = max(1.0, self._began + self.line.limit_s - time.monotonic())
        is_late = False
        try:
            code = self._process.wait(left_s)
        except subprocess.TimeoutExpired:
            is_late, code = True, 1
            self.stop()
        took_s = time.monotonic() - self._began
        text = self._log.read_text(errors="replace")
        if is_late:
            text += f"\nfigure: not done after {self.line.limit_s} s\n"
        loads = f"{self._load:.1f} – {os.getloadavg()[0]:.1f}"
        found = outcome(self.line.id, code, text, took_s)
        day = f"{datetime.now(UTC):%Y-%m-%d}"
        return replace(found, command=self.line.command, loads=loads, day=day)

    def stop(self) -> None:
        """Interrupt it, so that tests end what they have started; what is left after that, in
        whatever session, is killed."""
        below = psutil.Process(self._process.pid).children(recursive=True)
        os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for left in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        psutil.wait_procs(below, timeout=PATIENCE_S)


def outcome(id: str, code: int, text: str, took_s: float) -> Outcome:
    """The outcome of a pytest run: the exit status decides, the summary is passed on."""
    lines = re.findall(r"^figure: (.+)$", text, re.MULTILINE)
    figures = [figure for line in lines for figure in line.split("; ")]
    ends = re.findall(
        r"^(?=.*\b(?:passed|failed|skipped|error)).* in [\d.]+s.*$", text, re.MULTILINE
    )
    counted = re.sub(r",? ?\d+ (deselected|warnings?)", "", ends[-1]) if ends else "no tests ran"
    counted = re.sub(r" in [\d.]+s.*|=+", "", counted).strip()
    is_tried = "passed" in counted or "failed" in counted or "error" in counted
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    verdict = "holds" if code == 0 and is_tried else "not tried" if code == 0 else "FAILS"
    return Outcome(
        id, verdict, [*figures, counted], [name.split("::")[-1] for name in failed], took_s
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trust", description=__doc__)
    parser.add_argument("--only", default="", help="lines to run, with commas between them")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "trust.md")
    asked = parser.parse_args()
    wanted = set(filter(None, asked.only.split(",")))
    if unknown := wanted - {line.id for line in BATTERY}:
        parser.error(f"no such line: {', '.join(sorted(unknown))}")
    # In the background a shell has its children ignore this, and tests send it to their own.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    KEPT.mkdir(exist_ok=True)
    found = load(KEPT / "outcomes.json") or read_page(asked.docs)
    lines = [line for line in BATTERY if not wanted or line.id in wanted]
    background = [Run(line) for line in lines if line.is_background]

    def report(done: Outcome) -> None:
        found[done.id] = done
        save(KEPT / "outcomes.json", found)
        asked.docs.write_text(page(BATTERY, found, LEFT_OUT))
        print(f"{done.id:4} {done.verdict:9} {done.took_s:5.0f} s  {done.figure}", flush=True)

    try:
        for line in lines:
            if not line.is_background:
                report(Run(line).end())
        for run in background:
            print(f"{run.line.id:4} still runs: {run.line.what}", flush=True)
            report(run.end())
    except KeyboardInterrupt:
        for run in background:
            run.stop()
        return 130
    return 1 if any(found[line.id].verdict != "holds" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
