"""Stop strings and stop patterns: where the text of an answer ends.

Reads text as it grows and releases only text that cannot belong to a stop. Cost: one table step per
character for all strings together, plus the visits of each pattern's automaton. All sequences of a
request share the compiled form.

Source: A. Aho, M. Corasick, "Efficient String Matching" (1975).
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from banyan.base.errors import RequestError
from banyan.tokenizer.stop_regex import PatternReader, stop_pattern

MAX_STOPS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_CHARS_TOTAL = 8192
MAX_PATTERN_BYTES = 256
MAX_PATTERN_STATES_TOTAL = 1_000
MAX_PATTERN_VISITS_TOTAL = 8_000
"""States that all patterns together may visit for one more character. A look-around visits the
states of its part at each character that it reads."""


@dataclass(frozen=True)
class TextOptions:
    """How tokens become text, and which text ends the request.

    Attributes:
        shown: special tokens that are text all the same, because a parser looks for them.
    """

    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    shown: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StopMatch:
    """A stop that was found. Positions count characters of the whole answer."""

    matched: str
    """The stop string, or the source of the pattern."""
    start: int
    end: int
    """One past the last character of the stop: the answer needs the tokens up to here."""


class StopChecker:
    """Finds the first stop in one growing answer.

    The first stop is the one that ends first; among stops that end together, the one that starts
    first. So the result does not depend on how the text was cut into pushes. The exception is a
    pattern that tests the end of the text (`$`, a word boundary, a look-ahead): each push ends it.

    Args:
        stop, stop_regex: as checked by check_stops.
        no_stop_trim: the matched text stays in the answer.
    """

    def __init__(
        self, stop: Sequence[str], stop_regex: Sequence[str] = (), no_stop_trim: bool = False
    ) -> None:
        self._strings = _StringReader(_string_table(tuple(stop))) if stop else None
        self._patterns = [(source, PatternReader(stop_pattern(source))) for source in stop_regex]
        self._keeps_match = no_stop_trim
        self._held = ""
        self._length = 0
        self.match: StopMatch | None = None
        """The stop, once found; later pushes add nothing."""

    def push(self, text: str) -> str:
        """Add new text; return the text that is final."""
        if self._strings is None and not self._patterns:
            self._length += len(text)
            return text
        if self.match is not None:
            return ""
        first = self._length - len(self._held)
        held = self._held + text
        self.match = self._search(text)
        if self.match is not None:
            end = self.match.end if self._keeps_match else self.match.start
            self._held, self._length = "", self.match.end
            return held[: end - first]
        self._length += len(text)
        keep = min(
            [reader.oldest for _, reader in self._patterns]
            + ([self._length - self._strings.depth] if self._strings else [])
        )
        self._held = held[keep - first :]
        return held[: keep - first]

    def finish(self) -> str:
        """Return the text still held back; the answer ended without a stop."""
        held, self._held = self._held, ""
        return held

    def _search(self, text: str) -> StopMatch | None:
        """The first stop that ends inside `text`, which follows what was read before."""
        found = [
            StopMatch(source, *span)
            for source, reader in self._patterns
            if (span := reader.find(text)) is not None
        ]
        if self._strings and (read := self._strings.find(text)) is not None:
            end = self._length + read[1]
            found.append(StopMatch(read[0], end - len(read[0]), end))
        return min(found, key=lambda match: (match.end, match.start), default=None)


class _StringTable:
    """Aho-Corasick automaton over all stop strings. Immutable."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.found: list[str] = [""]
        """The longest stop that ends at each state."""
        self.depth = [0]
        """Characters that may begin a stop, at each state."""
        for string in strings:
            state = 0
            for char in string:
                state = self._next[state].setdefault(char, len(self._next))
                if state == len(self._next):
                    self._next.append({})
                    self.found.append("")
                    self.depth.append(0)
            self.found[state] = string
        self._fail = [0] * len(self._next)
        self._link()
        self.first = re.compile("[" + "".join(map(re.escape, self._next[0])) + "]")

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _link(self) -> None:
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for char, target in self._next[state].items():
                self.depth[target] = self.depth[state] + 1
                if state != 0:
                    self._fail[target] = self.step(self._fail[state], char)
                    self.found[target] = self.found[target] or self.found[self._fail[target]]
                waiting.append(target)


@lru_cache(maxsize=16)
def _string_table(strings: tuple[str, ...]) -> _StringTable:
    return _StringTable(strings)


class _StringReader:
    """The progress of all stop strings through one text."""

    def __init__(self, table: _StringTable) -> None:
        self._table = table
        self._state = 0

    @property
    def depth(self) -> int:
        return self._table.depth[self._state]

    def find(self, text: str) -> tuple[str, int] | None:
        """Read `text` up to the first end of a stop: the stop, and how much was read."""
        table, state, at = self._table, self._state, 0
        while at < len(text):
            if state == 0:
                first = table.first.search(text, at)
                if first is None:
                    break
                at = first.start()
            state = table.step(state, text[at])
            at += 1
            if table.found[state]:
                self._state = state
                return table.found[state], at
        self._state = state
        return None


def check_stops(stop: Sequence[str], stop_regex: Sequence[str] = ()) -> None:
    """Validate stops where a request comes in.

    Raises:
        RequestError: too many, empty, too long, or a pattern that StopPattern refuses.
    """
    for name, stops in (("stop", stop), ("stop_regex", stop_regex)):
        if len(stops) > MAX_STOPS:
            raise RequestError(f"{name} has {len(stops):,} entries, limit {MAX_STOPS}", param=name)
        if not all(stops):
            raise RequestError(f"{name} has an empty string", param=name)
    longest = max(map(len, stop), default=0)
    if longest > MAX_STOP_CHARS:
        raise RequestError(
            f"a stop string has {longest:,} characters, limit {MAX_STOP_CHARS:,}", param="stop"
        )
    if (total := sum(map(len, stop))) > MAX_STOP_CHARS_TOTAL:
        raise RequestError(
            f"the stop strings have {total:,} characters together, limit {MAX_STOP_CHARS_TOTAL:,}",
            param="stop",
        )
    num_states = num_visits = 0
    for source in stop_regex:
        if (size_bytes := len(source.encode("utf-8", "replace"))) > MAX_PATTERN_BYTES:
            raise RequestError(
                f"a stop_regex has {size_bytes:,} bytes, limit {MAX_PATTERN_BYTES}",
                param="stop_regex",
            )
        pattern = stop_pattern(source)
        num_states += pattern.num_states
        num_visits += pattern.num_visits
        _check_cost("automaton states", num_states, MAX_PATTERN_STATES_TOTAL)
        _check_cost("visits to states per character", num_visits, MAX_PATTERN_VISITS_TOTAL)


def _check_cost(what: str, cost: int, limit: int) -> None:
    if cost > limit:
        raise RequestError(
            f"the stop_regex patterns need {cost:,} {what} together, limit {limit:,}",
            param="stop_regex",
            hint="lower the counted repeats {m,n} and what look-arounds read",
        )
