"""Gates: stand between decode servers and the ports where prefill servers hand over, read the
frames that pass, and hold one of them at a state of the protocol, so that something can be struck.
"""

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field

from banyan.disaggregation import wire

_GREETING_BYTES = len(wire.GREETING) + 16
_HEAD, _CODE_BYTES = struct.Struct("<IB"), 16
STATES = {
    "asked": (False, wire.SEEK, 1),
    "found": (True, wire.FOUND, 1),
    "wanted": (False, wire.WANT, 1),
    "a page": (True, wire.PAGE, 3),
    "the first token": (True, wire.HANDOFF, 1),
    "taken": (False, wire.DONE, 1),
}
"""Which frame is held: whether the giver says it, its kind, and the how-manieth of its kind."""
BY_ENGINE = STATES | {"a page": (True, wire.SENT, 1)}
"""The same where an engine carries pages: they have landed, and their codes come."""


@dataclass
class Held:
    """One connection of which a frame is held."""

    gate: int
    ends: tuple[socket.socket, socket.socket]
    release: threading.Event = field(default_factory=threading.Event)
    """Goes on, as far as it can."""
    spoils: bool = False
    """A bit of the frame is turned over."""

    def cut(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.release.set()


class Gates:
    """One port before each of the ports that are given.

    Args:
        states: which frame is which state.
    """

    def __init__(
        self, targets: list[int], states: dict[str, tuple[bool, int, int]] = STATES
    ) -> None:
        self._states = states
        self._lock = threading.Lock()
        self._armed = ""
        self.held: Held | None = None
        self.reached = threading.Event()
        self._sockets = [socket.create_server(("127.0.0.1", 0)) for _ in targets]
        self.ports = [int(s.getsockname()[1]) for s in self._sockets]
        for at, target in enumerate(targets):
            threading.Thread(target=self._accept, args=(at, target), daemon=True).start()

    def arm(self, state: str) -> None:
        """Hold the next connection that comes to this state."""
        self.reached.clear()
        self.held, self._armed = None, state

    def close(self) -> None:
        for listening in self._sockets:
            listening.close()

    def _accept(self, at: int, target: int) -> None:
        while True:
            try:
                near, _ = self._sockets[at].accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", target))
            except OSError:
                near.close()
                continue
            for source, sink, gives in ((near, far, False), (far, near, True)):
                given = (at, source, sink, gives)
                threading.Thread(target=self._pass, args=given, daemon=True).start()

    def _pass(self, at: int, source: socket.socket, sink: socket.socket, gives: bool) -> None:
        seen: dict[int, int] = {}
        try:
            with source.makefile("rb") as stream:
                sink.sendall(_whole(stream.read(_GREETING_BYTES), _GREETING_BYTES))
                while head := stream.read(_HEAD.size):
                    size, kind = _HEAD.unpack(_whole(head, _HEAD.size))
                    rest = _whole(stream.read(size + _CODE_BYTES), size + _CODE_BYTES)
                    seen[kind] = seen.get(kind, 0) + 1
                    held = self._hold(at, source, sink, (gives, kind, seen[kind]))
                    if held is not None:
                        held.release.wait()
                        if held.spoils:
                            rest = bytes((rest[0] ^ 1,)) + rest[1:]
                    sink.sendall(head + rest)
        except (OSError, EOFError):
            pass
        finally:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _hold(
        self, at: int, source: socket.socket, sink: socket.socket, frame: tuple[bool, int, int]
    ) -> Held | None:
        with self._lock:
            if not self._armed or self._states[self._armed] != frame:
                return None
            self._armed = ""
            self.held = Held(at, (source, sink))
        self.reached.set()
        return self.held


def _whole(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise EOFError
    return data
