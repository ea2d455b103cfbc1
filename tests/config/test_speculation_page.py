"""The table of docs/speculation.md names tests that there are, and says of each pair what is so."""

import re
from pathlib import Path

from tests.config.test_reference import is_collected

PAGE = Path(__file__).parents[2] / "docs" / "speculation.md"
_NAMED = re.compile(r"\b(\w) `(test_\w+)`")


def section() -> list[str]:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("## What is tried\n")
    return rest.partition("\n## ")[0].splitlines()


def named_in(lines: list[str]) -> dict[str, str]:
    """Letter -> the test that it stands for."""
    found: dict[str, str] = {}
    for line in lines:
        if line.startswith("* `tests/"):
            file = line.split("`")[1]
            for letter, name in _NAMED.findall(line):
                assert letter not in found, f"{letter} stands for two tests"
                found[letter] = f"{file}::{name}"
    return found


def cells() -> list[str]:
    rows = [line.strip("|").split("|")[1:] for line in section() if line.startswith("| ")]
    return [cell.strip() for row in rows[1:] for cell in row]


def test_each_letter_of_the_table_is_a_test_that_is_collected() -> None:
    named = named_in(section())
    for letter, test in named.items():
        assert is_collected(test), f"{letter}: {test} is no test that pytest collects"
    used = {letter for cell in cells() for letter in cell.split(", ") if letter not in ("-", "")}
    assert used == set(named) and len(cells()) > 50


def test_a_test_that_is_gone_would_be_noticed() -> None:
    (gone,) = named_in(
        ["* `tests/model_config/test_draft_model.py`: a `test_that_never_was`."]
    ).values()
    assert not is_collected(gone)
