"""Ranks keep to the cores of a memory node, or to a share of all cores."""

import os
from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.schema import Config
from banyan.engine.model_loader import device_number, place_rank
from tests.support.flags import config_of


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two nodes of four cores, of which this process may use all but core 7."""
    for node, cores in (("node0", "0-1,4-5"), ("node1", "2-3,6-7")):
        folder = tmp_path / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    placed: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: placed.append(cores))

    def place(config: Config, rank: int = 0, replica: int = 0) -> list[int] | None:
        parallel = replace(config.parallel, replica=replica)
        placed.clear()
        place_rank(config.device, parallel, rank, tmp_path)
        return placed[0] if placed else None

    return place


def test_a_rank_runs_on_the_cores_of_its_node(machine):
    assert machine(config_of()) is None
    assert machine(config_of("--numa-node", "1")) == [2, 3, 6]
    two = config_of("--tp", "2", "--numa-node", "0", "1")
    assert [machine(two, rank) for rank in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6]]


def test_ranks_of_one_node_share_its_cores_out(machine):
    shared = config_of("--tp", "2", "--numa-node", "1")
    assert [machine(shared, rank) for rank in (0, 1)] == [[2], [3, 6]]


def test_replicas_count_before_ranks(machine):
    config = config_of("--tp", "2", "--dp", "2", "--numa-node", "0", "0", "1", "1")
    found = [machine(config, rank, replica) for replica in (0, 1) for rank in (0, 1)]
    assert found == [[0, 1], [4, 5], [2], [3, 6]]


def test_a_variable_gives_each_rank_cores_of_its_own(machine):
    config = parse(["--dp", "2"], read_environment({"SGLANG_SET_CPU_AFFINITY": "1"}))
    assert [machine(config, replica=n) for n in (0, 1)] == [[0, 1, 2], [3, 4, 5, 6]]
    config = parse(["--dp", "2"], read_environment({"SGLANG_SET_CPU_AFFINITY": "0"}))
    assert machine(config) is None


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--numa-node", "2"], "2 does not exist.*Its nodes: 0, 1"),
        (["--numa-node", "x"], "--numa-node must be"),
        (["--numa-node", "0", "1"], "2 nodes for 1 ranks"),
        (["--numa-node", "1", "--tp", "4"], "3 cores of node 1 cannot be shared by 4 ranks"),
    ],
)
def test_a_place_that_is_not_there_is_refused(machine, flags, text):
    with pytest.raises(ConfigError, match=text):
        machine(config_of(*flags))


def test_ranks_take_devices_from_the_first_on_in_steps():
    def numbers(*words: str) -> list[int]:
        config = config_of(*words)
        return [
            device_number(config.device, replace(config.parallel, replica=replica), place)
            for replica in range(config.parallel.dp)
            for place in range(config.parallel.local_world)
        ]

    assert numbers("--tp", "2", "--dp", "2") == [0, 1, 2, 3]
    assert numbers("--tp", "2", "--dp", "2", "--base-gpu-id", "8", "--device", "npu") == [
        8,
        9,
        10,
        11,
    ]
    assert numbers("--tp", "3", "--base-gpu-id", "1", "--gpu-id-step", "4", "--device", "npu") == [
        1,
        5,
        9,
    ]
