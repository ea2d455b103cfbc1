"""Several machines: node 0 leads, and the other nodes run processes for it.

These processes are ranks of the leader's replica, or engines of DP attention replicas
(`dp_attention/remote_engines.py`). Every node is started with the same command line except for its
number. A node sends its version and a fingerprint of its weights (`Hello`). The leader accepts or
refuses it, sends the specs of its processes, and exchanges frames with these through the node. Both
sides send heartbeats and notice when the other one is lost.

The connection is encrypted with ZeroMQ's CURVE (Curve25519, rfc.zeromq.org/spec/26). The keys of
both ends are derived from a shared secret.
"""

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Self

import msgspec
import zmq
import zmq.utils.z85

from banyan.base.errors import ConfigError, DeviceError
from banyan.base.install import VERSION
from banyan.base.log import logger, printable
from banyan.base.os import is_loopback
from banyan.config.schema import ParallelConfig
from banyan.engine.local_processes import LocalEngines, LocalProcesses, LocalRanks
from banyan.engine.process_spec import ENGINE, ProcessSpec
from banyan.formats.shards import SAFETENSORS, TORCH
from banyan.messages.frames import MAX_FRAME_BYTES, FrameSocket
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

_BEAT_S = 0.5
SILENT_S = 5.0
"""A node without a message for this long is lost."""
_FRAME, _END, _BEAT, _START, _REFUSED, _HELLO, _LOST = (b"F", b"E", b"B", b"S", b"R", b"H", b"L")
_AGAIN, _ASK_STACKS, _STACKS = (b"A", b"T", b"K")
"""Register again, for another engine; request for stack traces; the answer to it."""
_HELLO_S = 1.0
"""Interval at which a node sends its Hello until the leader answers."""
_STACKS_S = 3.0
GREETING_MS = 5000
"""Longest handshake; who connects and does not show the secret is let go after it."""
_SAMPLE_BYTES = 1 << 16
_MAX_MESSAGE_BYTES = 1 << 18
"""Largest message of a node to the leader, without frames."""
_MAX_STACK = 1 << 13
"""Most characters of the stack traces of one rank."""


class Hello(msgspec.Struct, frozen=True):
    """Registration of a node; it must match the leader's."""

    node: int
    nodes: int
    tp: int
    pp: int
    version: str
    weights: str
    cp: int = 1
    dp: int = msgspec.field(default=1, name="joined")
    """Number of replicas with DP attention; 1 without."""


class NodeHeartbeat(msgspec.Struct, frozen=True):
    """Heartbeat of a node: the rank whose own heartbeat is the oldest, and its age."""

    rank: int
    silent_s: float


def _heartbeat_of(body: bytes) -> NodeHeartbeat | None:
    try:
        return msgspec.json.decode(body, type=NodeHeartbeat)
    except msgspec.MsgspecError:
        return None


def _stacks_of(body: bytes) -> list[tuple[int, str]] | None:
    """Stack traces from another machine, without control characters; indented, so that they cannot
    look like log lines of this process."""
    try:
        found = msgspec.json.decode(body, type=list[tuple[int, str]])
    except msgspec.MsgspecError:
        return None
    return [
        (rank, "\n".join(f"  {printable(line, 300)}" for line in text.splitlines()))
        for rank, text in found
    ]


def ranks_of(parallel: ParallelConfig, node: int) -> range:
    """The ranks on one node; every node has the same number."""
    share = parallel.local_world
    return range(node * share, (node + 1) * share)


def fingerprint(model_config: ModelConfig) -> str:
    """Hash of a model and its weights, independent of their path.

    Covers the model config, and names, sizes and samples of the weight files.
    """
    facts = asdict(replace(model_config, path=""))
    digest = hashlib.sha256(msgspec.json.encode(facts, order="sorted"))
    path = Path(model_config.path)
    both = (file for kind in (SAFETENSORS, TORCH) for file in path.glob(kind.pattern))
    files = [path] if path.is_file() else sorted(both)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size};".encode())
        with file.open("rb") as stream:
            for at in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(at)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def own_hello(parallel: ParallelConfig, model_config: ModelConfig) -> Hello:
    return Hello(
        node=parallel.node,
        nodes=parallel.nodes,
        tp=parallel.tp,
        pp=parallel.pp,
        version=VERSION,
        weights=fingerprint(model_config),
        cp=parallel.cp,
        dp=parallel.dp if parallel.uses_dp_attention else 1,
    )


