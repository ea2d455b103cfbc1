"""What a value read from JSON is. `isinstance(value, dict)` tells a type checker nothing about what
lies inside; JSON's objects have texts as keys, and its values may be anything until asked."""

import json
from typing import TypeGuard


def is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Of a value that came from JSON: what else a dict may have as keys is not looked at."""
    return isinstance(value, dict)


def unique_json(text: str) -> object:
    """A JSON text, in which no object says one thing twice.

    Raises:
        ValueError, RecursionError: it is none.
    """
    return json.loads(text, object_pairs_hook=unique_keys)


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of `json.loads`, whose readers do not agree on which value of a key counts.

    Raises:
        ValueError: a key appears twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} appears twice in one object")
    return found
