"""Runs a check on each of many cheap cases in one test, and reports all that fail."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def check_each(
    cases: Iterable[T], check: Callable[[T], None], name: Callable[[T], str] = repr
) -> None:
    """Call `check` with each case. Names each case that fails, with its reason.

    Raises:
        AssertionError: a check fails, or there is no case.
    """
    failed, count = list[str](), 0
    for case in cases:
        count += 1
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:
            lines = str(error).splitlines() or [""]
            failed.append(f"{name(case)}: {type(error).__name__}: {lines[0]}")
    assert count, "no case was checked"
    assert not failed, f"{len(failed)} of {count} cases fail:\n" + "\n".join(failed)
