"""Transfer engines, and the packages that they need."""

from importlib.util import find_spec

import pytest

from tests.ascend.emulation import build
from tests.system.serving import free_port

OF_DEVICES = ("ascend",)
"""Those that copy from one device to another, which is emulated; what they answer is held against
one device in tests/ascend/emulation."""

PACKAGES = {"mooncake": "mooncake", "nixl": "nixl", "ascend": "memfabric_hybrid"}


def needs(backend: str) -> None:
    if find_spec(PACKAGES[backend]) is None:
        pytest.skip(f"{PACKAGES[backend]} is not installed; make test-transfer brings it")


def flags_of(backend: str, patch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """What both servers are given, beside variables that are set here."""
    needs(backend)
    flags = ("--disaggregation-transfer-backend", backend)
    if backend not in OF_DEVICES:
        return flags
    if why := build.absence():
        pytest.skip(why)
    patch.setenv("BANYAN_NPU", "tests.ascend.emulation")
    patch.setenv("ASCEND_MF_STORE_URL", f"tcp://127.0.0.1:{free_port()}")
    return (*flags, "--device", "npu", "--dtype", "bfloat16", "--skip-server-warmup")
