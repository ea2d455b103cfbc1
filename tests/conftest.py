"""Options of the test suite."""

import logging
import re
from collections.abc import Iterator

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


LIVE = re.compile(
    "tests/(cli|clients|engine|frontend|launch|parallel|proofs|router|server|system|transfer)/"
)
"""Rings whose tests start processes and talk over sockets."""


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """What a test does to the package's log (a command that shows warnings alone) ends with it."""
    log = logging.getLogger("banyan")
    handlers, level, propagates = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagates
    log.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What gives torch another device runs last: the process keeps it. A live test that fails runs
    once more and is told as RERUN: one hiccup of a machine in 13,000 tests is no verdict."""
    items.sort(key=lambda item: "tests/emulation/" in item.nodeid)
    for item in items:
        if LIVE.match(item.nodeid):
            item.add_marker(pytest.mark.flaky(reruns=1))
