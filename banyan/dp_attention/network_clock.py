"""The step clock of replicas on several machines: its words go over the network, encrypted as what
nodes say to each other is (`engine/multi_node.py`).
"""

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import zmq

from banyan.base.errors import DeviceError
from banyan.dp_attention.step_clock import StepClock, absent
from banyan.engine.multi_node import keys_of

_LINGER_MS = 500
_MAX_WORD_BYTES = 4096


class FarPeer:
    """Satisfies `engine.lockstep.Peer`. One that is gone is silent here: the node that keeps it
    says so, and all replicas are ended.

    Args:
        pair: that the other one is, or will be, at the other end of.
    """

    def __init__(self, pair: "zmq.Socket[bytes]") -> None:
        self._pair = pair
        # As in messages/transport.py: the socket's own descriptor tells of edges, and `say` may
        # swallow
        # one, which another descriptor then tells instead.
        self._missed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._has_missed = False
        self._epoll = select.epoll()
        self._epoll.register(int(pair.getsockopt(zmq.FD)), select.EPOLLIN)
        self._epoll.register(self._missed, select.EPOLLIN)
        self._note()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def hear(self) -> bytes:
        if self._has_missed:
            self._has_missed = False
            os.eventfd_read(self._missed)
        try:
            return self._pair.recv(zmq.NOBLOCK)
        except zmq.Again:
            raise BlockingIOError from None

    def say(self, word: bytes) -> None:
        with suppress(zmq.Again):  # it is gone
            self._pair.send(word, zmq.NOBLOCK)
        self._note()

    def close(self) -> None:
        self._epoll.close()
        os.close(self._missed)
        self._pair.close(linger=_LINGER_MS)

    def _note(self) -> None:
        """Tell of a word whose edge is gone."""
        if not self._has_missed and int(self._pair.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._has_missed = True
            os.eventfd_write(self._missed, 1)


def open_far_step_clock(
    host: str,
    replica: int,
    replicas: int,
    secret: str,
    timeout_s: float,
    tell: Callable[[str, str], None],
    ask: Callable[[str], str],
) -> StepClock:
    """Meet the replicas of all machines; returns when all have come.

    Args:
        host: the address of this machine that the others know.
        secret: what the nodes have in common.
        tell: let all of them know a text under a name.
        ask: the text under a name; waits for it.

    Raises:
        DeviceError: the others cannot be listened for, or some did not come.
    """
    bound: dict[int, zmq.Socket[bytes]] = {}
    public, private = keys_of(secret, "clock")
    peers: dict[int, FarPeer] = {}
    for other in range(replica + 1, replicas):
        pair = _pair()
        pair.curve_publickey, pair.curve_secretkey, pair.curve_server = public, private, True
        try:
            port = pair.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            raise DeviceError(
                f"replica {replica} cannot listen at {host} for others: {error}"
            ) from None
        tell(f"clock {replica} {other}", f"tcp://{host}:{port}")
        bound[other] = pair
    for other in range(replica):
        pair = _pair()
        pair.curve_publickey, pair.curve_secretkey = zmq.curve_keypair()
        pair.curve_serverkey = public
        pair.connect(ask(f"clock {other} {replica}"))
        pair.send(b"")
        peers[other] = FarPeer(pair)
    last = time.monotonic() + timeout_s
    for other, pair in bound.items():  # who has not come cannot be told anything
        if not pair.poll(max(0, int(1000 * (last - time.monotonic())))):
            raise absent([other], timeout_s)
        pair.recv()
        peers[other] = FarPeer(pair)
    return StepClock(replica, peers, timeout_s)


def _pair() -> "zmq.Socket[bytes]":
    context = cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
    pair = context.socket(zmq.PAIR)
    pair.setsockopt(zmq.MAXMSGSIZE, _MAX_WORD_BYTES)
    return pair
