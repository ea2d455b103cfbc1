"""The battery and the security checklist name tests that exist, and report what those said."""

import re
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.trust.__main__ import Run, outcome
from tests.trust.battery import BATTERY, LEFT_OUT, Line
from tests.trust.names import ROOT, checklist, missing
from tests.trust.scorecard import load, page, read_page, save
from tests.trust.slope import slope

LINES = (Line("A", "what", "target", "tests"), Line("B", "what", "target", "tests", "N=5"))


@pytest.mark.parametrize("line", BATTERY, ids=lambda line: line.id)
def test_a_line_of_the_battery_runs_tests_that_exist(line: Line) -> None:
    targets = [word for word in line.tests.split() if word.startswith("tests/")]
    assert targets and missing(targets) == []
    assert all("=" in pair for pair in line.variables.split())


def test_no_two_lines_have_one_name_and_what_is_left_out_is_none_that_holds() -> None:
    ids = [line.id for line in BATTERY]
    assert len(set(ids)) == len(ids)
    named = {id for ids in LEFT_OUT for id in ids.split(", ")}
    assert named - set(ids) == {"T13"}


def test_each_item_of_the_security_page_has_tests_that_exist() -> None:
    page = ROOT / "docs" / "security.md"
    items = re.findall(r"^\| (S\w+)", page.read_text(), re.MULTILINE)
    assert len(items) > 50
    assert set(items) == {item for item, _ in checklist()}
    assert missing([test for _, test in checklist()]) == []


def test_a_test_that_does_not_exist_is_missed(tmp_path: Path) -> None:
    table = tmp_path / "table.tsv"
    names = ["tests/test_llm.py::test_that_nobody_wrote", "tests/no.py::test_a"]
    table.write_text("item\ttest\n" + "".join(f"S1\t{name}\n" for name in names))
    assert missing([test for _, test in checklist(table)]) == names


@pytest.mark.parametrize(
    ("code", "said", "verdict", "figure"),
    [
        (0, "figure: 5 of 5\n.\n3 passed, 2 deselected in 1.2s\n", "holds", "5 of 5; 3 passed"),
        (
            1,
            "figure: 4 of 5\nF\nFAILED tests/a.py::test_b - AssertionError\n"
            "=== 1 failed, 2 passed in 1.20s ===\n",
            "FAILS",
            "4 of 5; 1 failed, 2 passed; failed: test_b",
        ),
        (0, "s\n1 skipped in 0.10s\n", "not tried", "1 skipped"),
        (2, "no such file", "FAILS", "no tests ran"),
        (1, "FAILED tests/a.py::test_b\n3 passed in 5.00s", "FAILS", "3 passed; failed: test_b"),
    ],
)
def test_the_verdict_is_that_of_the_tests(code: int, said: str, verdict: str, figure: str) -> None:
    found = outcome("A", code, said, 1.0)
    assert (found.verdict, found.figure) == (verdict, figure)


def test_a_page_shows_what_fails_and_what_was_not_tried(tmp_path: Path) -> None:
    failed = outcome("A", 1, "figure: 4 | 5\n1 failed in 1.0s", 1.0)
    found = {"A": replace(failed, day="2026-11-23", loads="0.5 – 0.7")}
    save(tmp_path / "outcomes.json", found)
    assert load(tmp_path / "outcomes.json") == found
    shown = page(LINES, found, {"C": "why"})
    assert "| [A](#a) | what | **FAILS** |" in shown
    assert "| [B](#b) | what | **not tried** |" in shown
    assert "- Result: **FAILS**, 2026-11-23, load 0.5 – 0.7\n  - 4 | 5\n  - 1 failed\n" in shown
    assert "- Result: **not tried**\n\n```\nN=5 python -m pytest -s tests\n```" in shown
    written = tmp_path / "trust.md"
    written.write_text(shown)
    assert page(LINES, read_page(written), {"C": "why"}) == shown
    assert "0 of 2 lines hold" in shown and "- **C**: why" in shown


SLOW = """
import pathlib, signal, subprocess, sys, time

def test_a():
    signal.signal(signal.SIGINT, signal.SIG_IGN if {ignores} else signal.default_int_handler)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"],
                             start_new_session=True)
    pathlib.Path({note!r}).write_text(str(child.pid))
    try:
        time.sleep(99)
    finally:
        child.kill()
        child.wait()
"""


@pytest.mark.parametrize("ignores", [False, True])
def test_a_line_past_its_limit_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: bool
) -> None:
    monkeypatch.setattr("tests.trust.__main__.KEPT", tmp_path)
    monkeypatch.setattr("tests.trust.__main__.PATIENCE_S", 2.0 if ignores else 30.0)
    note = tmp_path / "pid"
    test = tmp_path / "test_slow.py"
    test.write_text(SLOW.format(ignores=ignores, note=str(note)))
    run = Run(Line("A", "what", "target", str(test)))
    while not note.exists() or not note.read_text():
        time.sleep(0.05)
    run.stop()
    assert not psutil.pid_exists(int(note.read_text()))


def test_a_variable_that_is_set_already_stays() -> None:
    assert LINES[1].with_variables({}).command == "N=5 python -m pytest -s tests"
    assert LINES[1].with_variables({"N": "9", "M": "1"}).variables == "N=9"


def test_a_line_that_was_made_shorter_says_so() -> None:
    full = outcome("B", 0, "3 passed in 1.0s", 1.0)
    short = replace(full, command=LINES[1].with_variables({"N": "2"}).command)
    assert "**holds** |" in page(LINES, {"B": full}, {})
    shown = page(LINES, {"B": short}, {})
    assert "**holds** at another length |" in shown and "1 of 2 lines hold (1 of them" in shown


def test_a_slope_is_per_hour_with_its_error() -> None:
    line = slope([0.0, 1800.0, 3600.0, 5400.0], [10.0, 11.0, 12.0, 13.0])
    assert line.per_hour == pytest.approx(2.0) and line.error == pytest.approx(0.0)
    assert slope([0.0, 3600.0, 7200.0], [1.0, 3.0, 1.0]).error > 1.0
