"""Flag, Absent and Replaced: one line of a flag table, and how a text becomes a value.

The default of a flag is the default of the schema field it owns, so that it is written down once.
"""

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from banyan.base.errors import ConfigError
from banyan.base.json_types import is_list, is_object, unique_json
from banyan.base.log import printable
from banyan.base.table import plugins

SWITCH = "switch"
TEXT = "text"
INT = "int"
FLOAT = "float"
JSON = "json"
WORDS = "words"
INTS = "ints"
FLOATS = "floats"
COMMAS = "commas"
LISTS = (WORDS, INTS, FLOATS)

MOST_INT = (1 << 53) - 1
FOREVER_S = 1e9
"""Seconds that nobody waits to the end of; the system's clocks still count so many."""

IDLE = "idle"
BELONGS = "belongs"
REFUSED = "refused"

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_METAVAR = {
    **{TEXT: "TEXT", INT: "N", FLOAT: "X", JSON: "JSON"},
    **{WORDS: "WORD …", INTS: "N …", FLOATS: "X …", COMMAS: "NAME,…"},
}


@dataclass(frozen=True)
class Elsewhere:
    """Values of a flag that others have and this build has not.

    Attributes:
        values: with blanks between them.
        why: what is absent; follows a colon.
        use: what to do instead.
    """

    values: str
    why: str
    use: str


@dataclass(frozen=True)
class Form:
    """How a flag is written.

    Attributes:
        name: long name without dashes.
        aliases: other spellings in common use.
        old: former names; accepted, and reported with the name they have here.
        choices: every legal text; () for any.
        plugins: entry-point group whose names are choices too, "" for none.
        translate: spellings of values that others use -> ours.
        elsewhere: values that are known and refused with a reason.
        low, high: bounds of a number, both included.
        pattern: what every word of a list looks like; "" for anything.
        shown: how its value is called in the help; "" for the name of its kind.
        documented: one of the founding documents' flags; only these may be abbreviated.
    """

    name: str
    _: KW_ONLY
    kind: str = TEXT
    aliases: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    plugins: str = ""
    translate: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    pattern: str = ""
    shown: str = ""
    documented: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Every exact spelling."""
        return (self.name, *self.aliases, *self.old)

    @property
    def metavar(self) -> str:
        if self.kind == SWITCH:
            return ""
        if self.choices:
            return "|".join(self.choices)
        return self.shown or _METAVAR[self.kind]

    def from_words(self, words: Sequence[str], spelled: str) -> object:
        """The value that the words after the flag stand for; ConfigError names `spelled`."""
        if self.kind == SWITCH:
            return self.check(words[0] if words else True, spelled)
        if not words or not words[0]:
            raise ConfigError(f"{spelled} needs a value")
        if self.kind in LISTS:
            return self.check(list(words), spelled)
        return self.check(words[0], spelled)

    def takes(self, word: str) -> bool:
        """Whether the flag may have this word as its value, or as one of several."""
        try:
            self.from_words([word], self.name)
        except ConfigError:
            return False
        return True

    def check(self, value: object, spelled: str) -> object:
        """`value` (already of some type, as YAML gives it) if it is legal for this flag."""
        if self.kind == SWITCH:
            return _switch(value, spelled)
        if self.kind in (INT, FLOAT):
            return self._check_number(value, self.kind, spelled)
        if self.kind == JSON:
            return _json_object(value, spelled)
        if self.kind in LISTS:
            return tuple(self._check_word(word, spelled) for word in _listed(value))
        if self.kind == COMMAS:
            return ",".join(self._check_text(part, spelled) for part in _listed(value))
        return self._check_text(value, spelled)

    def installed(self) -> tuple[str, ...]:
        """Choices that installed packages add."""
        return tuple(e.name for e in plugins(self.plugins)) if self.plugins else ()

    def _check_number(self, value: object, kind: str, spelled: str) -> object:
        what = "a whole number" if kind == INT else "a number"
        if isinstance(value, str):
            value = _number(value, int if kind == INT else float, what, spelled)
        wanted = int if kind == INT else int | float
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise _illegal(spelled, value, what)
        low, high = self.low, self.high
        if kind == INT:  # which without a bound of its own still goes through JSON, and through C
            low, high = max(low, -MOST_INT), high if high < math.inf else MOST_INT
        if not low <= value <= high or (kind == FLOAT and not math.isfinite(value)):
            raise _illegal(spelled, value, _bounds(low, high))
        return value if kind == INT else float(value)

    def _check_word(self, value: object, spelled: str) -> object:
        """One word of several; a mapping or list is written back as the JSON it stands for."""
        if self.kind != WORDS:
            return self._check_number(value, INT if self.kind == INTS else FLOAT, spelled)
        text = json.dumps(value) if isinstance(value, dict | list) else value
        word = self._check_text(text, spelled)
        if self.pattern and not re.fullmatch(self.pattern, word):
            raise _illegal(spelled, word, f"of the form {self.metavar}")
        return word

    def _check_text(self, value: object, spelled: str) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value or "\0" in value:
            raise _illegal(spelled, value, "a text that is not empty")
        if self.plugins and value not in self.choices and value in self.installed():
            return value
        value = dict(self.translate).get(value, value)
        for other in self.elsewhere:
            if value in other.values.split():
                what = f"{spelled} {value} is not available in this build"
                raise ConfigError(f"{what}: {other.why} ({other.use})")
        if self.choices and value not in self.choices:
            known = (*self.choices, *self.installed())
            raise _illegal(spelled, value, f"one of: {', '.join(known)}")
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
    """A flag of others that has no effect here; `absent.py` says what the outcomes mean.

    Attributes:
        outcome: IDLE, BELONGS or REFUSED.
        why: what is absent, or why nothing is left to do.
        use: what to do instead.
        neutral: texts of values that ask for nothing, and are accepted.
    """

    _: KW_ONLY
    outcome: str
    why: str
    use: str
    neutral: tuple[str, ...] = ()

    def check(self, value: object, spelled: str) -> object:
        """As of any flag; what is off or empty in a file asks for nothing, whatever the kind."""
        return False if value is False or value == "" else super().check(value, spelled)

    def asks_for_nothing(self, value: object) -> bool:
        """Whether a checked value is off, empty or the default of those who have the flag."""
        if value is False or value in ((), {}):
            return True
        return any(value == self.from_words([text], self.name) for text in self.neutral)


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


def _illegal(spelled: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"{spelled} must be {rule}, got {printable(repr(value), 80)}")


def _bounds(low: float, high: float) -> str:
    if high == math.inf:
        return f"at least {low:g}"
    return f"in [{low:g}, {high:g}]"


def _switch(value: object, spelled: str) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in _TRUE + _FALSE:
        raise _illegal(spelled, value, "true or false")
    return value.lower() in _TRUE


def _listed(value: object) -> list[object]:
    """The items of a list: several words on a command line, or one JSON value."""
    if is_list(value) and len(value) == 1 and str(value[0]).startswith("["):
        value = value[0]
    if isinstance(value, str) and value.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    return value if is_list(value) else [value]


def _number(text: str, kind: type[int] | type[float], what: str, spelled: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise _illegal(spelled, text, what) from None


def _json_object(value: object, spelled: str) -> dict[str, object]:
    try:
        found: object = unique_json(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise _illegal(spelled, value, "a JSON object, which names each key once") from None
    if not is_object(found):
        raise _illegal(spelled, value, "a JSON object")
    return found
