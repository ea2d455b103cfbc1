"""What parsers make of an answer's text: said, thought, or a call of a tool. Deltas concatenate."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `id` is the model's own name for it; "" when its format has none."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Said | Thought | CallStart | CallArguments


def joined(parts: list[Part]) -> list[Part]:
    """The same parts with neighbours of one kind as one."""
    found: list[Part] = []
    for part in parts:
        match (found[-1] if found else None, part):
            case (Said(a), Said(b)):
                found[-1] = Said(a + b)
            case (Thought(a), Thought(b)):
                found[-1] = Thought(a + b)
            case (CallArguments(i, a), CallArguments(j, b)) if i == j:
                found[-1] = CallArguments(i, a + b)
            case _:
                found.append(part)
    return found
