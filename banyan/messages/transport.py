"""Links: transport of messages and events between an API process and an engine.

Two kinds with one interface: `socket_pair` between processes (frames of messages/frames.py over a
unix socket in a private folder), `local_pair` between threads of one process (the objects
themselves). No call waits and no extra thread is needed: the sender wakes the receiver, which
reads in its wake-up callback. Frames that do not decode are dropped and counted, never raised.
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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from banyan.base.errors import ConfigError
from banyan.base.log import logger
from banyan.base.thread_pool import WakeEvent
from banyan.messages.events import Event
from banyan.messages.frames import (
    MAX_FRAME_BYTES,
    Codec,
    FrameSocket,
    WireError,
    event_codec,
    message_codec,
)
from banyan.messages.requests import Generate, Message

log = logger(__name__)

T = TypeVar("T")

_LINGER_S = 1.0
"""Seconds that a closing engine waits for its last message (Fatal) to leave."""

_FOLDER = "banyan-link-"
_MAX_PATH = 107
"""Bytes of the path of a socket (Linux: unix(7), sun_path)."""
_MAX_NAME = len("joined.c99~")
"""The longest name of a socket in a folder (dp_attention/step_clock.py)."""
_SHORT = "/tmp"
"""Place of the folders if the path of temporary files is too long for sockets."""
_FRESH_S = 60.0
"""A younger folder may be about to be locked."""


class FrontLink(Protocol):
    """The API process's end; used from one event loop. No call waits."""

    dropped: int
    """Dropped frames: they did not decode, or there is no peer."""

    def send(self, messages: list[Message]) -> None: ...

    def listen(self, on_readable: Callable[[], None] | None) -> None:
        """Call `on_readable` on the running loop while `receive` may return something; None =
        stop."""
        ...

    def receive(self) -> list[Event]:
        """Everything that has arrived, in order."""
        ...

    def close(self) -> None: ...


class EngineLink(Protocol):
    """The engine's end; used from the thread of its loop. No call waits."""

    dropped: int
    """Dropped frames: they did not decode, or there is no peer."""

    def poll_fd(self) -> int:
        """Descriptor that is readable while `receive` may return something (sometimes falsely)."""
        ...

    def receive(self) -> list[Message]:
        """Everything that has arrived, in order."""
        ...

    def send(self, events: list[Event]) -> None: ...

    def close(self) -> None: ...


# Between threads of one process


class _Mailbox(Generic[T]):
    """A queue from one thread to another whose descriptor is readable while it is not empty.

    The descriptor is closed when both ends have released the mailbox. So a late `put` never writes
    to a reused descriptor number.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wake = WakeEvent()
        self.fd = self._wake.fd
        weakref.finalize(self, self._wake.close)

    def put(self, items: list[T]) -> None:
        if items:
            self._items.extend(items)
            self._wake.wake()

    def take(self) -> list[T]:
        # The descriptor is cleared first: a later item sets it again.
        self._wake.clear()
        return [self._items.popleft() for _ in range(len(self._items))]


class LocalFrontLink:
    """FrontLink to an engine in a thread of this process."""

    def __init__(self, outgoing: _Mailbox[Message], incoming: _Mailbox[Event]) -> None:
        self.dropped = 0
        self._outgoing = outgoing
        self._incoming = incoming
        self._loop: asyncio.AbstractEventLoop | None = None

    def send(self, messages: list[Message]) -> None:
        self._outgoing.put(messages)

    def listen(self, on_readable: Callable[[], None] | None) -> None:
        self.close()
        if on_readable is not None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._incoming.fd, on_readable)

    def receive(self) -> list[Event]:
        return self._incoming.take()

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._incoming.fd)
        self._loop = None


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
        """Nothing to release: the mailboxes are freed with their last owner."""


def local_pair() -> tuple[LocalFrontLink, LocalEngineLink]:
    """Both ends of a link inside this process."""
    messages: _Mailbox[Message] = _Mailbox()
    events: _Mailbox[Event] = _Mailbox()
    return LocalFrontLink(messages, events), LocalEngineLink(messages, events)


# Between processes


class PrivateFolder:
    """A folder that only this user may enter (mode 0700), for the sockets of one server.

    It is locked while its process lives. It remains after a killed process; `remove_folders_of`
    removes it, or the next process that makes a folder.

    Raises:
        ConfigError: no folder has a path short enough for sockets.
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
        """Address of the socket called `name` in this folder."""
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
    """The folder of temporary files, or /tmp if its path is too long for sockets."""
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
    """Remove folders of killed processes: owned by this user and unlocked."""
    for path in place.glob(f"{_FOLDER}{pid}-????????"):
        with contextlib.suppress(OSError):  # other processes may remove it meanwhile
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


