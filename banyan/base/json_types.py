"""Type guards for values from JSON, and a parser that refuses duplicate keys.

`isinstance(value, dict)` leaves the types of keys and values unknown to a type checker. In JSON,
keys are strings and values may be anything.
"""

import json
from typing import TypeGuard


def is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Only for values from JSON: the types of the keys are not checked."""
    return isinstance(value, dict)


def whole_number(value: object) -> object:
    """A whole number that a client wrote as a float, as an integer; any other value unchanged."""
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def unique_json(text: str) -> object:
    """Parse JSON text without duplicate keys.

    Raises:
        ValueError, RecursionError: the text is not valid JSON, or a key appears twice.
    """
    return json.loads(text, object_pairs_hook=unique_keys)


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """`object_pairs_hook` of `json.loads` that refuses duplicate keys.

    Parsers disagree on which value of such a key counts.

    Raises:
        ValueError: a key appears twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} appears twice in one object")
    return found
