"""What parsers make of an answer's text: said, thought, or a call of a tool. Deltas concatenate.

One is made for every token: as a frozen dataclass it would take several times as long.
"""

from itertools import groupby

import msgspec


class Said(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Thought(msgspec.Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool call begins. `id` is the model's own name for it; "" when its format has none."""

    index: int
    name: str
    id: str = ""


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Said | Thought | CallStart | CallArguments


def joined(parts: list[Part]) -> list[Part]:
    """The same parts with neighbours of one kind as one."""
    found: list[Part] = []
    for _, group in groupby(parts, key=_kind):
        run = list(group)
        if len(run) == 1 or isinstance(run[0], CallStart):
            found += run
        else:
            text = "".join(part.text for part in run if not isinstance(part, CallStart))
            found.append(msgspec.structs.replace(run[0], text=text))
    return found


def _kind(part: Part) -> tuple[type[Part], int]:
    """What parts must share to be one."""
    return type(part), part.index if isinstance(part, CallArguments) else 0
