"""Stop strings and stop patterns: where the text of an answer ends.

Reads text as it grows and passes on only what cannot belong to a stop. Cost: one table step per
character for all strings together, and for each pattern as its automaton says. Knows no tokens.

Source: A. Aho, M. Corasick, "Efficient String Matching" (1975).
"""

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from banyan.base.errors import RequestError
from banyan.frontend.stop_pattern import StopPattern

MAX_STOPS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_CHARS_TOTAL = 8192
MAX_PATTERN_BYTES = 256
MAX_PATTERN_STATES_TOTAL = 1_000


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

    First is the stop that ends first; of several that end together, the one that starts first. So
    the answer does not depend on how the text was cut into pushes.

    Args:
        stop, stop_regex: as checked by check_stops.
        no_stop_trim: the matched text stays in the answer.
    """

    def __init__(
        self, stop: Sequence[str], stop_regex: Sequence[str] = (), no_stop_trim: bool = False
    ) -> None:
        self._strings = _StringFinder(stop) if stop else None
        self._patterns = [StopPattern(p) for p in stop_regex]
        self._keeps_match = no_stop_trim
        self._held = ""
        self._length = 0
        self.match: StopMatch | None = None
        """Set once a stop was found; later pushes add nothing."""

    def push(self, text: str) -> str:
        """Take new text; returns what is final of the answer."""
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
            [p.oldest(self._length) for p in self._patterns]
            + ([self._length - self._strings.depth] if self._strings else [])
        )
        self._held = held[keep - first :]
        return held[: keep - first]

    def finish(self) -> str:
        """The text still held back, when the answer ends without a stop."""
        held, self._held = self._held, ""
        return held

    def _search(self, text: str) -> StopMatch | None:
        """The first stop that ends inside `text`, which follows what was read before."""
        if not self._patterns:
            assert self._strings is not None
            found = self._strings.find(text)
            return found and StopMatch(
                found[0], self._length + found[1] - len(found[0]), self._length + found[1]
            )
        for i, char in enumerate(text):
            at = self._length + i
            ends = [
                StopMatch(p.source, start, at + 1)
                for p in self._patterns
                if (start := p.feed(char, at)) is not None
            ]
            if self._strings and (found := self._strings.find(char)) is not None:
                ends.append(StopMatch(found[0], at + 1 - len(found[0]), at + 1))
            if ends:
                return min(ends, key=lambda match: match.start)
        return None


class _StringFinder:
    """Aho-Corasick automaton over all stop strings. `depth`: characters that may begin a stop."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._found: list[str] = [""]
        """The longest stop that ends at each state."""
        self._depth = [0]
        for string in strings:
            state = 0
            for char in string:
                state = self._next[state].setdefault(char, len(self._next))
                if state == len(self._next):
                    self._next.append({})
                    self._found.append("")
                    self._depth.append(0)
            self._found[state] = string
        self._fail = [0] * len(self._next)
        self._link()
        self._first = re.compile("[" + "".join(map(re.escape, self._next[0])) + "]")
        self._state = 0

    @property
    def depth(self) -> int:
        return self._depth[self._state]

    def find(self, text: str) -> tuple[str, int] | None:
        """Read `text` up to the first end of a stop: the stop, and how much was read."""
        state, at = self._state, 0
        while at < len(text):
            if state == 0:
                first = self._first.search(text, at)
                if first is None:
                    break
                at = first.start()
            state = self._step(state, text[at])
            at += 1
            if self._found[state]:
                self._state = state
                return self._found[state], at
        self._state = state
        return None

    def _link(self) -> None:
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for char, target in self._next[state].items():
                self._depth[target] = self._depth[state] + 1
                if state != 0:
                    self._fail[target] = self._step(self._fail[state], char)
                    self._found[target] = self._found[target] or self._found[self._fail[target]]
                waiting.append(target)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)


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
    states = 0
    for pattern in stop_regex:
        if (size_bytes := len(pattern.encode("utf-8", "replace"))) > MAX_PATTERN_BYTES:
            raise RequestError(
                f"a stop_regex has {size_bytes:,} bytes, limit {MAX_PATTERN_BYTES}",
                param="stop_regex",
            )
        states += StopPattern(pattern).num_states
    if states > MAX_PATTERN_STATES_TOTAL:
        raise RequestError(
            f"the stop_regex patterns need {states:,} automaton states together, limit "
            f"{MAX_PATTERN_STATES_TOTAL:,}",
            param="stop_regex",
            hint="lower the counted repeats {m,n}",
        )
