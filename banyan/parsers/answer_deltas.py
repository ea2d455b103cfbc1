"""Output of the parsers: deltas of text, reasoning and tool calls. Deltas of a kind concatenate.

These are msgspec structs because one is created per token; a frozen dataclass takes several times
as long.
"""

from itertools import groupby

import msgspec


class TextDelta(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """Reasoning text."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A tool call starts. `id` is the model's own id of the call; "" = its format has none."""

    index: int
    name: str
    id: str = ""


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More JSON text of a call's arguments."""

    index: int
    text: str


AnswerDelta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


def merge_deltas(deltas: list[AnswerDelta]) -> list[AnswerDelta]:
    """The same deltas, with neighbours of one kind merged."""
    found: list[AnswerDelta] = []
    for _, group in groupby(deltas, key=_merge_key):
        run = list(group)
        if len(run) == 1 or isinstance(run[0], ToolCallStart):
            found += run
        else:
            text = "".join(delta.text for delta in run if not isinstance(delta, ToolCallStart))
            found.append(msgspec.structs.replace(run[0], text=text))
    return found


def _merge_key(delta: AnswerDelta) -> tuple[type[AnswerDelta], int]:
    """Neighbours with the same key are merged."""
    return type(delta), delta.index if isinstance(delta, ToolCallArguments) else 0
