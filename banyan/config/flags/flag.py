"""Flag: one line of a flag table, and how the text of a value becomes the value.

The default of a flag is the default of the schema field it owns, so that it is written down once.
"""

import json
import math
from dataclasses import dataclass

from banyan.base.errors import ConfigError
from banyan.base.log import printable

SWITCH = "switch"
TEXT = "text"
INT = "int"
FLOAT = "float"
JSON = "json"

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_METAVAR = {TEXT: "TEXT", INT: "N", FLOAT: "X", JSON: "JSON"}


@dataclass(frozen=True)
class Flag:
    """A flag that has an effect.

    Attributes:
        name: long name without dashes.
        field: schema field it owns, "part.field".
        aliases: other spellings in common use.
        old: former names; accepted, and reported with the name they have here.
        choices: every legal text; () for any.
        translate: spellings of values that others use -> ours.
        low, high: bounds of a number, both included.
        sets: what a switch stores when it is given.
        documented: one of the founding documents' flags; only these may be abbreviated.
    """

    name: str
    field: str
    help: str
    kind: str = TEXT
    aliases: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    translate: tuple[tuple[str, str], ...] = ()
    low: float = -math.inf
    high: float = math.inf
    sets: bool | int = True
    documented: bool = True

    @property
    def metavar(self) -> str:
        if self.kind == SWITCH:
            return ""
        return "|".join(self.choices) if self.choices else _METAVAR[self.kind]

    def from_text(self, text: str, spelled: str) -> object:
        """The value that `text` stands for; ConfigError names `spelled` when it is not legal."""
        if self.kind == SWITCH:
            return self.check(_switch(text, spelled), spelled)
        if self.kind == INT:
            return self.check(_number(text, int, "a whole number", spelled), spelled)
        if self.kind == FLOAT:
            return self.check(_number(text, float, "a number", spelled), spelled)
        if self.kind == JSON:
            return self.check(_json_object(text, spelled), spelled)
        return self.check(text, spelled)

    def check(self, value: object, spelled: str) -> object:
        """`value` (already of some type, as YAML gives it) if it is legal for this flag."""
        if self.kind == SWITCH:
            if not isinstance(value, bool):
                raise _illegal(spelled, value, "true or false")
            return value
        if self.kind in (INT, FLOAT):
            return self._check_number(value, spelled)
        if self.kind == JSON:
            if isinstance(value, str):
                value = _json_object(value, spelled)
            if not isinstance(value, dict):
                raise _illegal(spelled, value, "a JSON object")
            return value
        return self._check_text(value, spelled)

    def _check_number(self, value: object, spelled: str) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _illegal(spelled, value, "a number")
        if self.kind == INT and not isinstance(value, int):
            raise _illegal(spelled, value, "a whole number")
        if not self.low <= value <= self.high or not math.isfinite(value):
            raise _illegal(spelled, value, _bounds(self.low, self.high))
        return value if self.kind == INT else float(value)

    def _check_text(self, value: object, spelled: str) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value or "\0" in value:
            raise _illegal(spelled, value, "a text that is not empty")
        value = dict(self.translate).get(value, value)
        if self.choices and value not in self.choices:
            raise _illegal(spelled, value, f"one of: {', '.join(self.choices)}")
        return value


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


def _json_object(text: str, spelled: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _illegal(spelled, text, "a JSON object") from None
