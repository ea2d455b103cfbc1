"""Chooses cases of a matrix so that each value of each parameter occurs at least once."""

from collections import defaultdict

import pytest


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases that bring no value of a parameter that a chosen case of the same test lacks.

    Cases that bring several new values are chosen first, so few are needed: of 5 x 3 x 2 cases
    five are chosen. Each compiled library counts as a test of its own.
    """
    tests = defaultdict[tuple[str, str], list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and runs(item):
            library = str(item.callspec.params.get("library", ""))
            tests[item.nodeid.partition("[")[0], library].append(item)
    return [case for cases in tests.values() for case in _rest(cases)]


def runs(item: pytest.Item) -> bool:
    """Whether no condition of this machine or environment skips it."""
    return not any(mark.args and mark.args[0] is True for mark in item.iter_markers("skipif"))


def _rest(cases: list[pytest.Function]) -> list[pytest.Function]:
    values = {case: set(enumerate(case.callspec._idlist)) for case in cases}
    seen = set[tuple[int, object]]()
    rest = cases
    for num_new in range(len(values[cases[0]]), 0, -1):
        later = []
        for case in rest:
            if len(values[case] - seen) >= num_new:
                seen |= values[case]
            else:
                later.append(case)
        rest = later
    return rest
