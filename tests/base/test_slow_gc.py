"""Collections of garbage that hold a process up."""

import gc
import logging

import pytest

from banyan.base.clock import VirtualClock
from banyan.base.slow_gc import SlowGc, report_slow_gc
from tests.support.flags import config_of


@pytest.fixture
def lines(caplog, monkeypatch):
    told = logging.getLogger("banyan.base.slow_gc")
    monkeypatch.setattr(told, "handlers", [caplog.handler])
    monkeypatch.setattr(told, "propagate", False)
    before = list(gc.callbacks)
    yield lambda: caplog.messages
    gc.callbacks[:] = before


def test_a_collection_that_takes_long_is_reported(lines):
    report_slow_gc(config_of("--gc-warning-threshold-secs", "1e-9").observe.slow_gc_s)
    gc.collect()
    assert any(
        line.startswith("garbage collection took seconds=") and " generation=2 " in line
        for line in lines()
    )


def test_a_quick_collection_is_not(lines):
    clock = VirtualClock()
    watch = SlowGc(0.5, clock)
    for seconds in (0.1, 0.5, 0.6):
        watch("start", {})
        clock.advance_to(clock.now() + seconds)
        watch("stop", {"generation": 1, "collected": 7})
    assert lines() == ["garbage collection took seconds=0.600 generation=1 freed=7"]


def test_nothing_is_watched_unless_asked_for():
    before = list(gc.callbacks)
    report_slow_gc(config_of().observe.slow_gc_s)
    assert gc.callbacks == before
