"""Incremental reading of streamed text: a reading is a generator that yields to get more text.

Decisions depend only on the text, never on how it was split. Feeding everything at once and feeding
one character at a time therefore give the same result.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*")
_ANYTHING = re.compile(r"(?s:.*)")


class Malformed(Exception):
    """The text does not follow the format. `StreamingText.release` returns the captured text."""


class Truncated(Malformed):
    """The text ended before the format was complete."""


class Delimiters:
    """A set of literal texts to search for."""

    def __init__(self, *texts: str) -> None:
        longest_first = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.max_length = len(longest_first[0])
        self._prefixes = frozenset(t[:i] for t in texts for i in range(1, len(t)))

    def is_prefix(self, text: str) -> bool:
        """Whether `text` is the beginning of one of the texts."""
        return text in self._prefixes

    def partial_at(self, text: str, at: int) -> int:
        """Position, from `at` on, of a partial delimiter at the end of `text`; else len(text)."""
        for i in range(max(at, len(text) - self.max_length + 1), len(text)):
            if text[i:] in self._prefixes:
                return i
        return len(text)


class StreamingText:
    """Text that arrives in pieces and is consumed from the front."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self.is_cut = False
        self._captured: list[str] | None = None

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, is_cut: bool = False) -> None:
        """Mark the end of the text; `is_cut` = the model was stopped early."""
        self._ended = True
        self.is_cut = is_cut

    def capture(self, opener: str) -> None:
        """Start to keep the consumed text; `opener` was consumed just before and comes first."""
        self._captured = [opener]

    def release(self) -> str:
        """Return the captured text, and stop capturing."""
        captured, self._captured = self._captured or [], None
        return "".join(captured)

    def take(self, count: int) -> str:
        """Consume up to `count` characters that have arrived."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._captured is not None:
            self._captured.append(taken)
        return taken

    def peek(self, count: int = 1) -> Reading[str]:
        """The next `count` characters without consuming them; fewer only at the end."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        return self._text[self._at : self._at + count]

    def need(self, count: int = 1) -> Reading[str]:
        """As `peek`, but raises Truncated if the text ends first."""
        found = yield from self.peek(count)
        if len(found) < count:
            raise Truncated
        return found

    def follows(self, literal: str) -> Reading[bool]:
        """Consume `literal` if it comes next. Returns whether it did."""
        while True:
            ahead = self._text[self._at : self._at + len(literal)]
            if ahead == literal:
                self.take(len(literal))
                return True
            if not literal.startswith(ahead) or self._ended:
                return False
            yield

    def expect(self, literal: str) -> Reading[None]:
        """Consume `literal`, or raise Malformed; Truncated if the text ends within it."""
        if not (yield from self.follows(literal)):
            ahead = yield from self.peek(len(literal))
            raise Truncated if literal.startswith(ahead) else Malformed

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Reading[None]:
        """Consume the longest run that `pattern` (one character class, repeated) matches."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match.end() > self._at:
                sink(self.take(match.end() - self._at))
            if self._at < len(self._text) or self._ended:
                return
            yield

    def spaces(self) -> Reading[str]:
        """Consume and return white space."""
        found: list[str] = []
        yield from self.run(_SPACE, found.append)
        return "".join(found)

    def rest(self, sink: Sink) -> Reading[None]:
        """Consume everything up to the end of the text."""
        yield from self.run(_ANYTHING, sink)

    def until(
        self,
        delimiters: Delimiters,
        sink: Sink,
        keeps_partial: bool = False,
        keeps_delimiter: bool = False,
    ) -> Reading[str]:
        """Consume up to and with the first delimiter, and return it; "" at the end of the text.

        Args:
            keeps_partial: a partial delimiter at the end of the text is not consumed.
            keeps_delimiter: the delimiter is not consumed.
        """
        while True:
            start, delimiter = self._find(delimiters, keeps_partial)
            if start > self._at:
                sink(self.take(start - self._at))
            if delimiter or self._ended:
                return delimiter if keeps_delimiter else self.take(len(delimiter))
            yield

    def collect(
        self, delimiters: Delimiters, limit: int, keeps_delimiter: bool = False
    ) -> Reading[tuple[str, str]]:
        """Consume up to and with the first delimiter; returns (text, delimiter).

        Args:
            keeps_delimiter: the delimiter is not consumed.

        Raises:
            Malformed: the delimiter is more than `limit` characters away; nothing is consumed.
            Truncated: the text ends first.
        """
        while True:
            start, delimiter = self._find(delimiters, limit=limit)
            if start - self._at > limit:
                raise Malformed
            if delimiter:
                text = self.take(start - self._at)
                return text, delimiter if keeps_delimiter else self.take(len(delimiter))
            if self._ended:
                raise Truncated
            yield

    def _find(
        self, delimiters: Delimiters, keeps_partial: bool = False, limit: int | None = None
    ) -> tuple[int, str]:
        """Position and text of the first delimiter; else position of a possible start, and "".

        Args:
            limit: search only this many characters ahead. Without it, many openers without a
                closer would cost quadratic time: each would search the rest of the text.
        """
        end = len(self._text) if limit is None else self._at + limit + delimiters.max_length
        match = delimiters.pattern.search(self._text, self._at, end)
        is_all = self._ended and not keeps_partial
        partial_at = len(self._text) if is_all else delimiters.partial_at(self._text, self._at)
        if match is not None and match.start() < partial_at:
            return match.start(), match.group()
        return partial_at, ""


def after_space(
    source: StreamingText, texts: Delimiters, limit: int, offset: int = 0
) -> Reading[tuple[int, str]]:
    """Look for one of `texts` after white space, and consume nothing.

    Args:
        limit: characters that are looked at.
        offset: characters before the white space.

    Returns:
        Position after the white space, and the one of `texts` that is there, or "". If the text
        ends within one of them, its end is the position.
    """
    size = offset
    while True:
        size += 1
        window = yield from source.peek(size)
        shown = window[offset:].lstrip()
        if match := texts.pattern.match(shown):
            return len(window) - len(shown), match.group()
        is_partial = size - offset < limit and (not shown or texts.is_prefix(shown))
        if not is_partial or len(window) < size:
            return len(window) - (0 if is_partial else len(shown)), ""


def text_before(source: StreamingText, end: str, limit: int, offset: int) -> Reading[str | None]:
    """The text from `offset` to `end` on the same line, consuming nothing; None without it.

    Raises:
        Truncated: the text ends first.
    """
    size = offset
    while True:
        size += 1
        window = yield from source.peek(size)
        text = window[offset:]
        if text.endswith(end):
            return text.removesuffix(end)
        if "\n" in text or len(text) >= limit:
            return None
        if len(window) < size:
            raise Truncated
