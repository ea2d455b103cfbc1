"""Flag, Absent and Replaced: one line of a flag table, and how a text becomes a value.

The default of a flag is the default of the schema field it owns, so that it is written down once.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from banyan.base.errors import ConfigError
from banyan.base.log import printable

SWITCH = "switch"
TEXT = "text"
INT = "int"
FLOAT = "float"
JSON = "json"
WORDS = "words"

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_METAVAR = {TEXT: "TEXT", INT: "N", FLOAT: "X", JSON: "JSON", WORDS: "WORD …"}


@dataclass(frozen=True)
class Form:
    """How a flag is written.

    Attributes:
        name: long name without dashes.
        aliases: other spellings in common use.
        old: former names; accepted, and reported with the name they have here.
        choices: every legal text; () for any.
        translate: spellings of values that others use -> ours.
        low, high: bounds of a number, both included.
        documented: one of the founding documents' flags; only these may be abbreviated.
    """

    name: str
    _: KW_ONLY
    kind: str = TEXT
    aliases: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    translate: tuple[tuple[str, str], ...] = ()
    low: float = -math.inf
    high: float = math.inf
    documented: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Every exact spelling."""
        return (self.name, *self.aliases, *self.old)

    @property
    def metavar(self) -> str:
        if self.kind == SWITCH:
            return ""
        return "|".join(self.choices) if self.choices else _METAVAR[self.kind]

    def from_words(self, words: Sequence[str], spelled: str) -> object:
        """The value that the words after the flag stand for; ConfigError names `spelled`."""
        if self.kind == SWITCH:
            return self.check(_switch(words[0], spelled) if words else True, spelled)
        if not words or not words[0]:
            raise ConfigError(f"{spelled} needs a value")
        if self.kind == WORDS:
            return self.check(list(words), spelled)
        if self.kind == INT:
            return self.check(_number(words[0], int, "a whole number", spelled), spelled)
        if self.kind == FLOAT:
            return self.check(_number(words[0], float, "a number", spelled), spelled)
        return self.check(words[0], spelled)

    def check(self, value: object, spelled: str) -> object:
        """`value` (already of some type, as YAML gives it) if it is legal for this flag."""
        if self.kind == SWITCH:
            if not isinstance(value, bool):
                raise _illegal(spelled, value, "true or false")
            return value
        if self.kind in (INT, FLOAT):
            return self._check_number(value, spelled)
        if self.kind == JSON:
            return _json_object(value, spelled)
        if self.kind == WORDS:
            given = value if isinstance(value, list) else [value]
            return tuple(self._check_word(word, spelled) for word in given)
        return self._check_text(value, spelled)

    def _check_number(self, value: object, spelled: str) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _illegal(spelled, value, "a number")
        if self.kind == INT and not isinstance(value, int):
            raise _illegal(spelled, value, "a whole number")
        if not self.low <= value <= self.high or not math.isfinite(value):
            raise _illegal(spelled, value, _bounds(self.low, self.high))
        return value if self.kind == INT else float(value)

    def _check_word(self, value: object, spelled: str) -> str:
        """One word of several; a mapping or list is written back as the JSON it stands for."""
        text = json.dumps(value) if isinstance(value, dict | list) else value
        return self._check_text(text, spelled)

    def _check_text(self, value: object, spelled: str) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value or "\0" in value:
            raise _illegal(spelled, value, "a text that is not empty")
        value = dict(self.translate).get(value, value)
        if self.choices and value not in self.choices:
            raise _illegal(spelled, value, f"one of: {', '.join(self.choices)}")
        return value


@dataclass(frozen=True)
class Flag(Form):
    """A flag that has an effect.

    Attributes:
        field: schema field it owns, "part.field".
        sets: what a switch stores when it is given.
        proof: the test that fails without the flag's effect, "tests/room/test_x.py::test_y".
    """

    field: str
    help: str
    _: KW_ONLY
    sets: bool | int = True
    proof: str = ""


@dataclass(frozen=True)
class Absent(Form):
    """A flag of others that has no effect here.

    Attributes:
        neutral: values that ask for nothing, and are accepted.
        why: what is absent, or why nothing is left to do.
        use: what to do instead.
        is_refused: any other value is refused; else every value is accepted with a line.
    """

    _: KW_ONLY
    neutral: tuple[object, ...] = ()
    why: str = ""
    use: str = ""
    is_refused: bool = False

    def asks_for_nothing(self, value: object) -> bool:
        return value in self.neutral or value is False


@dataclass(frozen=True)
class Replaced(Form):
    """A former switch that a value of another flag stands for.

    Attributes:
        successor: name of that flag.
        value: what the switch said.
    """

    _: KW_ONLY
    successor: str
    value: str


@dataclass(frozen=True)
class Feature:
    """Something others have and this build has not, with the flags that belong to it.

    Attributes:
        why: what is absent, or why nothing is left to do; follows a colon.
        use: what to do instead; "" when leaving the flag out is all.
        asks: flags that ask for it; refused, unless their value asks for nothing.
        tunes: flags that only tune it: they have no object, and are accepted with a line.
    """

    why: str
    use: str = ""
    asks: tuple[Absent, ...] = ()
    tunes: tuple[Absent, ...] = ()

    def flags(self, *, documented: bool) -> Iterator[Absent]:
        use = self.use or "leave it out"
        for flags, is_refused in ((self.asks, True), (self.tunes, False)):
            for flag in flags:
                yield replace(
                    flag, why=self.why, use=use, is_refused=is_refused, documented=documented
                )


def switches(*names: str) -> tuple[Absent, ...]:
    return tuple(Absent(name, kind=SWITCH) for name in names)


def texts(*names: str) -> tuple[Absent, ...]:
    return tuple(Absent(name) for name in names)


def ints(*names: str) -> tuple[Absent, ...]:
    return tuple(Absent(name, kind=INT) for name in names)


def floats(*names: str) -> tuple[Absent, ...]:
    return tuple(Absent(name, kind=FLOAT) for name in names)


def jsons(*names: str) -> tuple[Absent, ...]:
    return tuple(Absent(name, kind=JSON) for name in names)


def words(*names: str) -> tuple[Absent, ...]:
    return tuple(Absent(name, kind=WORDS) for name in names)


def _illegal(spelled: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"{spelled} must be {rule}, got {printable(repr(value), 80)}")


def _bounds(low: float, high: float) -> str:
    if high == math.inf:
        return f"at least {low:g}"
    return f"in [{low:g}, {high:g}]"


def _switch(text: str, spelled: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise _illegal(spelled, text, "true or false")
    return text.lower() in _TRUE


def _number(text: str, kind: type[int] | type[float], what: str, spelled: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise _illegal(spelled, text, what) from None


def _json_object(value: object, spelled: str) -> dict[str, object]:
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise _illegal(spelled, value, "a JSON object") from None
    if not isinstance(found, dict):
        raise _illegal(spelled, value, "a JSON object")
    return found
