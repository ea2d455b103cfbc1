"""Links: how messages and events travel between one front and one engine.

Two kinds with one face: `zmq_pair` between processes (frames of messages/wire.py over a unix
socket in a private folder), `local_pair` between threads of one process (the objects themselves).
Knows frames and wake-ups, and nothing of what the messages mean. Frames that do not decode are
dropped and counted, never raised.
"""

import asyncio
import contextlib
import fcntl
import os
import select
import shutil
import stat
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import zmq

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.messages.events import Event
from banyan.messages.repeats import Receiver, Sender
from banyan.messages.requests import Message
from banyan.messages.wire import (
    MAX_FRAME_BYTES,
    Codec,
    WireError,
    event_codec,
    message_codec,
)

log = logger(__name__)

T = TypeVar("T")

_LINGER_MS = 1000
"""How long a closing engine waits for its last words (Fatal) to leave."""

_FOLDER = "banyan-link-"
_MAX_PATH = 107
"""Bytes of the path of a socket (Linux: unix(7), sun_path)."""
_MAX_NAME = len("joined.c99~")
"""The longest name of a socket in a folder (engine/lockstep.py)."""
_SHORT = "/tmp"
"""Where folders lie where that of temporary files is too deep for sockets."""
_FRESH_S = 60.0
"""A folder younger than this may be one that is about to be locked."""

_NO_PEER_S = 0.01
"""How often a front that has no engine yet tries to send."""

_READABLE = int(zmq.POLLIN)


class FrontLink(Protocol):
    """The front's end; used from one event loop."""

    dropped: int
    """Frames thrown away because they did not decode."""

    async def send(self, messages: list[Message]) -> None: ...

    async def receive(self) -> list[Event]:
        """Wait for events; returns at least one."""
        ...

    def close(self) -> None: ...


class EngineLink(Protocol):
    """The engine's end; used from the thread of its loop. No call waits."""

    dropped: int
    """Frames thrown away because they did not decode, or for which there is no peer."""

    def poll_fd(self) -> int:
        """Descriptor that polls readable while `receive` may have something (or falsely)."""
        ...

    def receive(self) -> list[Message]:
        """Everything that has arrived, in order; [] when nothing has."""
        ...

    def send(self, events: list[Event]) -> None: ...

    def close(self) -> None: ...


# Between threads of one process


