"""Who may join as a node, and what the leader says to the others."""

import socket
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from queue import SimpleQueue

import msgspec
import pytest
import zmq

from banyan.base.errors import ConfigError, DeviceError
from banyan.config.schema import Config, ParallelConfig
from banyan.engine import multi_node
from banyan.engine.core_process import OtherRanks
from banyan.engine.multi_node import (
    Hello,
    Leader,
    NodeHeartbeat,
    Nodes,
    check_secret,
    keys_of,
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


def _forged_leader(where: ParallelConfig, secret: str, answers: list[list[bytes]]) -> None:
    """Answers the first message of a node with these."""
    context = zmq.Context()
    forged = context.socket(zmq.ROUTER)
    forged.curve_server = True
    forged.curve_publickey, forged.curve_secretkey = keys_of(secret, "leader")
    forged.bind(f"tcp://{where.meeting}")
    identity, *_ = forged.recv_multipart()
    for answer in answers:
        forged.send_multipart([identity, *answer])
    forged.close(linger=5000)
    context.term()


START = msgspec.msgpack.encode(
    ([ProcessSpec(RANK, Config(), MODEL_CONFIG, "")], "file:///nowhere/meet")
)


@pytest.mark.parametrize(
    "answer",
    [
        [b"S"],
        [b"S", b""],
        [b"S", b"\xc1" * 40],
        [b"S", START[:-3]],
        [b"S", msgspec.msgpack.encode(([], ""))],
        [b"S", msgspec.msgpack.encode((["x"] * 3, 5))],
        [b"S", b"\x91" * 100_000],
        [b"S", START, b"more"],
        [b"R"],
        [b"R", b"no", b"more"],
        [b"?"],
        [b""],
    ],
    ids=str,
)
def test_a_leader_that_talks_nonsense_is_refused_in_words(answer):
    """Who knows the secret, or is on this machine where there is none."""
    where = parallel(free_port(), meet_timeout_s=20)
    forged = threading.Thread(target=_forged_leader, args=(where, "s", [answer]))
    forged.start()
    with pytest.raises(DeviceError, match="message that this node does not understand"):
        serve_node(where, "s", HELLO, "", comes_again=False)
    forged.join()


class Recorder:
    """Passes one connection on, and keeps what its client sent.

    Attributes:
        sent: the bytes, by connection.
    """

    def __init__(self, target: int) -> None:
        self.sent: list[bytearray] = []
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                kept = bytearray()
                self.sent.append(kept)
                for pair in ((near, far, kept), (far, near, bytearray())):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                sink.sendall(data)
        for end in (source, sink):
            end.close()


def _strangers(where: ParallelConfig, recorded: bytes) -> list[socket.socket]:
    """Connections of those who have not the secret; some stay open."""
    port = int(where.meeting.rpartition(":")[2])
    zmtp = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    null = zmtp.replace(b"CURVE", b"NULL\0")
    said = [
        *(b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" + bytes(512), bytes(4096)),
        *(zmtp, null, null + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"),
        zmtp + b"\x04\xc8\x05HELLO\x01\x00" + bytes(192),
        zmtp + b"\x06" + (1 << 62).to_bytes(8, "big"),
        *(recorded[:at] for at in (1, 11, 64, 100, 200, 300, len(recorded) - 1)),
        *(recorded, recorded + recorded, recorded[64:], recorded[:-8] + bytes(8)),
    ]
    found: list[socket.socket] = []
    for words in said:
        for stays in (False, True):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=10)
            with suppress(OSError):
                stranger.sendall(words)
            if stays:
                found.append(stranger)
            else:
                stranger.close()
    return found


def test_who_connects_and_says_nothing_is_let_go(monkeypatch):
    """Else idle connections take up the files that a process may open."""
    monkeypatch.setattr(multi_node, "GREETING_MS", 200)
    where = parallel(free_port())
    nodes = Nodes(where, "s", replace_hello(node=0))
    with socket.create_connection(("127.0.0.1", int(where.meeting[10:])), timeout=10) as idle:
        while idle.recv(1 << 10):
            pass
    nodes.close()


def _session_of(where: ParallelConfig, secret: str) -> bytes:
    """What a node sends while it registers."""
    recorder = Recorder(int(where.meeting.rpartition(":")[2]))
    nodes = Nodes(replace(where, nodes=2), secret, replace_hello(node=0, nodes=2))
    try:
        with Leader(f"127.0.0.1:{recorder.port}", secret) as node:
            node.send(b"H", msgspec.json.encode(replace_hello(node=1, nodes=2)))
            nodes.gather()
        return bytes(recorder.sent[0])
    finally:
        recorder.close()
        nodes.close()


def test_who_cannot_show_the_secret_neither_joins_nor_disturbs():
    """Garbage, other mechanisms, cut and forged greetings, and what a node sent an earlier leader,
    before the nodes come and while they work."""
    where = parallel(free_port(), meet_timeout_s=60)
    recorded, died = _session_of(where, "s"), SimpleQueue()
    assert len(recorded) > 300
    nodes = Nodes(where, "s", replace_hello(node=0))
    open_ones = _strangers(where, recorded)
    with Leader(where.meeting, "s") as one, Leader(where.meeting, "s") as two:
        one.send(b"H", msgspec.json.encode(replace_hello(node=1)))
        two.send(b"H", msgspec.json.encode(replace_hello(node=2)))
        nodes.gather()
        assert sorted(nodes._identity) == [1, 2]
        config = replace(Config(), parallel=where)
        nodes.start(lambda _: [ProcessSpec(RANK, config, MODEL_CONFIG, "")])
        nodes.watch(died.put)
        open_ones += _strangers(where, recorded)
        nodes.send(2, b"frame of rank 2")
        found = [one.receive(60)]
        while found[-1] is not None and found[-1][0] != b"F":
            found.append(one.receive(60))
        assert found[0] is not None and found[0][0] == b"S"
        assert found[-1] == [b"F", b"2", b"frame of rank 2"]
        two.send(b"B", msgspec.json.encode(NodeHeartbeat(rank=4, silent_s=60.0)))
        deadline = time.monotonic() + 60
        while nodes.silence()[0] != 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert died.empty()
        nodes.close()
    for stranger in open_ones:
        stranger.close()
