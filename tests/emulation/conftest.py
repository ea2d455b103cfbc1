"""The emulated device, once per process. What uses it runs last: a process keeps it."""

import os

import pytest
import torch

from tests.emulation import build
from tests.emulation.device import EmulatedNpu, install


@pytest.fixture(scope="session")
def npu() -> EmulatedNpu:
    if why := build.absence():
        pytest.skip(why)
    return install(os.environ.get("BANYAN_NPU_SOC", "A3"))


@pytest.fixture
def on(npu):
    """Brings a tensor to the device."""
    return lambda x: x.to(torch.device("npu"))
