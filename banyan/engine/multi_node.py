"""Processes on several machines: the first node leads, the others keep processes for it: ranks of
its replica, or engines of replicas that are joined with it (`dp_attention/remote_engines.py`).

Every node is started with the same command line but for its number. A node says which version and
which weights it has; the leader takes it or tells it why not, tells it the duties of its processes,
and passes frames to them, and from engines, through it. Both sides say that they live, and notice
when the other does not.

The connection is encrypted and lets in who knows the secret: the keys of both ends (Curve25519, by
ZeroMQ's CURVE, rfc.zeromq.org/spec/26) are made of it.
"""

import hashlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol, Self

import msgspec
import zmq
import zmq.utils.z85

from banyan.base.errors import ConfigError, DeviceError
from banyan.base.hosts import is_loopback
from banyan.base.log import logger, printable
from banyan.base.version import own_version
from banyan.config.schema import ParallelConfig
from banyan.engine.local_engines import LocalEngines, frames_of, poll_along
from banyan.engine.local_processes import LocalRanks
from banyan.engine.process_spec import ENGINE, ProcessSpec
from banyan.messages.frames import FrameSocket
from banyan.messages.wire import MAX_FRAME_BYTES
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

_BEAT_S = 0.5
SILENT_S = 5.0
"""A node that is not heard of for so long is lost."""
_FRAME, _END, _BEAT, _START, _REFUSED, _HELLO, _LOST = (b"F", b"E", b"B", b"S", b"R", b"H", b"L")
_AGAIN, _TELL, _STACKS = (b"A", b"T", b"K")
"""Come again, to another engine; tell where your ranks stand; that is here."""
_HELLO_S = 1.0
"""How often a node says who it is until it is told what to do."""
_STACKS_S = 3.0
_SAMPLE_BYTES = 1 << 16
_MAX_SAID_BYTES = 1 << 18
"""Of what a node tells the leader."""
_MAX_STACK = 1 << 13
"""Characters of what it tells of one rank."""


class Hello(msgspec.Struct, frozen=True):
    """What a node says of itself."""

    node: int
    nodes: int
    tp: int
    pp: int
    version: str
    weights: str
    cp: int = 1
    joined: int = 1
    """Replicas that work on one batch."""


class Sign(msgspec.Struct, frozen=True):
    """A node's ranks are alive: the one that was silent for longest, and for how long."""

    rank: int
    silent_s: float


def _sign_of(said: bytes) -> Sign | None:
    try:
        return msgspec.json.decode(said, type=Sign)
    except msgspec.MsgspecError:
        return None


def _stacks_of(said: bytes) -> list[tuple[int, str]] | None:
    """Text of another machine: what is no text, or would look like lines of ours, is taken out."""
    try:
        found = msgspec.json.decode(said, type=list[tuple[int, str]])
    except msgspec.MsgspecError:
        return None
    return [
        (rank, "\n".join(f"  {printable(line, 300)}" for line in text.splitlines()))
        for rank, text in found
    ]


def ranks_of(parallel: ParallelConfig, node: int) -> range:
    """The ranks on one node: each node has as many."""
    share = parallel.local_world
    return range(node * share, (node + 1) * share)


def fingerprint(model_config: ModelConfig) -> str:
    """The same for the same model with the same weights, wherever they lie. Reads the facts, and
    the sizes and a sample of the files."""
    facts = asdict(replace(model_config, path=""))
    digest = hashlib.sha256(msgspec.json.encode(facts, order="sorted"))
    path = Path(model_config.path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size};".encode())
        with file.open("rb") as stream:
            for at in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(at)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def own_hello(parallel: ParallelConfig, model_config: ModelConfig) -> Hello:
    layout = (parallel.node, parallel.nodes, parallel.tp, parallel.pp)
    joined = parallel.dp if parallel.uses_dp_attention else 1
    return Hello(*layout, own_version(), fingerprint(model_config), parallel.cp, joined)


def keys_of(secret: str, who: str) -> tuple[bytes, bytes]:
    """(public, secret) key of one end, Z85."""
    raw = hashlib.scrypt(secret.encode(), salt=f"banyan {who}".encode(), n=1 << 14, r=8, p=1)
    private = zmq.utils.z85.encode(raw[:32])
    return zmq.curve_public(private), private


