"""The emulated device against the real torch_npu, where one lies beside: make test-npu-real.

What lies there is imported over libraries that do nothing. It tells its schemas, and its meta
kernels which shapes and number types each call gives, with checks of their own.
"""

import os
from pathlib import Path

import pytest
import torch

from tests.emulation.real.calls import results
from tests.emulation.real.lists import ask, schemas

PACKAGES = os.environ.get("NPU_REAL", "").split()

if not PACKAGES:
    pytest.skip("NPU_REAL names no folder with torch_npu", allow_module_level=True)


@pytest.fixture(scope="module", params=PACKAGES)
def real(request) -> tuple[str, dict]:
    (info,) = Path(request.param).glob("torch_npu-*.dist-info")
    return info.name.split("-")[1].removesuffix(".dist"), ask(Path(request.param))


def test_the_release_registers_what_the_list_says(real) -> None:
    version, told = real
    listed = sorted(line for lines in schemas(version).values() for line in lines)
    names = {line.partition("(")[0] for line in listed if ".out" not in line.partition("(")[0]}
    mine = [line for line in listed if line.partition("(")[0] in names]
    theirs = [line for line in told["schemas"] if line.partition("(")[0] in names]
    assert mine == theirs


def test_every_call_gives_what_the_real_meta_kernels_say(real, npu) -> None:
    _, told = real
    here = results(lambda tensor: tensor.to(torch.device("npu")))
    assert here == told["results"]
    assert sum(map(len, here.values())) > 20