class _Mailbox(Generic[T]):
    """A queue from one thread to another whose descriptor is readable while it is not empty.

    The descriptor is closed when both ends have let go of the mailbox, so that a late `put` of one
    end can never write to a number that means something else by then.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)

    def put(self, items: list[T]) -> None:
        if items:
            self._items.extend(items)
            os.eventfd_write(self.fd, 1)

    def take(self) -> list[T]:
        # The descriptor is cleared first: an item that comes after it raises it again.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return [self._items.popleft() for _ in range(len(self._items))]


class LocalFrontLink:
    """FrontLink to an engine thread of this process."""

    def __init__(self, outgoing: _Mailbox[Message], incoming: _Mailbox[Event]) -> None:
        self.dropped = 0
        self._outgoing = outgoing
        self._incoming = incoming
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()

    async def send(self, messages: list[Message]) -> None:
        self._outgoing.put(messages)

    async def receive(self) -> list[Event]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._incoming.fd, self._wake)
        while True:
            self._woken.clear()
            if events := self._incoming.take():
                return events
            await self._woken.wait()

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._incoming.fd)

    def _wake(self) -> None:
        # Lowered here as well, else a descriptor nobody is reading would spin the event loop.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._incoming.fd)
        self._woken.set()


class LocalEngineLink:
    """EngineLink to a front in this process."""

    def __init__(self, incoming: _Mailbox[Message], outgoing: _Mailbox[Event]) -> None:
        self.dropped = 0
        self._incoming = incoming
        self._outgoing = outgoing

    def poll_fd(self) -> int:
        return self._incoming.fd

    def receive(self) -> list[Message]:
        return self._incoming.take()

    def send(self, events: list[Event]) -> None:
        self._outgoing.put(events)

    def close(self) -> None:
        """Nothing to release: the mailboxes go with their last holder."""


def local_pair() -> tuple[LocalFrontLink, LocalEngineLink]:
    """Both ends of a link inside this process."""
    messages: _Mailbox[Message] = _Mailbox()
    events: _Mailbox[Event] = _Mailbox()
    return LocalFrontLink(messages, events), LocalEngineLink(messages, events)


# Between processes


class PrivateFolder:
    """A folder that only this user may enter (mode 0700), for the sockets of one server.

    It is locked while its process lives. A process that was killed leaves it; whoever knows that
    takes it away (`remove_folders_of`), or else the next one to make a folder.

    Raises:
        ConfigError: there is no place whose path is short enough for sockets.
    """

    def __init__(self) -> None:
        place = _place()
        if place != tempfile.gettempdir():
            log.info("sockets lie in %s: %s is too deep for them", place, tempfile.gettempdir())
        self.path = tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=place)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        _sweep(Path(self.path).parent)

    def address(self, name: str) -> str:
        """ZMQ address of the socket called `name` in this folder."""
        return f"ipc://{self.path}/{name}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_folders_of(pid: int) -> None:
    """Remove the private folders of a process of this machine that has ended."""
    _sweep(Path(_place()), str(pid), 0.0)


def _place() -> str:
    """The folder of temporary files, or another one if sockets in it had too long a path."""
    usual = tempfile.gettempdir()
    most = _MAX_PATH - _MAX_NAME - len(f"/{_FOLDER}4194304-12345678/")
    if len(os.fsencode(usual)) <= most:
        return usual
    if os.access(_SHORT, os.W_OK | os.X_OK):
        return _SHORT
    raise ConfigError(
        f"the folder of temporary files, {usual}, has a path of {len(os.fsencode(usual))} bytes: "
        f"sockets in it have at most {_MAX_PATH}, which leaves {most}, and {_SHORT} cannot be used",
        hint="set TMPDIR to a folder with a shorter path",
    )


def _sweep(place: Path, pid: str = "[0-9]*", fresh_s: float = _FRESH_S) -> None:
    """Remove the folders of processes that were killed: of this user, and locked by nobody."""
    for path in place.glob(f"{_FOLDER}{pid}-????????"):
        with contextlib.suppress(OSError):  # others come and go meanwhile
            found = path.lstat()
            is_mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if not is_mine or time.time() - found.st_mtime < fresh_s:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def pair_socket(context: zmq.Context["zmq.Socket[bytes]"]) -> "zmq.Socket[bytes]":
    """An end of a link, or of what passes its frames on."""
    made = context.socket(zmq.PAIR)
    # No high-water mark: streams are bounded per request by the client, which aborts slow readers.
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return made


class _Socket:
    """One end of a pair of sockets. Its descriptor tells of edges: whoever sees it readable must
    ask `has_frame` until there is none, and again after every `send`, which may swallow an edge.
    """

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.zmq = pair_socket(self.context)

    def has_frame(self) -> bool:
        return bool(int(self.zmq.getsockopt(zmq.EVENTS)) & _READABLE)

    def take(self, codec: Codec[T]) -> tuple[list[T], int]:
        """What has arrived, in order, and the number of frames that did not decode."""
        items: list[T] = []
        dropped = 0
        while self.has_frame():
            frame = self.zmq.recv(zmq.NOBLOCK)
            try:
                items += codec.decode(frame)
            except WireError as error:
                dropped += 1
                log.warning("dropped a frame error=%s", error)
        return items, dropped

    def send(self, frame: bytes) -> bool:
        """False when there is no peer to take it."""
        try:
            self.zmq.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int) -> None:
        self.zmq.close(linger=linger_ms)
        self.context.term()


class ZmqFrontLink:
    """FrontLink to an engine in another process. Binds, so that the engine may start later."""

    def __init__(self, address: str) -> None:
        self.dropped = 0
        self._encoder = message_codec()
        self._decoder = event_codec()
        self._repeats = Sender()
        self._socket = _Socket()
        self._socket.zmq.bind(address)
        self._fd = int(self._socket.zmq.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()

    async def send(self, messages: list[Message]) -> None:
        for frame in _frames(self._encoder, [self._repeats.packed(m) for m in messages]):
            while not self._socket.send(frame):
                await asyncio.sleep(_NO_PEER_S)
        self._wake()

    async def receive(self) -> list[Event]:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._wake)
        while True:
            self._woken.clear()
            events, dropped = self._socket.take(self._decoder)
            self.dropped += dropped
            if events:
                return events
            await self._woken.wait()

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._socket.close(linger_ms=0)

    def _wake(self) -> None:
        if self._socket.has_frame():
            self._woken.set()


class ZmqEngineLink:
    """EngineLink to a front in another process. Connects; what it sends early waits there."""

    def __init__(self, address: str) -> None:
        self.dropped = 0
        self._encoder = event_codec()
        self._decoder = message_codec()
        self._repeats = Receiver()
        self._socket = _Socket()
        self._socket.zmq.connect(address)
        # The socket's own descriptor signals edges, and sending may swallow one. Together with an
        # event descriptor that `send` raises in that case, the epoll descriptor is level again.
        self._missed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._has_missed = False
        self._epoll = select.epoll()
        self._epoll.register(int(self._socket.zmq.getsockopt(zmq.FD)), select.EPOLLIN)
        self._epoll.register(self._missed, select.EPOLLIN)

    def poll_fd(self) -> int:
        return self._epoll.fileno()

    def receive(self) -> list[Message]:
        if self._has_missed:
            self._has_missed = False
            os.eventfd_read(self._missed)
        packed, dropped = self._socket.take(self._decoder)
        found = [self._repeats.unpacked(message) for message in packed]
        messages = [message for message in found if message is not None]
        if len(messages) < len(packed):
            log.warning("dropped %d requests of an unknown text", len(packed) - len(messages))
        self.dropped += dropped + len(packed) - len(messages)
        return messages

    def send(self, events: list[Event]) -> None:
        for frame in _frames(self._encoder, events):
            self.dropped += not self._socket.send(frame)
        if not self._has_missed and self._socket.has_frame():
            self._has_missed = True
            os.eventfd_write(self._missed, 1)

    def close(self) -> None:
        self._epoll.close()
        os.close(self._missed)
        self._socket.close(linger_ms=_LINGER_MS)


def zmq_pair(address: str) -> tuple[ZmqFrontLink, ZmqEngineLink]:
    """Both ends over one ipc address; two processes make one end each with the same address."""
    return ZmqFrontLink(address), ZmqEngineLink(address)


def _frames(codec: Codec[T], items: list[T]) -> Iterator[bytes]:
    """Encode `items` into as few legal frames as possible."""
    if not items:
        return
    frame = codec.encode(items)
    if len(frame) <= MAX_FRAME_BYTES or len(items) == 1:
        yield frame
        return
    half = len(items) // 2
    yield from _frames(codec, items[:half])
    yield from _frames(codec, items[half:])
