"""Every server argument of the documents, by each name, from the command line and from a file."""

import csv
import json
import re
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import default_of, parse, value_of
from banyan.config.env import Environment, read_environment
from banyan.config.flags.flag import (
    FLOAT,
    FLOATS,
    INT,
    INTS,
    JSON,
    SWITCH,
    WORDS,
    Absent,
    Flag,
    Replaced,
)
from banyan.config.flags.outcome import MISSING, REFUSED, WORKS, outcome_of
from banyan.config.flags.table import CONFIG_FILE, Known, find, known_flags, spellings
from tests.support.cases import check_each

SPEC = Path(__file__).resolve().parents[3] / "shared" / "spec"
DOCUMENTED, LATER = "server_args.tsv", "server_args_later.tsv"
Row = dict[str, str]


def rows_of(table: str) -> list[Row]:
    path = SPEC / table
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def names_of(row: Row) -> list[str]:
    words = [row["flag"], *row["aliases"].split()]
    return [word.removeprefix("--") for word in words if word.startswith("--")]


ROWS = [row for table in (DOCUMENTED, LATER) for row in rows_of(table) if row["flag"] != "--config"]
needs_lists = pytest.mark.skipif(
    not ROWS, reason="the lists of known flags are not on this machine"
)
NAMES = sorted({name for row in ROWS for name in names_of(row)})


def sample(flag: Known) -> object:
    """A legal value that asks for something, as YAML would give it."""
    default = default_of(flag) if isinstance(flag, Flag) else None
    if flag.kind == SWITCH:
        return True
    neutral = flag.neutral if isinstance(flag, Absent) else ()
    taken = (default, *(flag.from_words([word], flag.name) for word in neutral))
    if flag.choices:
        return next(
            c for c in (*flag.choices, flag.choices[0]) if c not in taken or flag.choices == (c,)
        )
    if flag.kind in (INT, FLOAT):
        kind = int if flag.kind == INT else float
        numbers = (kind(n) for n in (2, 3, 1, 4096)) if kind is int else (0.5, 2.5)
        return next(n for n in numbers if n not in taken and flag.low <= n <= flag.high)
    if flag.pattern and not re.fullmatch(flag.pattern, "a:b"):
        return ["{}"] if re.fullmatch(flag.pattern, "{}") else ["custom", "7"]
    several = {INTS: [1, 2], FLOATS: [0.5, 2.0], WORDS: ["a:b", "c:d" if flag.pattern else "1"]}
    return {JSON: {"a": 1}, **several}.get(flag.kind, "text")


def as_words(value: object) -> list[str]:
    if isinstance(value, dict):
        return [json.dumps(value)]
    if isinstance(value, list):
        return [str(item) for item in value]
    return [] if value is True else [str(value)]


def check_outcome(argv: list[str], flag: Known, value: object) -> None:
    """A start on a CPU does with the flag what its outcome says, and says why."""
    if isinstance(flag, Replaced):
        flag, value = find(flag.successor, abbreviate=False), flag.value
    expected = outcome_of(flag, flag.check(value, flag.name), "cpu")
    try:
        config = parse([*argv, "--device", "cpu"], Environment())
    except ConfigError as error:
        assert expected.verdict == REFUSED
        assert f"not available in this build: {expected.why} ({expected.use})" in str(error)
        return
    assert expected.verdict != REFUSED
    if isinstance(flag, Flag):
        assert value_of(config, flag) != default_of(flag)
    notes = [note for note in config.observe.notes if expected.why in note]
    assert notes or expected.verdict == WORKS
    is_missing = any("its feature is missing" in note for note in notes)
    assert is_missing == (expected.verdict == MISSING)


def is_picky(name: str) -> bool:
    """Does the flag take some texts only?"""
    flag = find(name, abbreviate=False)
    return flag.kind in (SWITCH, INT, FLOAT, JSON) or bool(flag.choices)


@needs_lists
def test_the_lists_of_known_flags_are_whole_and_ours_holds_no_other() -> None:
    documented = {row["flag"].removeprefix("--") for row in rows_of(DOCUMENTED)}
    assert len(documented) == 319
    ours = {flag.name for flag in known_flags() if flag.documented}
    former = {name for flag in known_flags() for name in flag.old}
    assert documented <= {*spellings(), CONFIG_FILE}
    assert {*ours, *former, CONFIG_FILE} == documented
    known = {name for flag in known_flags() if not isinstance(flag, Flag) for name in flag.names}
    assert known <= set(NAMES)


@needs_lists
def test_a_known_flag_works_or_is_noted_or_is_refused(tmp_path: Path) -> None:
    def check(name: str) -> None:
        flag = find(name, abbreviate=False)
        value = sample(flag)
        check_outcome([f"--{name}", *as_words(value)], flag, value)
        check_outcome([f"--{name.replace('-', '_')}", *as_words(value)], flag, value)
        file = tmp_path / "flags.yaml"
        for key in (name, name.replace("-", "_")):
            file.write_text(json.dumps({key: value}))
            check_outcome(["--config", str(file)], flag, value)

    check_each(NAMES, check, str)


def documented_values() -> list[tuple[str, str]]:
    """(flag that works, value that the documents give it)."""
    found = []
    for row in rows_of(DOCUMENTED):
        name = row["flag"].removeprefix("--")
        known = spellings().get(name)
        if isinstance(known, Flag) and known.choices:
            cells = (row[k] for k in ("choices", "sglang_0523_choices", "sglang_2025_12_choices"))
            words = {w for cell in cells for w in re.findall(r"[\w-]+", cell.replace("001:", ","))}
            found += [(name, word) for word in sorted(words)]
    return found


@needs_lists
def test_a_documented_value_works_or_is_refused_with_a_reason() -> None:
    def check(case: tuple) -> None:
        name, value = case
        try:
            parse([f"--{name}", value], Environment())
        except ConfigError as error:
            what = f"--{name} {value} is not available in this build"
            assert re.search(rf"^{re.escape(what)}: .* \(.+\)$", str(error))

    check_each(documented_values(), check)


@needs_lists
def test_a_known_flag_of_the_wrong_type_is_refused_by_name() -> None:
    def check(name: str) -> None:
        with pytest.raises(ConfigError, match=f"--{name} must be"):
            parse([f"--{name}=nonsense"], Environment())

    check_each(list(filter(is_picky, NAMES)), check, str)


def test_the_variable_of_an_absent_flag_is_met_like_the_flag() -> None:
    with pytest.raises(ConfigError, match="BANYAN_ENCODER_ONLY is not available"):
        parse([], read_environment({"BANYAN_ENCODER_ONLY": "1"}))
    config = parse([], read_environment({"BANYAN_KT_CPUINFER": "2"}))
    assert "BANYAN_KT_CPUINFER is accepted" in config.observe.notes[0]