def check_secret(parallel: ParallelConfig, secret: str) -> None:
    """
    Raises:
        ConfigError: nodes that are not on this machine alone have no secret in common.
    """
    if not secret and not is_loopback(parallel.meeting.rpartition(":")[0]):
        raise ConfigError(
            f"the nodes meet at {parallel.meeting}, which others may reach, and have no secret",
            hint="set BANYAN_DIST_SECRET to the same long random text on every node",
        )


class Nodes:
    """The other nodes, as the leader sees them.

    Those that keep engines may be gathered again (`again`): these come and go with the engines of
    the leader, and it stays.

    Args:
        parallel: its `meeting` is where this node listens.
        mine: what the others must have too.
    """

    def __init__(self, parallel: ParallelConfig, secret: str, mine: Hello) -> None:
        self._parallel, self._mine = parallel, mine
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        most = MAX_FRAME_BYTES if mine.joined > 1 else 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, most + _MAX_SAID_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # else what has no room would be dropped
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
        self._heard: dict[int, float] = {}
        self._silent: dict[int, Sign] = {}
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind("inproc://frames")
        self._outbox.connect("inproc://frames")
        self._on_death: Callable[[str], None] | None = None
        self._lost = ""
        self._fronts: dict[int, FrameSocket] = {}
        """Replica -> the front's end, of the engines that are kept elsewhere."""
        self._told: dict[int, list[tuple[int, str]]] = {}
        """Node -> where its ranks stand, while that is asked for."""
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def gather(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until every node has come.

        Args:
            check: called meanwhile; raises when one of them will never come.

        Raises:
            DeviceError: some did not come in time.
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
                    self._welcome(identity, parts[0])
                else:  # it kept ranks for an engine that is gone
                    self._socket.send_multipart([identity, _AGAIN])

    def _welcome(self, identity: bytes, said: bytes) -> None:
        try:
            hello = msgspec.json.decode(said, type=Hello)
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
        self._heard[hello.node] = time.monotonic()
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
            ("--enable-dp-attention --dp-size", hello.joined, mine.joined),
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
        duties_of: Callable[[int], Sequence[ProcessSpec]],
        meeting: str = "",
        fronts: Mapping[int, str] = {},
    ) -> None:
        """Let every node start its processes.

        Args:
            duties_of: that of all ranks of a node, or those of its engines.
            meeting: where ranks meet those of other nodes.
            fronts: the address of the front of each engine, by replica.
        """
        for replica, address in fronts.items():
            self._fronts[replica] = FrameSocket.connected(address)
        for node, identity in self._identity.items():
            told = msgspec.msgpack.encode((duties_of(node), meeting))
            self._socket.send_multipart([identity, _START, told])
            log.info("node %d starts its processes", node)
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def watch(self, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        if self._lost:
            on_death(self._lost)

    @property
    def is_lost(self) -> bool:
        """Whether one of them is, or its ranks. From any thread."""
        return bool(self._lost)

    def silence(self) -> tuple[int, float]:
        """As `LocalRanks.silence`, over all nodes."""
        now = time.monotonic()
        signs = [
            (sign.silent_s + now - self._heard[node], sign.rank)
            for node, sign in list(self._silent.items())
        ]
        longest, rank = max(signs, default=(0.0, 0))
        return rank, longest

    def send(self, rank: int, frame: bytes) -> None:
        """Give a frame to a rank of another node. From one thread only."""
        node = rank // self._parallel.local_world
        self._outbox.send_multipart([self._identity[node], _FRAME, b"%d" % rank, frame])

    def stacks(self) -> list[tuple[int, str]]:
        """As `LocalRanks.stacks`, over the nodes that answer."""
        self._told = {}
        outbox = self._context.socket(zmq.PUSH)  # no thread may use that of another
        outbox.connect("inproc://frames")
        for identity in self._identity.values():
            outbox.send_multipart([identity, _TELL])
        deadline = time.monotonic() + _STACKS_S
        while len(self._told) < len(self._identity) and time.monotonic() < deadline:
            time.sleep(_BEAT_S / 10)
        outbox.close(linger=0)
        return [found for node in sorted(self._told) for found in self._told[node]]

    def again(self) -> None:
        """Let the others end what they keep, and come again: to `gather`."""
        self._let_go(_AGAIN)
        self._thread, self._lost, self._is_closing = None, "", False
        for known in (self._identity, self._heard, self._silent, self._told):
            known.clear()

    def close(self, is_failure: bool = False) -> None:
        """Let the others end, or come again to the engine that takes the place of this one."""
        self._let_go(_AGAIN if is_failure else _END)
        self._context.destroy(linger=0 if self._thread is None else None)

    def _let_go(self, word: bytes) -> None:
        if self._thread is None:
            return
        self._is_closing = True
        for identity in self._identity.values():
            self._outbox.send_multipart([identity, word])
        self._outbox.send_multipart([b""])
        self._thread.join(5.0)
        for front in self._fronts.values():
            front.close()
        self._fronts = {}

    def _run(self) -> None:
        """All traffic of the socket, and who lives."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._inbox, zmq.POLLIN)
        beat_at = 0.0
        while True:
            poll_along(poller, self._fronts.values())
            ready = dict(poller.poll(int(_BEAT_S * 1000)))
            if self._inbox in ready and not self._pass_on():
                break
            if self._socket in ready:
                self._take(*self._socket.recv_multipart())
            for replica, frame in frames_of(self._fronts):
                identity = self._identity[self._parallel.node_of(replica)]
                self._socket.send_multipart([identity, _FRAME, b"%d" % replica, frame])
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + _BEAT_S
                for identity in self._identity.values():
                    self._socket.send_multipart([identity, _BEAT])
                self._look(now)

    def _pass_on(self) -> bool:
        parts = self._inbox.recv_multipart()
        if len(parts) == 1:
            return False
        self._socket.send_multipart(parts)
        return True

    def _take(self, identity: bytes, kind: bytes, *parts: bytes) -> None:
        node = next((n for n, mine in self._identity.items() if mine == identity), 0)
        if not node:  # all seats are taken, perhaps by one that is no more
            self._socket.send_multipart([identity, _AGAIN])
            return
        self._heard[node] = time.monotonic()
        if kind == _FRAME and len(parts) == 2:
            self._bring(node, *parts)
            return
        said = parts[0] if len(parts) == 1 else b""
        if kind == _BEAT and (sign := _sign_of(said)) is not None:
            self._silent[node] = sign
        elif kind == _HELLO:
            pass  # it was said again before the answer came
        elif kind == _STACKS and (told := _stacks_of(said)) is not None:
            self._told[node] = told
        elif kind == _LOST and said:
            self._lose(f"node {node}: {printable(said.decode(errors='replace'), 300)}")
        else:
            self._lose(f"node {node} said what the leader does not understand")

    def _bring(self, node: int, number: bytes, frame: bytes) -> None:
        """What an engine of that node says to its front."""
        replica = int(number) if len(number) < 6 and number.isdigit() else -1
        if replica in self._fronts and self._parallel.node_of(replica) == node:
            self._fronts[replica].send(frame)

    def _look(self, now: float) -> None:
        for node, heard in self._heard.items():
            if now - heard > SILENT_S:
                self._lose(f"node {node} has not been heard of for {now - heard:.1f} s")

    def _lose(self, what: str) -> None:
        if self._is_closing or self._lost:
            return
        self._lost = what
        log.error("%s", what)
        if self._on_death is not None:
            self._on_death(what)


class Leader:
    """The leader, as another node sees it."""

    def __init__(self, address: str, secret: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # whoever waits for room hears nothing
        self._socket.curve_publickey, self._socket.curve_secretkey = keys_of(secret, "node")
        self._socket.curve_serverkey, _ = keys_of(secret, "leader")
        self._socket.connect(f"tcp://{address}")

    def say(self, kind: bytes, *parts: bytes) -> None:
        self._socket.send_multipart([kind, *parts])

    def hear(self, timeout_s: float, beside: Collection[FrameSocket] = ()) -> list[bytes] | None:
        """What the leader says next; None when it says nothing for so long, or when there is
        something at one of the sockets `beside`."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poll_along(poller, beside)
        ready = dict(poller.poll(int(timeout_s * 1000)))
        return self._socket.recv_multipart() if self._socket in ready else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()
        self._context.term()


class _LeaderGone(DeviceError):
    """The engine that this node has kept ranks for is no more; another one may come."""


def serve_node(
    parallel: ParallelConfig, secret: str, mine: Hello, own_path: str, comes_again: bool = True
) -> None:
    """Keep this node's ranks for the leader until it ends.

    Args:
        own_path: where the model lies on this machine.
        comes_again: when the leader's engine is lost, wait for the one that takes its place.

    Raises:
        DeviceError: the leader does not answer, turns this node away or is lost, or a rank died.
    """
    while True:
        try:
            with Leader(parallel.meeting, secret) as leader:
                duties, meeting = _meet(leader, parallel, mine)
                duties = [
                    replace(
                        process_spec,
                        model_config=replace(process_spec.model_config, path=own_path),
                        secret=secret,
                    )
                    for process_spec in duties
                ]
                if duties[0].role == ENGINE:
                    kept: LocalProcesses = LocalEngines(duties)
                else:
                    kept = LocalRanks(ranks_of(parallel, parallel.node), duties[0], meeting)
                _keep(kept, leader)
            return
        except _LeaderGone as gone:
            if not comes_again:
                raise
            log.warning("%s: the node comes again", gone)


def _meet(leader: Leader, parallel: ParallelConfig, mine: Hello) -> tuple[list[ProcessSpec], str]:
    """Say who this is until the leader says what to do: (duties, where ranks meet)."""
    log.info("node %d of %d waits for %s", mine.node, mine.nodes, parallel.meeting)
    deadline = time.monotonic() + parallel.meet_timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        leader.say(_HELLO, msgspec.json.encode(mine))
        said = leader.hear(min(left_s, _HELLO_S))
        if said is None:
            continue
        if said[0] == _REFUSED:
            reason = printable(said[1].decode(errors="replace"), 300)
            raise DeviceError(f"the leader turned this node away: {reason}")
        if said[0] == _START:
            return msgspec.msgpack.decode(said[1], type=tuple[list[ProcessSpec], str])
        if said[0] == _AGAIN:
            time.sleep(_BEAT_S)
    raise DeviceError(
        f"the leader at {parallel.meeting} did not answer within {parallel.meet_timeout_s:g} s",
        hint="is node 0 started, is its --dist-init-addr the same, and its secret?",
    )


class LocalProcesses(Protocol):
    """Processes that a node keeps: `LocalRanks`, `LocalEngines`."""

    kind: str
    """What they are."""

    @property
    def numbers(self) -> list[int]: ...

    @property
    def speaking(self) -> Mapping[int, FrameSocket]:
        """Where those of them speak whom the leader hears."""
        ...

    def watch(self, on_death: Callable[[str], None]) -> None: ...
    def silence(self) -> tuple[int, float]: ...
    def stacks(self) -> list[tuple[int, str]]: ...
    def send(self, rank: int, frame: bytes) -> None: ...
    def close(self) -> None: ...


def _keep(kept: LocalProcesses, leader: Leader) -> None:
    """Pass frames on, and say that the processes live."""
    died: list[str] = []
    kept.watch(died.append)
    numbers = ", ".join(map(str, kept.numbers))
    log.info("%s %s run here; requests go to node 0", kept.kind, numbers)
    heard, beat_at = time.monotonic(), 0.0
    try:
        while True:
            said = leader.hear(_BEAT_S / 2, kept.speaking.values())
            now = time.monotonic()
            if said is not None:
                heard = now
                if said[0] == _END:
                    return
                if said[0] == _AGAIN:
                    raise _LeaderGone("the leader's engine has ended")
                if said[0] == _FRAME:
                    kept.send(int(said[1]), said[2])
                if said[0] == _TELL:
                    told = [(rank, text[:_MAX_STACK]) for rank, text in kept.stacks()]
                    leader.say(_STACKS, msgspec.json.encode(told))
            for number, frame in frames_of(kept.speaking):
                leader.say(_FRAME, b"%d" % number, frame)
            if died:
                leader.say(_LOST, died[0].encode())
                raise _LeaderGone(died[0])
            if now - heard > SILENT_S:
                raise _LeaderGone(f"the leader has not been heard of for {now - heard:.1f} s")
            if now >= beat_at:
                beat_at = now + _BEAT_S
                leader.say(_BEAT, msgspec.json.encode(Sign(*kept.silence())))
    finally:
        kept.close()
