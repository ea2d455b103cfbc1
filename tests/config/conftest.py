"""Fixtures of the tests of flags."""

import logging

import pytest


@pytest.fixture
def heard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """The package's log lines, whether or not logging was started before."""
    monkeypatch.setattr(logging.getLogger("banyan"), "propagate", True)
    return caplog
