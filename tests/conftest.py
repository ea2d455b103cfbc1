"""Options of the test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--border-steps",
        type=int,
        default=100_000,
        help="random actions that the border kit plays",
    )
    parser.addoption(
        "--real-border-steps",
        type=int,
        default=20_000,
        help="steps that the border kit plays with the real runner",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What gives torch another device runs last: the process keeps it."""
    items.sort(key=lambda item: "tests/emulation/" in item.nodeid)
