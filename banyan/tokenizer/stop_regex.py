"""Stop patterns: `StopPattern` is a regular expression as an automaton, `PatternReader` runs it
over one text.

Syntax and meaning follow `re.search` on the text so far, after each piece of text: `$`, a word
boundary and a look-ahead at the end of a piece see the end of the text. Patterns that need
memory of the match are refused: backreferences, atomic and possessive groups, conditions on
groups. Each character visits each state at most once, so no pattern can hang.

Source: R. Cox, "Regular Expression Matching: the Virtual Machine Approach" (2009).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from banyan.base.errors import RequestError
from banyan.base.log import printable

# The standard library's own reading of the syntax, which nothing types.
compiler, ops, parser = (
    import_module(f"re.{name}") for name in ("_compiler", "_constants", "_parser")
)

MAX_STATES = 1_000
"""Automaton states of one pattern; a counted repeat takes as many as it may repeat."""

MAX_MATCH = 512
"""Characters that one match may span, and so the most text that is held back for a pattern."""

MAX_LOOK = 64
"""Characters that a look-around may read."""

MAX_KNOWN_CHARS = 512
"""Characters whose tests are remembered at a time."""

LEGAL_FLAGS = re.IGNORECASE | re.DOTALL | re.MULTILINE | re.UNICODE

EPSILON, ACCEPT = -1, -2
"""Instead of a test: a state that reads nothing (epsilon), and one where a match is complete."""

Span = tuple[int, int]
"""Where a match starts and ends, in characters of the whole text."""


@dataclass(frozen=True)
class Look:
    """A look-around: its automaton, its width in characters, and its direction and sign."""

    first: int
    width: int
    looks_back: bool
    is_wanted: bool
    num_states: int


Condition = Look | int
"""What must hold to pass an epsilon state; a number is one of the `re` parser's positions."""


