"""Agreement between replicas that work on one batch (data-parallel attention): the step clock.

Before a step each replica says what it brings, and all of them launch it when everybody has. One
that has nothing waits until another one asks, and goes along with a step without rows. Nobody
waits for an answer: words are sent and taken in between two rounds of the loop.

Knows replicas by their numbers, and nothing of what they compute.
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
_MAX_WORD_BYTES = 4096
_MAX_REASON = 300


class StepAgreement(Protocol):
    """Asked at every launch; the answer is the same on all replicas."""

    def agree(self, load: StepLoad) -> list[StepLoad] | None:
        """What every replica brings to the next step, this one `load`.

        returns: [] when none has any tokens, so that there is no such step; None while some have
        not told theirs: ask again with the same load.
        """
        ...


class _Word(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a replica tells the others, once for each step, and once when it leaves."""

    load: StepLoad | None = None
    """None: it ends."""
    reason: str = ""
    """Why it does; "" when it was told to."""


class Peer(Protocol):
    """The way to another replica, in whole words. No call waits."""

    def fileno(self) -> int:
        """Descriptor that polls readable while there is a word."""
        ...

    def hear(self) -> bytes:
        """One word; b"" when there will be none any more. BlockingIOError while there is none."""
        ...

    def say(self, word: bytes) -> None: ...
    def close(self) -> None: ...


class LocalPeer:
    """Of this machine: a connected socket that keeps words apart (SOCK_SEQPACKET)."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def hear(self) -> bytes:
        try:
            return self._socket.recv(_MAX_WORD_BYTES)
        except ConnectionResetError:
            return b""

    def say(self, word: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # `hear` says who has ended
            self._socket.send(word)

    def close(self) -> None:
        self._socket.close()


class StepClock:
    """One replica's end. Satisfies `StepAgreement`; used from the thread of the loop.

    Args:
        replica: the number of this one.
        peers: the way to each of the others, by number.
        timeout_s: how long the others may take to answer.
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
        self._heard: dict[int, deque[StepLoad]] = {number: deque() for number in peers}
        """Loads for this step, and for the next one from those who are ahead."""
        self._offered: StepLoad | None = None
        self._offered_s = 0.0
        self._left = -1
        """A replica that was told to end; -1 while none was."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_Word)
        self._epoll = select.epoll()
        for peer in peers.values():
            self._epoll.register(peer.fileno(), select.EPOLLIN)

    @property
    def poll_fd(self) -> int:
        """Descriptor that is readable while `receive` has something to take in."""
        return self._epoll.fileno()

    def receive(self) -> None:
        """Take in what the others have said.

        Raises:
            DeviceError: one of them has ended unasked.
        """
        for number, peer in list(self._peers.items()):
            with suppress(BlockingIOError):
                while number in self._peers:
                    self._hear(number, peer.hear())

    def agree(self, load: StepLoad) -> list[StepLoad] | None:
        """See `StepAgreement`.

        Raises:
            DeviceError: there is work, and one of the others has been told to end.
        """
        is_asked = any(self._heard.values())
        if self._offered is None:
            if not load.tokens and not is_asked:
                return []
            if self._left >= 0:
                raise DeviceError(f"replica {self._left} was stopped, and there is work for all")
            self._offered, self._offered_s = load, self._clock.now()
            self._tell(_Word(load))
        assert self._offered == load, f"{load} after {self._offered} was offered"
        if not all(self._heard.values()):
            return None
        self._offered = None
        heard = {number: loads.popleft() for number, loads in self._heard.items()}
        return [heard.get(number, load) for number in range(len(heard) + 1)]

    def check(self) -> None:
        """
        Raises:
            DeviceError: somebody has not answered in time.
        """
        waited_s = self._clock.now() - self._offered_s
        if self._offered is None or waited_s < self._timeout_s:
            return
        silent = [number for number, loads in self._heard.items() if not loads]
        raise DeviceError(
            f"replica {', '.join(map(str, silent))} did not answer the step clock of replica "
            f"{self._replica} within {self._timeout_s:g} s",
            hint="see its log; --dist-timeout is how long the others wait",
        )

    def close(self, reason: str = "") -> None:
        """Leave; the others are told why, "" when this replica was told to end."""
        self._tell(_Word(reason=reason[:_MAX_REASON]))
        self._epoll.close()
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _hear(self, number: int, said: bytes) -> None:
        word = self._decoder.decode(said) if said else _Word(reason="its process is gone")
        if word.load is not None:
            self._heard[number].append(word.load)
            return
        self._epoll.unregister(self._peers[number].fileno())
        self._peers.pop(number).close()
        if word.reason:
            raise DeviceError(
                f"replica {number} has ended: {printable(word.reason, _MAX_REASON)}",
                hint="replicas that share their feed-forward blocks end together",
            )
        self._left = number

    def _tell(self, word: _Word) -> None:
        told = self._encoder.encode(word)
        for peer in self._peers.values():
            peer.say(told)


def open_step_clock(meeting: str, replica: int, replicas: int, timeout_s: float) -> StepClock:
    """Meet the other replicas; returns when all have come.

    Args:
        meeting: file:///path, the same for all of them; sockets lie beside it.
        timeout_s: how long they may take, to come and later to answer.

    Raises:
        DeviceError: some did not come.
    """
    place = urlsplit(meeting).path
    last = time.monotonic() + timeout_s
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        path = Path(f"{place}.c{replica}")  # short: paths of sockets have a limit
        door.bind(f"{path}~")
        door.listen(replicas)
        os.rename(f"{path}~", path)  # whoever finds it can connect
        for number in range(replica):
            peers[number] = _connect(f"{place}.c{number}", replica, number, last, timeout_s)
        while len(peers) < replicas - 1:
            door.settimeout(max(0.0, last - time.monotonic()) or _LOOK_S)
            try:
                peer, _ = door.accept()
            except TimeoutError:
                missing = [n for n in range(replicas) if n != replica and n not in peers]
                raise absent(missing, timeout_s) from None
            peers[int.from_bytes(peer.recv(8), "little")] = peer
        path.unlink()
    return StepClock(replica, {n: LocalPeer(peer) for n, peer in peers.items()}, timeout_s)


def _connect(path: str, replica: int, number: int, last: float, timeout_s: float) -> socket.socket:
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            peer.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            peer.close()
            if time.monotonic() >= last:
                raise absent([number], timeout_s) from None
            time.sleep(_LOOK_S)
        else:
            peer.send(replica.to_bytes(8, "little"))
            return peer


def absent(missing: list[int], timeout_s: float) -> DeviceError:
    return DeviceError(
        f"replica {', '.join(map(str, missing))} did not come within {timeout_s:g} s",
        hint="see the log above: why did it not start?",
    )
