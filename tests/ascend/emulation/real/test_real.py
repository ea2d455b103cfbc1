"""The emulated device against the real torch_npu, where one lies beside: make test-npu-real.

What lies there is imported over libraries that do nothing. It tells its schemas, and its meta
kernels which shapes and number types each call gives, with checks of their own. Of a release that
this torch cannot load the meta kernels alone are run.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from banyan.parallel.groups import GroupsConfig, open_groups
from tests.ascend.emulation.exchange_cases import exchange_cases
from tests.ascend.emulation.real.calls import results
from tests.ascend.emulation.real.lists import (
    ask,
    can_load,
    declared,
    schemas,
    version_of,
    without_meta,
)
from tests.ascend.emulation.test_exchange import bound
from tests.parallel.ranks import together

PACKAGES = os.environ.get("NPU_REAL", "").split()

if not PACKAGES:
    pytest.skip("NPU_REAL names no folder with torch_npu", allow_module_level=True)


@pytest.fixture(scope="module", params=PACKAGES)
def packages(request) -> Path:
    return Path(request.param)


@pytest.fixture(scope="module")
def release(packages) -> dict:
    return ask(packages, is_apart=not can_load(packages))


def compare(version: str, theirs: list[str]) -> None:
    """A list against what a package says of the same operators, `.out` forms aside."""
    listed = [line for lines in schemas(version).values() for line in lines]
    mine = {line for line in listed if ".out" not in line.partition("(")[0]}
    names = {line.partition("(")[0] for line in mine}
    assert mine == {line for line in theirs if line.partition("(")[0] in names}
    assert len(names) > 300


def test_the_package_declares_what_the_list_says(packages) -> None:
    of_list = schemas(version_of(packages))
    names = {line.partition("(")[0].partition(".")[0] for line in declared(packages)}
    assert names <= set(of_list)
    if not can_load(packages):
        compare(version_of(packages), declared(packages))


def test_the_release_registers_what_the_list_says(packages, release) -> None:
    compare(version_of(packages), release["schemas"])


def test_meta_kernels_say_alone_what_they_say_in_their_package(packages, release) -> None:
    if not can_load(packages):
        pytest.skip(f"the torch for torch_npu {version_of(packages)} is not here (a CPU build)")
    alone = ask(packages, is_apart=True)
    for part in ("absent", "results", "exchanges"):
        assert alone[part] == release[part]


def test_every_call_gives_what_the_real_meta_kernels_say(packages, release, npu) -> None:
    """Those that it has none for are named in its list, and only those are left out."""
    absent = release["absent"]
    assert absent == without_meta(version_of(packages))
    torch.get_device_module("npu").config.allow_internal_format = True
    here = results(lambda tensor: tensor.to(torch.device("npu")), absent)
    assert here == release["results"]
    assert sum(map(len, here.values())) > 20


def exchanged(rank: int, size: int, address: str) -> dict:
    """What a rank of the emulated device gives."""
    platform, _ = bound(rank)
    groups = open_groups(
        GroupsConfig(rank, size, address, ("hccl",), 60, are_experts_apart=True, has_exchange=True)
    )
    limits = platform.traits.dispatch
    assert limits is not None
    known = partial(exchange_cases, groups.exchange.ranks, limits)
    return results(lambda tensor: tensor.to(torch.device("npu", rank)), known=known)


def test_every_exchange_gives_what_the_real_meta_kernels_say(release, npu, tmp_path) -> None:
    here = together(2, tmp_path, exchanged)[0]
    assert here == release["exchanges"]