class StopPattern:
    """One compiled pattern, shared by all texts.

    Raises:
        RequestError: the pattern is malformed, matches the empty text, needs what is not supported,
            or needs more than MAX_STATES states.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.tests: list[int] = []
        """By state: the test for a character, EPSILON or ACCEPT."""
        self.next: list[list[int]] = []
        self.conditions: dict[int, Condition] = {}
        self._tested: dict[int, int] = {}
        """Parsed item, by its identity in `_tree` -> its test."""
        self._classes: list[re.Pattern[str]] = []
        self._known: dict[str, Sequence[bool]] = {}
        try:
            self._tree = parser.parse(source)
        except (re.error, RecursionError, OverflowError) as error:
            raise self._error(f"cannot be read: {printable(str(error))}") from None
        if self._tree.state.flags & ~LEGAL_FLAGS:
            raise self._error("has a flag other than i, m and s")
        self.is_multiline = bool(self._tree.state.flags & re.MULTILINE)
        self.accept = self._state(ACCEPT)
        try:
            self.first = self._sequence(self._tree, self.accept)
        except RecursionError:
            raise self._error("is nested too deeply") from None
        looks = [c for c in self.conditions.values() if isinstance(c, Look)]
        self.ahead = max((1 + look.width for look in looks if not look.looks_back), default=0)
        self.look_back = 1 + max((look.width for look in looks), default=0)
        """Characters before a position that its conditions may read."""
        if PatternReader(self).find("") is not None:
            raise self._error("matches the empty text")

    @property
    def num_states(self) -> int:
        return len(self.tests)

    @property
    def num_visits(self) -> int:
        """Upper bound of the states visited per character."""
        looks = [c for c in self.conditions.values() if isinstance(c, Look)]
        at_once = self.num_states + sum(look.num_states * look.width for look in looks)
        return (1 + self.ahead) * at_once

    def passed(self, char: str) -> Sequence[bool]:
        """By test: whether the character passes it."""
        known = self._known.get(char)
        if known is None:
            if len(self._known) >= MAX_KNOWN_CHARS:
                self._known.clear()
            known = tuple(test.match(char) is not None for test in self._classes)
            self._known[char] = known
        return known

    def _state(self, test: int, *targets: int) -> int:
        if len(self.tests) >= MAX_STATES:
            raise self._error(f"needs more than {MAX_STATES:,} states")
        self.tests.append(test)
        self.next.append(list(targets))
        return len(self.tests) - 1

    def _sequence(self, tree: Iterable, target: int) -> int:
        """Add states for a parsed sequence that continues at `target`; return its first state."""
        for item in reversed(list(tree)):
            target = self._item(item, target)
        return target

    def _item(self, item: tuple, target: int) -> int:
        op, argument = item
        if op is ops.LITERAL or op is ops.NOT_LITERAL or op is ops.IN or op is ops.ANY:
            return self._state(self._test(item), target)
        if op is ops.BRANCH:
            return self._state(EPSILON, *[self._sequence(b, target) for b in argument[1]])
        if op is ops.SUBPATTERN:
            _, added, removed, inner = argument
            if added or removed:
                raise self._error("sets a flag for a part only")
            return self._sequence(inner, target)
        if op is ops.MAX_REPEAT or op is ops.MIN_REPEAT:
            least, most, inner = argument
            return self._repeat(least, most, inner, target)
        if op is ops.AT:
            return self._epsilon(argument, target)
        if op is ops.ASSERT or op is ops.ASSERT_NOT:
            direction, inner = argument
            return self._epsilon(self._look(direction, inner, op is ops.ASSERT), target)
        raise self._error(
            "uses a backreference, or an atomic, possessive or conditional group",
            "write it with characters, classes, groups, |, *, +, ?, {m,n}, ^, $, \\b, (?= and (?<=",
        )

    def _epsilon(self, condition: Condition, target: int) -> int:
        state = self._state(EPSILON, target)
        self.conditions[state] = condition
        return state

    def _look(self, direction: int, inner: Any, is_wanted: bool) -> Look:
        least, most = inner.getwidth()
        if most > MAX_LOOK:
            raise self._error(f"looks around by more than {MAX_LOOK} characters")
        if direction < 0 and least != most:
            raise self._error("has a look-behind whose width is not fixed")
        num_states, num_looks = len(self.tests), self._num_looks()
        first = self._sequence(inner, self._state(ACCEPT))
        if self._num_looks() > num_looks:
            raise self._error("has a look-around inside a look-around")
        return Look(first, int(most), direction < 0, is_wanted, len(self.tests) - num_states)

    def _num_looks(self) -> int:
        return sum(isinstance(c, Look) for c in self.conditions.values())

    def _repeat(self, least: int, most: int, inner: Iterable, target: int) -> int:
        if max(least, 0 if most is ops.MAXREPEAT else most) > MAX_STATES:
            raise self._error(f"repeats a part more than {MAX_STATES:,} times")
        if most is ops.MAXREPEAT:
            loop = self._state(EPSILON, target)
            self.next[loop].append(self._sequence(inner, loop))
            target = loop
        else:
            end = target
            for _ in range(most - least):
                target = self._state(EPSILON, self._sequence(inner, target), end)
        for _ in range(least):
            num_states = len(self.tests)
            target = self._sequence(inner, target)
            if len(self.tests) == num_states:  # an empty part is the same however often
                break
        return target

    def _test(self, item: tuple) -> int:
        # Copies of a repeated part are the same item, and the tree keeps every item alive.
        test = self._tested.setdefault(id(item), len(self._classes))
        if test == len(self._classes):
            self._classes.append(compiler.compile(parser.SubPattern(self._tree.state, [item])))
        return test

    def _error(self, text: str, hint: str = "") -> RequestError:
        return RequestError(
            f"stop_regex {printable(self.source)!r} {text}", param="stop_regex", hint=hint
        )


@lru_cache(maxsize=64)
def stop_pattern(source: str) -> StopPattern:
    """The pattern of this source, compiled once for all sequences of a request."""
    return StopPattern(source)


class PatternReader:
    """The progress of one pattern through one text.

    The result of a look-ahead is certain only some characters later. The reader stays before these
    characters and reads them again with the next piece.
    """

    def __init__(self, pattern: StopPattern) -> None:
        self._pattern = pattern
        self._entered: dict[int, int] = {}
        """State entered at `_at` -> first character of the oldest match there, oldest first."""
        self._at = 0
        self._tail, self._tail_at = "", 0
        """The end of the text, from as far back as conditions may read; where it begins."""

    @property
    def oldest(self) -> int:
        """Position of the first character that may belong to a future match."""
        return min(next(iter(self._entered.values()), self._at), self._at)

    def find(self, text: str) -> Span | None:
        """Read more text; return the match that ends first (then: starts first)."""
        self._tail += text
        end = self._tail_at + len(self._tail)
        entered, at = self._entered, self._at
        while True:
            starts = dict(entered)
            starts.setdefault(self._pattern.first, at)
            live = self._reach(starts, at, end)
            if (start := live.get(self._pattern.accept)) is not None:
                return start, at
            if at == end:
                break
            entered = self._read(live, at)
            at += 1
            if at + self._pattern.ahead <= end + 1:
                self._entered, self._at = entered, at
        self._forget(self._at - self._pattern.look_back)
        return None

    def _forget(self, before: int) -> None:
        if before > self._tail_at:
            self._tail, self._tail_at = self._tail[before - self._tail_at :], before

    def _reach(self, entered: Mapping[int, int], at: int, end: int) -> dict[int, int]:
        """The states that read or accept and are reached at position `at` without reading.

        Going oldest first keeps that order, and the oldest match keeps each state.
        """
        tests, targets, conditions = (
            self._pattern.tests,
            self._pattern.next,
            self._pattern.conditions,
        )
        live: dict[int, int] = {}
        seen: set[int] = set()
        for first, start in entered.items():
            waiting = [first]
            while waiting:
                state = waiting.pop()
                if state in seen:
                    continue
                seen.add(state)
                if tests[state] != EPSILON:
                    live[state] = start
                elif state not in conditions or self._holds(conditions[state], at, end):
                    waiting += targets[state]
        return live

    def _read(self, live: Mapping[int, int], at: int) -> dict[int, int]:
        """The states entered by reading the character at position `at`."""
        tests, targets = self._pattern.tests, self._pattern.next
        passed = self._pattern.passed(self._char(at))
        entered: dict[int, int] = {}
        for state, start in live.items():
            test = tests[state]
            if test >= 0 and passed[test] and at - start < MAX_MATCH:
                entered.setdefault(targets[state][0], start)
        return entered

    def _char(self, at: int) -> str:
        return self._tail[at - self._tail_at]

    def _holds(self, condition: Condition, at: int, end: int) -> bool:
        if isinstance(condition, Look):
            return self._sees(condition, at, end) is condition.is_wanted
        if condition is ops.AT_BEGINNING_STRING or condition is ops.AT_BEGINNING:
            is_line = self._pattern.is_multiline and condition is ops.AT_BEGINNING
            return at == 0 or (is_line and self._char(at - 1) == "\n")
        if condition is ops.AT_END_STRING:
            return at == end
        if condition is ops.AT_END:
            is_last = at == end - 1 or self._pattern.is_multiline
            return at == end or (is_last and self._char(at) == "\n")
        is_boundary = (at > 0 and _is_word(self._char(at - 1))) != (
            at < end and _is_word(self._char(at))
        )
        return is_boundary is (condition is ops.AT_BOUNDARY)

    def _sees(self, look: Look, at: int, end: int) -> bool:
        """Whether the look-around matches at position `at`."""
        first = at - look.width if look.looks_back else at
        if first < 0:
            return False
        entered = {look.first: first}
        for place in range(first, min(first + look.width, end) + 1):
            live = self._reach(entered, place, end)
            if any(self._pattern.tests[state] == ACCEPT for state in live):
                return True
            if place == end or not live:
                break
            entered = self._read(live, place)
        return False


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"
