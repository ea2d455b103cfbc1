"""The step clock of DP attention: agreement between replicas that compute one batch together.

Before a step each replica announces its load (numbers of rows and tokens). All launch the step when
all loads are known. An idle replica announces nothing until another one does, and then takes part
without rows. No call blocks: the loop sends and receives announcements between its iterations.
"""

import os
import select
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from banyan.base.clock import Clock, WallClock
from banyan.base.errors import DeviceError
from banyan.base.log import printable
from banyan.messages.plan import StepLoad

_LOOK_S = 0.01
_MAX_MESSAGE_BYTES = 4096
_MAX_REASON = 300


class StepAgreement(Protocol):
    """Consulted at every launch; the result is the same on all replicas."""

    def agree(self, load: StepLoad) -> list[StepLoad] | None:
        """Announce this replica's load of the next step.

        Returns:
            The loads of all replicas; [] if no replica has tokens, so there is no step; None if
            some loads are not known yet: call again with the same load.
        """
        ...


class _Announcement(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Sent to the other replicas once per step, and once when a replica ends."""

    load: StepLoad | None = None
    """None: the replica ends."""
    reason: str = ""
    """Why it ends; "" = it was stopped."""


class Peer(Protocol):
    """A connection to another replica that carries whole messages. No call blocks."""

    def fileno(self) -> int:
        """Descriptor that polls readable while there is a message."""
        ...

    def receive(self) -> bytes:
        """One message; b"" at the end of the connection.

        Raises:
            BlockingIOError: there is no message now.
        """
        ...

    def send(self, message: bytes) -> None: ...
    def close(self) -> None: ...


class LocalPeer:
    """A replica on this machine, over a socket that keeps messages apart (SOCK_SEQPACKET)."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> bytes:
        try:
            return self._socket.recv(_MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            return b""

    def send(self, message: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `receive` reports the end
            self._socket.send(message)

    def close(self) -> None:
        self._socket.close()


class StepClock:
    """One replica's end. Satisfies `StepAgreement`; used from the loop's thread.

    Args:
        replica: number of this replica.
        peers: connections to the others, by number.
        timeout_s: longest wait for the other loads of a step.
    """

    def __init__(
        self,
        replica: int,
        peers: Mapping[int, Peer],
        timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        self._replica = replica
        self._peers = dict(peers)
        self._timeout_s = timeout_s
        self._clock = clock or WallClock()
        self._received: dict[int, deque[StepLoad]] = {number: deque() for number in peers}
        """Loads of this step; also of the next one, from replicas that are a step further."""
        self._offered: StepLoad | None = None
        self._offered_s = 0.0
        self._stopped: int | None = None
        """A replica that was stopped."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Announcement)
        self._epoll = select.epoll()
        for peer in peers.values():
            self._epoll.register(peer.fileno(), select.EPOLLIN)

    @property
    def poll_fd(self) -> int:
        """Descriptor that is readable while `receive` has something to read."""
        return self._epoll.fileno()

    def receive(self) -> None:
        """Read the announcements of the others.

        Raises:
            DeviceError: a replica has ended unexpectedly.
        """
        for number, peer in list(self._peers.items()):
            with suppress(BlockingIOError):
                while number in self._peers:
                    self._take(number, peer.receive())

    def agree(self, load: StepLoad) -> list[StepLoad] | None:
        """See `StepAgreement`.

        Raises:
            DeviceError: there is work, but another replica was stopped.
        """
        others_have_work = any(self._received.values())
        if self._offered is None:
            if not load.tokens and not others_have_work:
                return []
            if self._stopped is not None:
                raise DeviceError(f"replica {self._stopped} was stopped, and there is work for all")
            self._offered, self._offered_s = load, self._clock.now()
            self._announce(_Announcement(load))
        assert self._offered == load, f"{load} after {self._offered} was offered"
        if not all(self._received.values()):
            return None
        self._offered = None
        loads_of = {number: loads.popleft() for number, loads in self._received.items()}
        return [loads_of.get(number, load) for number in range(len(loads_of) + 1)]

    def check(self) -> None:
        """Enforce the time limit.

        Raises:
            DeviceError: a replica has not announced its load in time.
        """
        waited_s = self._clock.now() - self._offered_s
        if self._offered is None or waited_s < self._timeout_s:
            return
        silent = [number for number, loads in self._received.items() if not loads]
        raise DeviceError(
            f"replica {', '.join(map(str, silent))} did not answer the step clock of replica "
            f"{self._replica} within {self._timeout_s:g} s",
            hint="see its log; --dist-timeout is how long the others wait",
        )

    def close(self, reason: str = "") -> None:
        """End this replica's part. reason: sent to the others; "" if this replica was stopped."""
        self._announce(_Announcement(reason=reason[:_MAX_REASON]))
        self._epoll.close()
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _take(self, number: int, message: bytes) -> None:
        announced = _Announcement(reason="its process is gone")
        if message:
            announced = self._decoder.decode(message)
        if announced.load is not None:
            self._received[number].append(announced.load)
            return
        self._epoll.unregister(self._peers[number].fileno())
        self._peers.pop(number).close()
        if announced.reason:
            raise DeviceError(
                f"replica {number} has ended: {printable(announced.reason, _MAX_REASON)}",
                hint="replicas that share their feed-forward blocks end together",
            )
        self._stopped = number

    def _announce(self, announcement: _Announcement) -> None:
        message = self._encoder.encode(announcement)
        for peer in self._peers.values():
            peer.send(message)


def open_step_clock(meeting: str, replica: int, replicas: int, timeout_s: float) -> StepClock:
    """Connect to the other replicas on this machine; returns when all have come.

    Args:
        meeting: file:///path, the same for all replicas; the sockets are created next to it.
        timeout_s: limit for coming, and later for every announcement.

    Raises:
        DeviceError: some replicas did not come.
    """
    place = urlsplit(meeting).path
    deadline = time.monotonic() + timeout_s
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        path = Path(f"{place}.c{replica}")  # short: socket paths have a limit
        listener.bind(f"{path}~")
        listener.listen(replicas)
        os.rename(f"{path}~", path)  # once it has this name it accepts
        for number in range(replica):
            peers[number] = _connect(f"{place}.c{number}", replica, number, deadline, timeout_s)
        while len(peers) < replicas - 1:
            listener.settimeout(max(0.0, deadline - time.monotonic()) or _LOOK_S)
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                missing = [n for n in range(replicas) if n != replica and n not in peers]
                raise missing_replicas(missing, timeout_s) from None
            peers[int.from_bytes(peer.recv(8), "little")] = peer
        path.unlink()
    return StepClock(replica, {n: LocalPeer(peer) for n, peer in peers.items()}, timeout_s)


def _connect(
    path: str, replica: int, number: int, deadline: float, timeout_s: float
) -> socket.socket:
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            peer.close()
            if time.monotonic() >= deadline:
                raise missing_replicas([number], timeout_s) from None
            time.sleep(_LOOK_S)
        else:
            peer.send(replica.to_bytes(8, "little"))
            return peer


def missing_replicas(missing: list[int], timeout_s: float) -> DeviceError:
    return DeviceError(
        f"replica {', '.join(map(str, missing))} did not come within {timeout_s:g} s",
        hint="see the log above: why did it not start?",
    )
