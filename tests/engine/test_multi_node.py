"""Who may join as a node, and what the leader says to the others."""

import socket
import threading
import time
from contextlib import closing
from dataclasses import replace
from queue import SimpleQueue

import msgspec
import pytest

from banyan.base.errors import ConfigError, DeviceError
from banyan.config.schema import Config, ParallelConfig
from banyan.engine.core_process import OtherRanks
from banyan.engine.multi_node import (
    Hello,
    Leader,
    NodeHeartbeat,
    Nodes,
    check_secret,
    ranks_of,
    serve_node,
)
from banyan.engine.process_spec import RANK, ProcessSpec
from tests.server.fakes import MODEL_CONFIG
from tests.system.serving import free_port

HELLO = Hello(node=1, nodes=3, tp=6, pp=1, version="1", weights="w")


def parallel(port: int, **more: object) -> ParallelConfig:
    meeting = f"127.0.0.1:{port}"
    return replace(ParallelConfig(tp=6, nodes=3, meeting=meeting, meet_timeout_s=1.5), **more)


def test_each_node_has_as_many_ranks():
    assert [list(ranks_of(parallel(1), node)) for node in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"version": "2"}, "it runs version 2, the leader 1"),
        ({"weights": "x"}, "another model or other weights"),
        ({"tp": 3}, "--nnodes 3 --tp 3 --pp 1, the leader with --nnodes 3 --tp 6 --pp 1"),
        (
            {"dp": 2},
            "--enable-dp-attention --dp-size 2, the leader with --enable-dp-attention --dp-size 1",
        ),
        ({"node": 3}, r"--node-rank 3 is not in 1 … 2"),
        ({"node": 0}, r"--node-rank 0 is not in 1 … 2"),
    ],
)
def test_a_node_that_does_not_belong_learns_why(hello, why):
    said = _join(parallel(free_port()), "s", "s", Hello(**{**_fields(HELLO), **hello}))

    assert why in said


def test_a_node_without_the_secret_gets_no_answer():
    said = _join(parallel(free_port()), "one", "another", HELLO)

    assert "did not answer within 1.5 s" in said and "secret" in said


def test_nodes_that_did_not_come_are_named():
    nodes = Nodes(parallel(free_port()), "s", replace_hello(node=0))
    try:
        with pytest.raises(DeviceError, match="node 1, 2 of 3 did not come within 1.5 s"):
            nodes.gather()
    finally:
        nodes.close()


def test_an_address_that_is_taken_is_refused():
    port = free_port()
    first = Nodes(parallel(port), "s", HELLO)
    try:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened at"):
            Nodes(parallel(port), "s", HELLO)
    finally:
        first.close()


def test_nodes_that_did_not_come_leave_the_address_free():
    port = free_port()
    config = replace(Config(), parallel=parallel(port, tp=3, meet_timeout_s=0.1))

    with pytest.raises(DeviceError, match="did not come") as held:
        OtherRanks(config, MODEL_CONFIG, "s")

    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", port))
    assert held.tb  # what went wrong still knows its frames and what they hold


@pytest.mark.parametrize(
    "said", [(b"B", b"not json"), (b"B", b'{"rank": []}'), (b"B",), (b"L",), (b"?", b""), (b"",)]
)
def test_a_node_that_talks_nonsense_is_lost_and_the_others_are_still_heard(said):
    where, died = parallel(free_port(), meet_timeout_s=20), SimpleQueue()
    nodes = Nodes(where, "s", replace_hello(node=0))
    with Leader(where.meeting, "s") as one, Leader(where.meeting, "s") as two:
        one.send(b"H", msgspec.json.encode(replace_hello(node=1)))
        two.send(b"H", msgspec.json.encode(replace_hello(node=2)))
        nodes.gather()
        config = replace(Config(), parallel=where)
        nodes.start(lambda _: [ProcessSpec(RANK, config, MODEL_CONFIG, "")])
        nodes.watch(died.put)

        one.send(*said)

        assert died.get(timeout=60) == "node 1 sent a message that the leader does not understand"
        two.send(b"B", msgspec.json.encode(NodeHeartbeat(rank=4, silent_s=60.0)))
        deadline = time.monotonic() + 60
        while nodes.silence()[0] != 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        nodes.close()


@pytest.mark.parametrize("host", ["10.0.0.1", "node-0.cluster", "0.0.0.0", "[2001:db8::1]"])
def test_only_loopback_needs_no_secret(host):
    reachable = replace(parallel(1), meeting=f"{host}:29500")

    with pytest.raises(ConfigError, match="BANYAN_DIST_SECRET"):
        check_secret(reachable, "")
    check_secret(reachable, "long")
    check_secret(parallel(1), "")


def _fields(hello: Hello) -> dict:
    return {name: getattr(hello, name) for name in hello.__struct_fields__}


def replace_hello(**changes) -> Hello:
    return Hello(**{**_fields(HELLO), **changes})


def _join(where: ParallelConfig, secret: str, mine: str, hello: Hello) -> str:
    """What a node that wants to join ends with."""
    nodes = Nodes(where, secret, replace_hello(node=0))

    def gather() -> None:
        with pytest.raises(DeviceError):
            nodes.gather()

    leader = threading.Thread(target=gather)
    leader.start()
    try:
        with pytest.raises(DeviceError) as raised:
            serve_node(where, mine, hello, "")
        return str(raised.value)
    finally:
        leader.join()
        nodes.close()
