"""Reading text while it arrives. A reading is a generator that pauses where more text is needed.

Every decision is made on positions of the text, never on how it was split, so that feeding all at
once and feeding one character at a time give the same result. Knows no format.
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
    """The text is not what a format says. Everything consumed so far is at `Arriving.captured`."""


class Cut(Malformed):
    """The text ended where the format needs more."""


class Marks:
    """A set of literal texts to look for."""

    def __init__(self, *texts: str) -> None:
        longest_first = sorted(texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.reach = len(longest_first[0])
        self._beginnings = frozenset(t[:i] for t in texts for i in range(1, len(t)))

    def open_at(self, text: str, at: int) -> int:
        """Where `text` ends with the beginning of a mark, at or after `at`; else len(text)."""
        for i in range(max(at, len(text) - self.reach + 1), len(text)):
            if text[i:] in self._beginnings:
                return i
        return len(text)


class Arriving:
    """Text that comes in pieces, consumed from the front."""

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
        """Nothing more will come; `is_cut` = more would have, had it not been stopped."""
        self._ended = True
        self.is_cut = is_cut

    def capture(self, opener: str) -> None:
        """Keep what is consumed from here on, behind `opener`, which was consumed just before."""
        self._captured = [opener]

    def release(self) -> str:
        """What was captured; capturing ends."""
        captured, self._captured = self._captured or [], None
        return "".join(captured)

    def take(self, count: int) -> str:
        """Consume characters that are known to be there."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        if self._captured is not None:
            self._captured.append(taken)
        return taken

    def peek(self, count: int = 1) -> Reading[str]:
        """The next `count` characters, fewer only at the end; nothing is consumed."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        return self._text[self._at : self._at + count]

    def need(self, count: int = 1) -> Reading[str]:
        """As `peek`; raises Cut when the text ends first."""
        found = yield from self.peek(count)
        if len(found) < count:
            raise Cut
        return found

    def follows(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next; it is consumed if so."""
        while True:
            ahead = self._text[self._at : self._at + len(literal)]
            if ahead == literal:
                self.take(len(literal))
                return True
            if not literal.startswith(ahead) or self._ended:
                return False
            yield

    def expect(self, literal: str) -> Reading[None]:
        """Consume `literal`; Malformed when something else comes, Cut when less than all of it."""
        if not (yield from self.follows(literal)):
            ahead = yield from self.peek(len(literal))
            raise Cut if literal.startswith(ahead) else Malformed

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
        """Consume white space, and return it."""
        found: list[str] = []
        yield from self.run(_SPACE, found.append)
        return "".join(found)

    def rest(self, sink: Sink) -> Reading[None]:
        """Consume everything up to the end of the text."""
        yield from self.run(_ANYTHING, sink)

    def until(self, marks: Marks, sink: Sink, leaves_part: bool = False) -> Reading[str]:
        """Consume up to and with the first mark, which is returned; "" at the end of the text.

        Args:
            leaves_part: the beginning of a mark at the end of the text is not consumed.
        """
        while True:
            start, mark = self._find(marks, leaves_part)
            if start > self._at:
                sink(self.take(start - self._at))
            if mark or self._ended:
                return self.take(len(mark))
            yield

    def collect(
        self, marks: Marks, limit: int, keeps_mark: bool = False
    ) -> Reading[tuple[str, str]]:
        """(text, mark) up to and with the first mark.

        Args:
            keeps_mark: the mark is not consumed.

        Raises:
            Malformed: it is more than `limit` characters away; nothing was consumed.
        """
        while True:
            start, mark = self._find(marks, limit=limit)
            if start - self._at > limit:
                raise Malformed
            if mark:
                text = self.take(start - self._at)
                return text, mark if keeps_mark else self.take(len(mark))
            if self._ended:
                raise Cut
            yield

    def _find(
        self, marks: Marks, may_be_cut: bool = False, limit: int | None = None
    ) -> tuple[int, str]:
        """Where the first mark is, and which; else where one may begin, and "".

        Args:
            limit: marks that begin more than so many characters away are not looked for: who gives
                up behind that many must not read all that follows at each new beginning.
        """
        end = len(self._text) if limit is None else self._at + limit + marks.reach
        match = marks.pattern.search(self._text, self._at, end)
        is_all = self._ended and not may_be_cut
        open_at = len(self._text) if is_all else marks.open_at(self._text, self._at)
        if match is not None and match.start() < open_at:
            return match.start(), match.group()
        return open_at, ""
