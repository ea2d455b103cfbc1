"""Markers that separate message content from template text in a rendered chat.

A marker is a Unicode noncharacter that occurs nowhere in the request. It is put into the text of
every control token in the request's strings, survives the template, and is removed from the result.
Its positions are the characters that no control token may include.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from banyan.base.errors import RequestError
from banyan.tokenizer.tokenizer import any_of

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True)
class RenderedChat:
    """A prompt's text. The character before each position in `guards` (ascending) is content;
    no control token may include it."""

    text: str
    guards: tuple[int, ...] = ()


class ControlTexts:
    """Finds and marks control tokens in the strings that a request brings."""

    def __init__(self, texts: Collection[str]) -> None:
        self._pattern = any_of(texts)
        self._beginnings = frozenset(text[:i] for text in texts for i in range(1, len(text)))
        self._reach = max(map(len, texts), default=0)

    def occurs_in(self, text: str) -> bool:
        """Whether `text` has a control token, or ends with the beginning of one."""
        return self._ends_inside(text) or self._pattern.search(text) is not None

    def mark(self, text: str, mark: str) -> str:
        """Put `mark` after the first character of each control token, and after a beginning of
        one at the end, which the template's following text could complete."""
        parts: list[str] = []
        at = 0
        while (match := self._pattern.search(text, at)) is not None:
            parts += [text[at : match.start() + 1], mark]
            at = match.start() + 1
        return "".join(parts) + text[at:] + (mark if self._ends_inside(text) else "")

    def _ends_inside(self, text: str) -> bool:
        return any(text[-i:] in self._beginnings for i in range(1, min(self._reach, len(text) + 1)))


def strings_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_of(key)
            yield from strings_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_of(item)


def mapped(value: object, change: Callable[[str], str]) -> object:
    """A copy of `value` with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {mapped(key, change): mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return value


def unused(inputs: object, nth: int) -> str:
    """The nth noncharacter that occurs nowhere in the inputs."""
    taken: set[str] = set()
    for text in strings_of(inputs):
        taken.update(c for c in _NONCHARACTERS if c in text or _escaped(c) in text)
    free = [c for c in _NONCHARACTERS if c not in taken]
    if nth >= len(free):
        raise RequestError("the messages use every Unicode noncharacter", param="messages")
    return free[nth]


def unmarked(text: str, mark: str) -> RenderedChat:
    """Remove the markers, also the ones that the template wrote as JSON escapes."""
    pieces = text.replace(_escaped(mark), mark).split(mark)
    guards: list[int] = []
    length = 0
    for piece in pieces[:-1]:
        length += len(piece)
        guards.append(length)
    return RenderedChat("".join(pieces), tuple(guards))


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"
