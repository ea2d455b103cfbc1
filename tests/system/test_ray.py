"""Ranks that a Ray cluster starts: a real one, of two nodes on this machine. RAY=1 runs it (make
test-ray)."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.nodes import FEW, outputs
from tests.system.serving import free_port, launch, runs, serving, status_of, wait_until

pytestmark = pytest.mark.skipif(os.environ.get("RAY") != "1", reason="RAY is not 1")
NOTICED_S = 5.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[object]:
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 2, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=size | {"include_dashboard": False})
    cluster.add_node(**size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    cluster.shutdown()


def raylets(cluster) -> list[int]:
    """Process ids, by node."""
    nodes = [cluster.head_node, *cluster.worker_nodes]
    return [node.all_processes["raylet"][0].process.pid for node in nodes]


def ranks_under(pid: int) -> list[psutil.Process]:
    """Processes of ranks that a Ray node has started, through an actor."""
    return [p for p in psutil.Process(pid).children(recursive=True) if _is_rank(p)]


def _is_rank(process: psutil.Process) -> bool:
    return runs(process, "banyan.server.processes")


@pytest.fixture
def expected(tiny_model, tmp_path) -> list[list[int]]:
    with serving(tmp_path / "one.log", "--model-path", str(tiny_model), *FEW) as one:
        return outputs(one)


def flags(model: Path, *more: str) -> tuple[str, ...]:
    address = f"127.0.0.1:{free_port()}"
    model_flags = ("--model-path", str(model), "--tp-size", "2", *FEW)
    return (*model_flags, "--use-ray", "--dist-init-addr", address, *more)


@pytest.mark.parametrize("nodes", [(), ("--nnodes", "2")])
def test_ranks_that_ray_starts_give_the_tokens_of_one_rank(
    nodes, cluster, expected, tiny_model, tmp_path
):
    """They lie where Ray has put them, and end with the server."""
    with serving(tmp_path / "ray.log", *flags(tiny_model, *nodes)) as server:
        assert server.rank_pids() == []
        ranks = [ranks_under(pid) for pid in raylets(cluster)]
        assert sorted(map(len, ranks)) == [0, 1]
        assert outputs(server) == expected
        server.signal(signal.SIGTERM)
        assert server.exit_code(60) == 0
    (rank,) = [rank for found in ranks for rank in found]
    wait_until(lambda: not rank.is_running(), 60, "the rank to end")


@pytest.mark.parametrize("lost", ["rank", "actor"])
def test_an_actor_that_dies_is_named_and_another_one_started(
    lost, cluster, expected, tiny_model, tmp_path
):
    with serving(tmp_path / "ray.log", *flags(tiny_model)) as server:
        (rank,) = [rank for pid in raylets(cluster) for rank in ranks_under(pid)]
        victim = rank if lost == "rank" else rank.parent()
        victim.send_signal(signal.SIGKILL)
        named = "node 1: rank1" if lost == "rank" else "node 1 (by Ray) has died"
        wait_until(lambda: named in server.log.read_text(), NOTICED_S, named)
        wait_until(lambda: server.log.read_text().count("Ray starts node 1") == 2, 60, "an actor")
        wait_until(lambda: status_of(server, "/health") == 200, 60, "another engine")
        assert outputs(server) == expected


def test_a_cluster_with_too_few_machines_is_refused(cluster, tiny_model, tmp_path):
    server = launch(tmp_path / "ray.log", *flags(tiny_model, "--nnodes", "4", "--pp-size", "2"))
    try:
        assert server.exit_code(60) != 0
        assert "the Ray cluster has 2 nodes, this one included" in server.tail()
    finally:
        server.kill()


def test_a_machine_without_a_cluster_says_what_to_start(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    server = launch(tmp_path / "ray.log", *flags(tiny_model, "--dist-timeout", "5"))
    try:
        assert server.exit_code(60) != 0
        assert "this machine belongs to no Ray cluster that answers" in server.tail()
        assert "ray start --head" in server.tail()
    finally:
        server.kill()
