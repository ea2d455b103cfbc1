"""Options of the test suite."""

import pytest
from hypothesis import HealthCheck, settings

# A busy machine slows examples down; none is asserted to be quick.
settings.register_profile("banyan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("banyan")


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