class SocketFrontLink:
    """FrontLink to an engine process. Binds the socket, so the engine may start later."""

    def __init__(self, address: str) -> None:
        self.dropped = 0
        self._encoder = message_codec()
        self._decoder = event_codec()
        self._repeats = Sender()
        self._socket = FrameSocket.bound(address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_readable: Callable[[], None] = _nobody
        self._is_writing = False
        """The event loop watches for space in the kernel's buffer."""

    def send(self, messages: list[Message]) -> None:
        # No bound: streams are bounded per request by the client, which aborts slow readers.
        for frame in _frames(self._encoder, [self._repeats.packed(m) for m in messages]):
            self.dropped += not self._socket.send(frame)
        self._settle()

    def listen(self, on_readable: Callable[[], None] | None) -> None:
        self._let_go()
        if on_readable is not None:
            self._loop, self._on_readable = asyncio.get_running_loop(), on_readable
            self._loop.add_reader(self._socket.fileno(), self._come)
            self._settle()

    def receive(self) -> list[Event]:
        if self._socket.is_door:
            return []
        events, dropped = _decoded(self._decoder, self._socket.take())
        self.dropped += dropped
        if self._socket.is_over:
            self._let_go()
        return events

    def close(self) -> None:
        self._let_go()
        self._socket.close()

    def _come(self) -> None:
        """The engine connects, or data arrived from it."""
        if self._socket.is_door and self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.accept()
            self._loop.add_reader(self._socket.fileno(), self._come)
            self._settle()
        else:
            self._on_readable()

    def _settle(self) -> None:
        """Watch for space in the kernel's buffer while frames wait for it."""
        if self._loop is not None and self._socket.has_unsent != self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._loop.add_writer(self._socket.fileno(), self._go_on)
            else:
                self._loop.remove_writer(self._socket.fileno())

    def _go_on(self) -> None:
        self._socket.flush()
        self._settle()

    def _let_go(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            if self._is_writing:
                self._loop.remove_writer(self._socket.fileno())
        self._loop, self._is_writing = None, False


class SocketEngineLink:
    """EngineLink to an API process. Connects; early messages wait in the socket.

    Raises:
        OSError: nobody listens.
    """

    def __init__(self, address: str) -> None:
        self.dropped = 0
        self._encoder = event_codec()
        self._decoder = message_codec()
        self._repeats = Receiver()
        self._socket = FrameSocket.connected(address)
        self._awaits = select.POLLIN
        self._epoll = select.epoll()
        self._epoll.register(self._socket, self._awaits)

    def poll_fd(self) -> int:
        return self._epoll.fileno()

    def receive(self) -> list[Message]:
        self._socket.flush()
        packed, dropped = _decoded(self._decoder, self._socket.take())
        self._settle()
        found = [self._repeats.unpacked(message) for message in packed]
        messages = [message for message in found if message is not None]
        if len(messages) < len(packed):
            log.warning("dropped %d requests of an unknown text", len(packed) - len(messages))
        self.dropped += dropped + len(packed) - len(messages)
        return messages

    def send(self, events: list[Event]) -> None:
        for frame in _frames(self._encoder, events):
            self.dropped += not self._socket.send(frame)
        self._settle()

    def close(self) -> None:
        self._epoll.close()
        self._socket.close(_LINGER_S)

    def _settle(self) -> None:
        """Update the polled events: unsent frames need space; a gone API process must not wake
        the loop forever."""
        if self._socket.awaits != self._awaits:
            self._awaits = self._socket.awaits
            if self._awaits:
                self._epoll.modify(self._socket, self._awaits)
            else:
                self._epoll.unregister(self._socket)


def socket_pair(address: str) -> tuple[SocketFrontLink, SocketEngineLink]:
    """Both ends over one ipc address; two processes make one end each with the same address."""
    return SocketFrontLink(address), SocketEngineLink(address)


async def next_events(link: FrontLink) -> list[Event]:
    """Await the next events; at least one."""
    while not (events := link.receive()):
        woken = asyncio.Event()
        link.listen(woken.set)
        try:
            await woken.wait()
        finally:
            link.listen(None)
    return events


def _nobody() -> None:
    """Do nothing."""


def _decoded(codec: Codec[T], frames: list[bytes]) -> tuple[list[T], int]:
    """Decode frames; return the items and the number of frames that did not decode."""
    items: list[T] = []
    dropped = 0
    for frame in frames:
        try:
            items += codec.decode(frame)
        except WireError as error:
            dropped += 1
            log.warning("dropped a frame error=%s", error)
    return items, dropped


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


# Long constraints travel once, however many sequences use them. Both ends number the texts in order
# and remember the latest, and a remembered text travels as its number. A lost frame ends the
# link, so
# both ends always agree.

MIN_CHARS = 1024
"""Shorter texts travel as they are."""

MAX_KEPT = 16
"""Texts that each end remembers; admission bounds the length of one."""

_MARK = "="
"""Marks a number; no constraint begins with it."""


class Sender:
    """The end that replaces texts by numbers."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """The latest texts, oldest first."""
        self._next = 0

    def packed(self, message: Message) -> Message:
        if not isinstance(message, Generate) or len(message.grammar) < MIN_CHARS:
            return message
        number = self._numbers.get(message.grammar)
        if number is not None:
            return msgspec.structs.replace(message, grammar=f"{_MARK}{number}")
        self._numbers[message.grammar] = self._next
        self._next += 1
        if len(self._numbers) > MAX_KEPT:
            self._numbers.popitem(last=False)
        return message


class Receiver:
    """The end that restores texts; equal texts become one object."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, str] = OrderedDict()
        self._next = 0

    def unpacked(self, message: Message) -> Message | None:
        """The original message; None if its text is unknown here."""
        if not isinstance(message, Generate):
            return message
        if message.grammar.startswith(_MARK):
            number = message.grammar.removeprefix(_MARK)
            text = self._texts.get(int(number)) if number.isdecimal() else None
            return None if text is None else msgspec.structs.replace(message, grammar=text)
        if len(message.grammar) >= MIN_CHARS:
            self._texts[self._next] = message.grammar
            self._next += 1
            if len(self._texts) > MAX_KEPT:
                self._texts.popitem(last=False)
        return message