def keys_of(secret: str, who: str) -> tuple[bytes, bytes]:
    """(public, secret) key of one end, in Z85."""
    raw = hashlib.scrypt(secret.encode(), salt=f"banyan {who}".encode(), n=1 << 14, r=8, p=1)
    private = zmq.utils.z85.encode(raw[:32])
    return zmq.curve_public(private), private


def check_secret(parallel: ParallelConfig, secret: str) -> None:
    """
    Raises:
        ConfigError: other machines can reach the address, and there is no secret.
    """
    if not secret and not is_loopback(parallel.meeting.rpartition(":")[0]):
        raise ConfigError(
            f"the nodes meet at {parallel.meeting}, which others may reach, and have no secret",
            hint="set BANYAN_DIST_SECRET to the same long random text on every node",
        )


class Nodes:
    """The leader's connections to the other nodes.

    Nodes that run engines can register again (`again`), after the leader's own engines have been
    restarted.

    Args:
        parallel: this node listens at `parallel.meeting`.
        mine: the leader's Hello; the others must match it.
    """

    def __init__(self, parallel: ParallelConfig, secret: str, mine: Hello) -> None:
        self._parallel, self._mine = parallel, mine
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        most = MAX_FRAME_BYTES if mine.dp > 1 else 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, most + _MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # with a limit, ROUTER would drop messages
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, GREETING_MS)
        public, private = keys_of(secret, "leader")
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = public, private
        try:
            host, _, port = parallel.meeting.rpartition(":")
            self._socket.bind(f"tcp://{socket.gethostbyname(host)}:{port}")
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError(
                f"--dist-init-addr {parallel.meeting} cannot be listened at: {error}",
                hint="name an address of this machine and a free port",
            ) from None
        self._identity: dict[int, bytes] = {}
        self._last_message_s: dict[int, float] = {}
        self._silent: dict[int, NodeHeartbeat] = {}
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind("inproc://frames")
        self._outbox.connect("inproc://frames")
        self._on_death: Callable[[str], None] | None = None
        self._lost = ""
        self._clients: dict[int, FrameSocket] = {}
        """Replica -> socket to its client, for engines on other nodes."""
        self._stacks: dict[int, list[tuple[int, str]]] = {}
        """Node -> stack traces of its ranks, while `stacks` collects them."""
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def gather(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until every node has registered.

        Args:
            check: called while waiting; raises if a node will never come.

        Raises:
            DeviceError: a node did not register in time.
        """
        wanted = set(range(1, self._parallel.nodes))
        deadline = time.monotonic() + self._parallel.meet_timeout_s
        while wanted - self._identity.keys():
            check()
            left = deadline - time.monotonic()
            if left <= 0:
                missing = ", ".join(map(str, sorted(wanted - self._identity.keys())))
                raise DeviceError(
                    f"node {missing} of {self._parallel.nodes} did not come within "
                    f"{self._parallel.meet_timeout_s:g} s",
                    hint="start the same command line there with its --node-rank, and see its log",
                )
            if self._socket.poll(int(min(left, 1.0) * 1000)):
                identity, kind, *parts = self._socket.recv_multipart()
                if kind == _HELLO and parts:
                    self._register_node(identity, parts[0])
                else:  # a node that ran ranks for an engine that has ended
                    self._socket.send_multipart([identity, _AGAIN])

    def _register_node(self, identity: bytes, body: bytes) -> None:
        try:
            hello = msgspec.json.decode(body, type=Hello)
            reason = self._objection(hello)
        except msgspec.MsgspecError:
            hello, reason = None, "it speaks another protocol"
        if hello is not None and self._identity.get(hello.node) == identity:
            return
        if hello is None or reason:
            name = f"node {hello.node}" if hello else "a node"
            log.error("%s was turned away: %s", name, reason)
            self._socket.send_multipart([identity, _REFUSED, reason.encode()])
            return
        self._identity[hello.node] = identity
        self._last_message_s[hello.node] = time.monotonic()
        log.info("node %d of %d has come", hello.node, self._parallel.nodes)

    def _objection(self, hello: Hello) -> str:
        mine = self._mine
        if hello.version != mine.version:
            return f"it runs version {printable(hello.version, 40)}, the leader {mine.version}"
        if (hello.nodes, hello.tp, hello.pp) != (mine.nodes, mine.tp, mine.pp):
            return (
                f"it was started with --nnodes {hello.nodes} --tp {hello.tp} --pp {hello.pp}, the "
                f"leader with --nnodes {mine.nodes} --tp {mine.tp} --pp {mine.pp}"
            )
        for flag, its, own in (
            ("--attn-cp-size", hello.cp, mine.cp),
            ("--enable-dp-attention --dp-size", hello.dp, mine.dp),
        ):
            if its != own:
                return f"it was started with {flag} {its}, the leader with {flag} {own}"
        if hello.weights != mine.weights:
            return "it has another model or other weights than the leader"
        if not 1 <= hello.node < mine.nodes:
            return f"its --node-rank {hello.node} is not in 1 … {mine.nodes - 1}"
        if hello.node in self._identity:
            return f"there is a node {hello.node} already: give each node a --node-rank of its own"
        return ""

    def start(
        self,
        process_specs_of: Callable[[int], Sequence[ProcessSpec]],
        meeting: str = "",
        clients: Mapping[int, str] = {},
    ) -> None:
        """Have every node start its processes.

        Args:
            process_specs_of: specs of the processes of a node: one for all its ranks, or one for
                each engine.
            meeting: rendezvous address of the ranks of all nodes.
            clients: address of the client of each engine, by replica.
        """
        for replica, address in clients.items():
            self._clients[replica] = FrameSocket.connected(address)
        for node, identity in self._identity.items():
            body = msgspec.msgpack.encode((process_specs_of(node), meeting))
            self._socket.send_multipart([identity, _START, body])
            log.info("node %d starts its processes", node)
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def watch(self, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        if self._lost:
            on_death(self._lost)

    @property
    def is_lost(self) -> bool:
        """Whether a node or one of its processes is lost. From any thread."""
        return bool(self._lost)

    def silence(self) -> tuple[int, float]:
        """Like `LocalRanks.silence`, over all nodes."""
        now = time.monotonic()
        signs = [
            (beat.silent_s + now - self._last_message_s[node], beat.rank)
            for node, beat in list(self._silent.items())
        ]
        longest, rank = max(signs, default=(0.0, 0))
        return rank, longest

    def send(self, rank: int, frame: bytes) -> None:
        """Send a frame to a rank of another node. From one thread only."""
        node = rank // self._parallel.local_world
        self._outbox.send_multipart([self._identity[node], _FRAME, b"%d" % rank, frame])

    def stacks(self) -> list[tuple[int, str]]:
        """Like `LocalRanks.stacks`, over the nodes that answer in time."""
        self._stacks = {}
        outbox = self._context.socket(zmq.PUSH)  # a ZeroMQ socket belongs to one thread
        outbox.connect("inproc://frames")
        for identity in self._identity.values():
            outbox.send_multipart([identity, _ASK_STACKS])
        deadline = time.monotonic() + _STACKS_S
        while len(self._stacks) < len(self._identity) and time.monotonic() < deadline:
            time.sleep(_BEAT_S / 10)
        outbox.close(linger=0)
        return [found for node in sorted(self._stacks) for found in self._stacks[node]]

    def again(self) -> None:
        """Have the other nodes end their processes and register again, for the next `gather`."""
        self._release(_AGAIN)
        self._thread, self._lost, self._is_closing = None, "", False
        for known in (self._identity, self._last_message_s, self._silent, self._stacks):
            known.clear()

    def close(self, is_failure: bool = False) -> None:
        """Have the other nodes end; after a failure, register again for the next engine."""
        self._release(_AGAIN if is_failure else _END)
        self._context.destroy(linger=0 if self._thread is None else None)

    def _release(self, kind: bytes) -> None:
        if self._thread is None:
            return
        self._is_closing = True
        for identity in self._identity.values():
            self._outbox.send_multipart([identity, kind])
        self._outbox.send_multipart([b""])
        self._thread.join(5.0)
        for client in self._clients.values():
            client.close()
        self._clients = {}

    def _run(self) -> None:
        """Thread: pass messages on, send heartbeats, and check the heartbeats of the nodes."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._inbox, zmq.POLLIN)
        beat_at = 0.0
        while True:
            _register(poller, self._clients.values())
            ready = dict(poller.poll(int(_BEAT_S * 1000)))
            if self._inbox in ready and not self._pass_on():
                break
            if self._socket in ready:
                self._receive(*self._socket.recv_multipart())
            for replica, frame in _receive_frames(self._clients):
                identity = self._identity[self._parallel.node_of(replica)]
                self._socket.send_multipart([identity, _FRAME, b"%d" % replica, frame])
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + _BEAT_S
                for identity in self._identity.values():
                    self._socket.send_multipart([identity, _BEAT])
                self._check_heartbeats(now)

    def _pass_on(self) -> bool:
        parts = self._inbox.recv_multipart()
        if len(parts) == 1:
            return False
        self._socket.send_multipart(parts)
        return True

    def _receive(self, identity: bytes, kind: bytes, *parts: bytes) -> None:
        node = next((n for n, mine in self._identity.items() if mine == identity), 0)
        if not node:  # unknown, perhaps a restarted node whose number is still taken
            self._socket.send_multipart([identity, _AGAIN])
            return
        self._last_message_s[node] = time.monotonic()
        if kind == _FRAME and len(parts) == 2:
            self._forward(node, *parts)
            return
        body = parts[0] if len(parts) == 1 else b""
        if kind == _BEAT and (beat := _heartbeat_of(body)) is not None:
            self._silent[node] = beat
        elif kind == _HELLO:
            pass  # sent again before the answer arrived
        elif kind == _STACKS and (stacks := _stacks_of(body)) is not None:
            self._stacks[node] = stacks
        elif kind == _LOST and body:
            self._lose(f"node {node}: {printable(body.decode(errors='replace'), 300)}")
        else:
            self._lose(f"node {node} sent a message that the leader does not understand")

    def _forward(self, node: int, number: bytes, frame: bytes) -> None:
        """Pass a frame of an engine on that node to its client."""
        replica = int(number) if len(number) < 6 and number.isdigit() else -1
        if replica in self._clients and self._parallel.node_of(replica) == node:
            self._clients[replica].send(frame)

    def _check_heartbeats(self, now: float) -> None:
        for node, last_s in self._last_message_s.items():
            if now - last_s > SILENT_S:
                self._lose(f"node {node} has sent nothing for {now - last_s:.1f} s")

    def _lose(self, what: str) -> None:
        if self._is_closing or self._lost:
            return
        self._lost = what
        log.error("%s", what)
        if self._on_death is not None:
            self._on_death(what)


class Leader:
    """A node's connection to the leader."""

    def __init__(self, address: str, secret: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a blocked send would delay heartbeats
        self._socket.curve_publickey, self._socket.curve_secretkey = keys_of(secret, "node")
        self._socket.curve_serverkey, _ = keys_of(secret, "leader")
        self._socket.connect(f"tcp://{address}")

    def send(self, kind: bytes, *parts: bytes) -> None:
        self._socket.send_multipart([kind, *parts])

    def receive(self, timeout_s: float, others: Collection[FrameSocket] = ()) -> list[bytes] | None:
        """The next message of the leader; None after the timeout, or earlier if one of the sockets
        `others` is ready."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        _register(poller, others)
        ready = dict(poller.poll(int(timeout_s * 1000)))
        return self._socket.recv_multipart() if self._socket in ready else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        self._context.term()


class _LeaderGone(DeviceError):
    """The engine that this node ran ranks for has ended; another one may come."""


def serve_node(
    parallel: ParallelConfig, secret: str, mine: Hello, own_path: str, comes_again: bool = True
) -> None:
    """Run this node's processes for the leader until it ends.

    Args:
        own_path: path of the model on this machine.
        comes_again: when the leader's engine is lost, wait for its replacement.

    Raises:
        DeviceError: the leader does not answer, refuses this node or is lost, or a rank died.
    """
    while True:
        try:
            with Leader(parallel.meeting, secret) as leader:
                process_specs, meeting = _join(leader, parallel, mine)
                process_specs = [
                    replace(
                        process_spec,
                        model_config=replace(process_spec.model_config, path=own_path),
                        secret=secret,
                    )
                    for process_spec in process_specs
                ]
                if process_specs[0].role == ENGINE:
                    kept: LocalProcesses = LocalEngines(process_specs)
                else:
                    kept = LocalRanks(ranks_of(parallel, parallel.node), process_specs[0], meeting)
                _run_processes(kept, leader)
            return
        except _LeaderGone as gone:
            if not comes_again:
                raise
            log.warning("%s: the node comes again", gone)


def _join(leader: Leader, parallel: ParallelConfig, mine: Hello) -> tuple[list[ProcessSpec], str]:
    """Send `mine` until the leader answers: (process specs, rendezvous address of the ranks)."""
    log.info("node %d of %d waits for %s", mine.node, mine.nodes, parallel.meeting)
    deadline = time.monotonic() + parallel.meet_timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        leader.send(_HELLO, msgspec.json.encode(mine))
        message = leader.receive(min(left_s, _HELLO_S))
        if message is None:
            continue
        match message:
            case [_, body] if message[0] == _REFUSED:
                reason = printable(body.decode(errors="replace"), 300)
                raise DeviceError(f"the leader turned this node away: {reason}")
            case [_, body] if message[0] == _START and (found := _start_of(body)) is not None:
                return found
            case [kind] if kind in (_AGAIN, _BEAT):
                time.sleep(_BEAT_S)
            case _:
                raise _nonsense()
    raise DeviceError(
        f"the leader at {parallel.meeting} did not answer within {parallel.meet_timeout_s:g} s",
        hint="is node 0 started, is its --dist-init-addr the same, and its secret?",
    )


def _start_of(body: bytes) -> tuple[list[ProcessSpec], str] | None:
    """Specs of at least one process, and a rendezvous address; None if `body` holds none."""
    try:
        found = msgspec.msgpack.decode(body, type=tuple[list[ProcessSpec], str])
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return None
    return found if found[0] else None


def _nonsense() -> DeviceError:
    return DeviceError(
        "the leader sent a message that this node does not understand",
        hint="does node 0 run the same version?",
    )


def _receive_frames(sockets: Mapping[int, FrameSocket]) -> Iterator[tuple[int, bytes]]:
    """(number, frame) received at each socket, in order. Pending output is sent, too."""
    for number, one in sockets.items():
        one.flush()
        for frame in one.take():
            yield number, frame


def _register(poller: zmq.Poller, sockets: Collection[FrameSocket]) -> None:
    """Register sockets for input, and for output if they have some pending."""
    for one in sockets:
        comes, goes = 0 if one.is_over else zmq.POLLIN, zmq.POLLOUT if one.has_unsent else 0
        poller.register(one, comes | goes)


def _run_processes(kept: LocalProcesses, leader: Leader) -> None:
    """Pass frames on and send heartbeats until the leader ends."""
    died: list[str] = []
    kept.watch(died.append)
    numbers = ", ".join(map(str, kept.numbers))
    log.info("%s %s run here; requests go to node 0", kept.kind, numbers)
    named = {b"%d" % number: number for number in kept.numbers}
    last_s, beat_at = time.monotonic(), 0.0
    try:
        while True:
            message = leader.receive(_BEAT_S / 2, kept.speaking.values())
            now = time.monotonic()
            if message is not None:
                last_s = now
                if message == [_END]:
                    return
                if message == [_AGAIN]:
                    raise _LeaderGone("the leader's engine has ended")
                if message == [_ASK_STACKS]:
                    stacks = [(rank, text[:_MAX_STACK]) for rank, text in kept.stacks()]
                    leader.send(_STACKS, msgspec.json.encode(stacks))
                elif message[0] == _FRAME and len(message) == 3 and message[1] in named:
                    kept.send(named[message[1]], message[2])
                elif message != [_BEAT]:
                    raise _nonsense()
            for number, frame in _receive_frames(kept.speaking):
                leader.send(_FRAME, b"%d" % number, frame)
            if died:
                leader.send(_LOST, died[0].encode())
                raise _LeaderGone(died[0])
            if now - last_s > SILENT_S:
                raise _LeaderGone(f"the leader has sent nothing for {now - last_s:.1f} s")
            if now >= beat_at:
                beat_at = now + _BEAT_S
                leader.send(_BEAT, msgspec.json.encode(NodeHeartbeat(*kept.silence())))
    finally:
        kept.close()
