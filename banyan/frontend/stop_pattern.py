"""StopPattern: a regular expression as a small automaton that reads a stream once.

The syntax is that of `re`, without what a stream cannot answer or what costs more than linear time:
backreferences, lookaround, possessive and conditional groups, anchors and word boundaries. Each
character costs at most one visit to each state, so no pattern can hang.

Source: R. Cox, "Regular Expression Matching: the Virtual Machine Approach" (2009).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from re import _constants as ops  # the standard library's own reading of the syntax
from re import _parser as parser

from banyan.base.errors import RequestError
from banyan.base.log import printable

MAX_STATES = 1_000
"""Automaton states of one pattern; a counted repeat takes as many as it may repeat."""

MAX_MATCH = 512
"""Characters that one match may span, and so the most text that is held back for a pattern."""

Test = Callable[[str], bool]


class StopPattern:
    """One compiled pattern and its progress through one text.

    Finds the match that ends first and, among those, starts first.

    Raises:
        RequestError: the pattern is malformed, matches the empty text, needs what is not supported,
            or needs more than MAX_STATES states.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._tests: list[Test] = []
        self._next: list[list[int]] = []
        """Successors without reading a character, of state i; a state with a test reads one."""
        try:
            tree = parser.parse(source)
        except (re.error, RecursionError, OverflowError) as error:
            raise self._error(f"cannot be read: {printable(str(error))}") from None
        if tree.state.flags & (re.MULTILINE | re.VERBOSE | re.ASCII):
            raise self._error("has a flag other than i and s")
        self._ignores_case = bool(tree.state.flags & re.IGNORECASE)
        self._dot_all = bool(tree.state.flags & re.DOTALL)
        self._accept = self._state()
        try:
            self._start = self._sequence(tree, self._accept)
        except RecursionError:
            raise self._error("is nested too deeply") from None
        self._live: dict[int, int] = {}
        """Reading state -> first character of the oldest match that may be at it, oldest first."""
        self._enter(self._start, 0, self._live, {})
        if self._accept in self._live:
            raise self._error("matches the empty text")

    @property
    def num_states(self) -> int:
        return len(self._tests)

    def feed(self, char: str, at: int) -> int | None:
        """Read the character at position `at`; the start of a match that ends with it, or None."""
        after: dict[int, int] = {}
        seen: dict[int, None] = {}
        for state, start in self._live.items():
            if at - start < MAX_MATCH and self._tests[state](char):
                self._enter(self._next[state][0], start, after, seen)
        found = after.pop(self._accept, None)
        # Going oldest first keeps `after` in that order, and the oldest match keeps each state.
        self._enter(self._start, at + 1, after, seen)
        self._live = after
        return found

    def oldest(self, at: int) -> int:
        """Position of the first character that may belong to a match to come; `at` is the end."""
        return min(next(iter(self._live.values()), at), at)

    def _enter(self, first: int, start: int, live: dict[int, int], seen: dict[int, None]) -> None:
        """Add to `live` the reading states that `first` reaches without reading a character."""
        waiting = [first]
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            seen[state] = None
            if self._tests[state] is _never and state != self._accept:
                waiting += self._next[state]
            else:
                live[state] = start

    def _state(self, test: Test | None = None, *targets: int) -> int:
        if len(self._tests) >= MAX_STATES:
            raise self._error(f"needs more than {MAX_STATES:,} states")
        self._tests.append(_never if test is None else test)
        self._next.append(list(targets))
        return len(self._tests) - 1

    def _sequence(self, tree: Iterable, target: int) -> int:
        """Add states for a parsed sequence that goes on at `target`; returns where it begins."""
        for op, argument in reversed(list(tree)):
            target = self._item(op, argument, target)
        return target

    def _item(self, op: object, argument: object, target: int) -> int:
        if op is ops.LITERAL or op is ops.NOT_LITERAL or op is ops.IN or op is ops.ANY:
            return self._state(self._test(op, argument), target)
        if op is ops.BRANCH:
            return self._state(None, *[self._sequence(b, target) for b in argument[1]])
        if op is ops.SUBPATTERN:
            _, added, removed, inner = argument
            if added or removed:
                raise self._error("sets a flag for a part only")
            return self._sequence(inner, target)
        if op is ops.MAX_REPEAT or op is ops.MIN_REPEAT:
            return self._repeat(*argument, target)
        raise self._error(
            "uses a backreference, lookaround, ^, $, \\b, or an atomic or conditional group",
            "write it with characters, classes, groups, |, *, +, ? and {m,n}",
        )

    def _repeat(self, least: int, most: int, inner: Iterable, target: int) -> int:
        if most is ops.MAXREPEAT:
            loop = self._state(None, target)
            self._next[loop].append(self._sequence(inner, loop))
            target = loop
        else:
            end = target
            for _ in range(most - least):
                target = self._state(None, self._sequence(inner, target), end)
        for _ in range(least):
            target = self._sequence(inner, target)
        return target

    def _test(self, op: object, argument: object) -> Test:
        if op is ops.ANY:
            return _any if self._dot_all else _not_line_break
        wanted = op is not ops.NOT_LITERAL
        items = argument if op is ops.IN else [(ops.LITERAL, argument)]
        if items[0][0] is ops.NEGATE:
            wanted, items = False, items[1:]
        tests = [_class_test(*item) for item in items]
        if self._ignores_case:
            return lambda char: any(
                t(c) for t in tests for c in (char, char.lower(), char.upper())
            ) is wanted  # fmt: skip
        if len(tests) == 1 and wanted:
            return tests[0]
        return lambda char: any(t(char) for t in tests) is wanted

    def _error(self, text: str, hint: str = "") -> RequestError:
        return RequestError(
            f"stop_regex {printable(self.source)!r} {text}", param="stop_regex", hint=hint
        )


def _class_test(op: object, argument: object) -> Test:
    """The test of one member of a character class."""
    if op is ops.LITERAL:
        return chr(argument).__eq__
    if op is ops.RANGE:
        first, last = map(chr, argument)
        return lambda char: first <= char <= last
    return _CATEGORIES[argument]


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


_CATEGORIES: Mapping[object, Test] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    ops.CATEGORY_WORD: _is_word,
    ops.CATEGORY_NOT_WORD: lambda char: not _is_word(char),
}


def _any(char: str) -> bool:
    return True


def _not_line_break(char: str) -> bool:
    return char != "\n"


def _never(char: str) -> bool:
    """Marks a state that reads nothing."""
    return False
