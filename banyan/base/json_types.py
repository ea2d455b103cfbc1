"""What a value read from JSON is. `isinstance(value, dict)` tells a type checker nothing about what
lies inside; JSON's objects have texts as keys, and its values may be anything until asked."""

from typing import TypeGuard


def is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Of a value that came from JSON: what else a dict may have as keys is not looked at."""
    return isinstance(value, dict)
