"""The step clock of DP attention over several machines: messages over encrypted ZeroMQ sockets, as
between nodes (`engine/multi_node.py`).
"""

import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import zmq

from banyan.base.errors import DeviceError
from banyan.base.thread_pool import WakeEvent
from banyan.dp_attention.step_clock import StepClock, missing_replicas
from banyan.engine.multi_node import GREETING_MS, keys_of

_LINGER_MS = 500
_MAX_MESSAGE_BYTES = 4096


class NetworkPeer:
    """A replica on another machine. Satisfies `dp_attention.step_clock.Peer`.

    The end of a remote replica does not show here: its node reports it, and all replicas end.

    Args:
        pair: connected to the other replica, or to be connected by it.
    """

    def __init__(self, pair: "zmq.Socket[bytes]") -> None:
        self._pair = pair
        # A ZeroMQ descriptor is edge-triggered, and `send` may consume an edge. `_missed` then
        # keeps this peer readable.
        self._missed = WakeEvent()
        self._has_missed = False
        self._epoll = select.epoll()
        self._epoll.register(int(pair.getsockopt(zmq.FD)), select.EPOLLIN)
        self._epoll.register(self._missed.fd, select.EPOLLIN)
        self._check_missed()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def receive(self) -> bytes:
        if self._has_missed:
            self._has_missed = False
            self._missed.clear()
        try:
            return self._pair.recv(zmq.NOBLOCK)
        except zmq.Again:
            raise BlockingIOError from None

    def send(self, message: bytes) -> None:
        with suppress(zmq.Again):  # the other replica is gone
            self._pair.send(message, zmq.NOBLOCK)
        self._check_missed()

    def close(self) -> None:
        self._epoll.close()
        self._missed.close()
        self._pair.close(linger=_LINGER_MS)

    def _check_missed(self) -> None:
        """Stay readable if a message is waiting whose edge is gone."""
        if not self._has_missed and int(self._pair.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._has_missed = True
            self._missed.wake()


def open_network_clock(
    host: str,
    replica: int,
    replicas: int,
    secret: str,
    timeout_s: float,
    publish: Callable[[str, str], None],
    lookup: Callable[[str], str],
) -> StepClock:
    """Connect to the replicas on all machines; returns when all have come.

    Args:
        host: address of this machine that the others can reach.
        secret: shared by the nodes.
        publish: make a text known to all replicas under a name.
        lookup: the text under a name; waits for it.

    Raises:
        DeviceError: no port could be opened, or some replicas did not come.
    """
    bound: dict[int, zmq.Socket[bytes]] = {}
    public, private = keys_of(secret, "clock")
    peers: dict[int, NetworkPeer] = {}
    for other in range(replica + 1, replicas):
        pair = _pair()
        pair.curve_publickey, pair.curve_secretkey, pair.curve_server = public, private, True
        try:
            port = pair.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            raise DeviceError(
                f"replica {replica} cannot listen at {host} for others: {error}"
            ) from None
        publish(f"clock {replica} {other}", f"tcp://{host}:{port}")
        bound[other] = pair
    for other in range(replica):
        pair = _pair()
        pair.curve_publickey, pair.curve_secretkey = zmq.curve_keypair()
        pair.curve_serverkey = public
        pair.connect(lookup(f"clock {other} {replica}"))
        pair.send(b"")
        peers[other] = NetworkPeer(pair)
    deadline = time.monotonic() + timeout_s
    for other, pair in bound.items():  # a send to a replica that has not come would be lost
        if not pair.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            raise missing_replicas([other], timeout_s)
        pair.recv()
        peers[other] = NetworkPeer(pair)
    return StepClock(replica, peers, timeout_s)


def _pair() -> "zmq.Socket[bytes]":
    context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
    pair = context.socket(zmq.PAIR)
    pair.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    pair.setsockopt(zmq.HANDSHAKE_IVL, GREETING_MS)
    return pair
