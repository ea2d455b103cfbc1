"""The emulated device, once per process. What uses it runs last: a process keeps it."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ascend.emulation import build
from tests.ascend.emulation.device import EmulatedNpu, install


@pytest.fixture(scope="session")
def npu() -> EmulatedNpu:
    if why := build.absence():
        pytest.skip(why)
    return install(os.environ.get("BANYAN_NPU_SOC", "A3"))


@pytest.fixture(autouse=True)
def _no_races(request) -> Iterator[None]:
    """Looks over each test of the device, but where it plants a race."""
    if "npu" not in request.fixturenames:
        yield
        return
    npu = request.getfixturevalue("npu")
    npu.watch_races(True)
    yield
    assert "races" in request.fixturenames or npu.races() == []


@pytest.fixture
def races(npu: EmulatedNpu) -> Callable[[], list[str]]:
    """Of a test that has some."""
    return npu.races


@pytest.fixture
def on(npu):
    """Brings a tensor to the device."""
    return lambda x: x.to(torch.device("npu"))
