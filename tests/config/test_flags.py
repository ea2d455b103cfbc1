import dataclasses
import re
from pathlib import Path

import pytest

import banyan
from banyan.base.errors import ConfigError
from banyan.config.cli import default_of, help_text, parse
from banyan.config.env import Environment
from banyan.config.flags.flag import FLOAT, FLOATS, INT, INTS, JSON, SWITCH, WORDS, Absent, Flag
from banyan.config.flags.table import GROUPS, REPLACED, find, known_flags
from banyan.config.schema import Config
from tests.support.cases import check_each

PACKAGE = Path(banyan.__file__).parent
ALL = [flag for _, flags in GROUPS for flag in flags]
ABSENT = [flag for flag in known_flags() if isinstance(flag, Absent)]


def another_value(flag: Flag) -> object:
    """A legal value that is not the default."""
    default = default_of(flag)
    if flag.choices:
        return next(choice for choice in flag.choices if choice != default)
    if flag.kind == INT:
        return next(n for n in (1, 2, 2048, 1 << 21) if n != default and flag.low <= n <= flag.high)
    if flag.kind == WORDS and not re.fullmatch(flag.pattern, "a:b"):
        return ("{}",) if re.fullmatch(flag.pattern, "{}") else ("custom", "7")
    lists = {WORDS: ("a:b", "c:d"), INTS: (1, 2), FLOATS: (0.5, 2.0)}
    return {FLOAT: 0.5, JSON: {"a": "b"}, **lists}.get(flag.kind, "text")


def test_a_flag_owns_a_field_and_its_default_is_legal() -> None:
    def check(flag: Flag) -> None:
        default = default_of(flag)
        assert flag.help and not flag.help.endswith(".")
        if flag.kind == SWITCH and isinstance(flag.sets, bool):
            assert default is not flag.sets
        elif flag.kind in (INT, FLOAT):
            unset = not default
            assert unset or flag.check(default, flag.name) == default
        elif flag.choices:
            assert default in flag.choices or (not default and "default:" in flag.help)

    check_each(ALL, check, lambda flag: flag.name)


def test_both_values_of_a_flag_reach_its_field() -> None:
    def check(flag: Flag) -> None:
        part, _, name = flag.field.partition(".")

        def value_of(config: Config) -> object:
            return getattr(getattr(config, part), name)

        if flag.kind == SWITCH:
            given, expected = [f"--{flag.name}"], flag.sets
        else:
            expected = another_value(flag)
            texts = [str(expected)]
            if flag.kind == JSON:
                texts = ['{"a": "b"}']
            elif isinstance(expected, tuple):
                texts = [str(word) for word in expected]
            given = [f"--{flag.name}", *texts]
        if flag.name in ("base-gpu-id", "gpu-id-step"):
            given += ["--device", "cuda"]
        assert value_of(parse(given, Environment())) == expected
        assert value_of(parse([], Environment())) == default_of(flag) != expected

    check_each(ALL, check, lambda flag: flag.name)


def test_no_field_is_owned_by_two_flags() -> None:
    """A switch may stand for one value of a number that another flag owns."""
    owned = [flag.field for flag in ALL if isinstance(flag.sets, bool)]
    assert len(owned) == len(set(owned))


def test_every_owned_field_exists_in_the_schema() -> None:
    parts = {part.name: part.default_factory for part in dataclasses.fields(Config)}
    for flag in ALL:
        part, _, name = flag.field.partition(".")
        assert name in {f.name for f in dataclasses.fields(parts[part])}, flag.name  # type: ignore[arg-type]


def test_no_flag_is_both_working_and_absent() -> None:
    names = [name for flag in known_flags() for name in flag.names]
    assert sorted(names) == sorted(set(names))


def test_an_absent_flag_says_why_and_what_to_use() -> None:
    def check(flag: Absent) -> None:
        assert flag.why and flag.use
        assert not flag.why.endswith(".") and not flag.use.endswith(".")
        assert all(
            flag.asks_for_nothing(flag.from_words([word], flag.name)) for word in flag.neutral
        )

    check_each(ABSENT, check, lambda flag: flag.name)


def test_a_replaced_switch_has_a_successor_that_takes_its_value() -> None:
    for flag in REPLACED:
        successor = find(flag.successor, abbreviate=False)
        assert successor.check(flag.value, flag.name) == flag.value


def test_help_shows_every_flag_that_has_an_effect() -> None:
    text = help_text()
    assert [flag.name for flag in ALL if f"--{flag.name}" not in text] == []


def test_every_owned_field_is_read_where_work_is_done() -> None:
    tables = (PACKAGE / "config" / "flags", PACKAGE / "config" / "schema.py")
    rooms = [p for p in PACKAGE.rglob("*.py") if not any(p.is_relative_to(t) for t in tables)]
    pairs = re.compile(r"(?=\b(\w+\.\w+)\b)")
    read = {pair for path in rooms for pair in pairs.findall(path.read_text())}
    idle = {flag.field for flag in ALL} - read
    assert not idle, f"flags without an effect: {idle}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("port", "1e3"),
        ("page-size", "0"),
        ("mem-fraction-static", "nan"),
        ("mem-fraction-static", "1.5"),
        ("schedule-policy", "best"),
        ("preferred-sampling-params", "[1]"),
        ("preferred-sampling-params", "{"),
        ("preferred-sampling-params", '{"top_k": 1, "top_k": 2}'),
        ("drain-timeout", "inf"),
        ("drain-timeout", "1e10"),
        ("max-total-tokens", "9" * 20),
        ("max-queued-requests", "9" * 400),
        ("stream-interval", "9" * 4000),
        ("lora-memory-gib", "1e300"),
    ],
)
def test_an_illegal_value_is_refused_with_the_flag_and_the_value(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name} must be"):
        parse([f"--{name}", text], Environment())
