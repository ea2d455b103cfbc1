"""Codec: frames of messages, one version byte, then msgpack of a list. FrameSocket: whole frames
between two processes, over a unix socket.

A frame that does not decode raises WireError and changes nothing. On a socket a frame travels as
its length (four bytes) and its bytes. No call waits: `send` passes the frame to the kernel in the
same call, so no thread is needed between the ends.
"""

import contextlib
import os
import select
import socket
from collections import deque
from typing import Generic, Self, TypeVar, cast

import msgspec

from banyan.messages.events import Event
from banyan.messages.plan import StepPlan
from banyan.messages.requests import Message

T = TypeVar("T")

_HEAD_BYTES = 4
_PIECE_BYTES = 1 << 16
_SCHEME = "ipc://"

PROTOCOL = 3
"""Increased whenever a message changes so that an older peer would misread it."""

MAX_FRAME_BYTES = 256 << 20


class WireError(Exception):
    """A frame of the wrong version, too large, or not what was expected."""


class Codec(Generic[T]):
    """Encodes and decodes frames that hold a list of T."""

    def __init__(self, item: type[T]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[item])

    def check(self, item: T) -> None:
        """WireError unless a frame can hold `item`."""
        try:
            size = len(self.encode([item]))
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise WireError(f"it cannot be encoded: {error}") from None
        if size > MAX_FRAME_BYTES:
            raise WireError(f"it takes {size} bytes; {MAX_FRAME_BYTES} are legal")

    def encode(self, items: list[T]) -> bytes:
        return bytes((PROTOCOL,)) + self._encoder.encode(items)

    def decode(self, frame: bytes | memoryview) -> list[T]:
        if not 1 < len(frame) <= MAX_FRAME_BYTES:
            raise WireError(f"frame of {len(frame)} bytes; 2 to {MAX_FRAME_BYTES} are legal")
        if frame[0] != PROTOCOL:
            raise WireError(f"protocol {frame[0]}, this build speaks {PROTOCOL}")
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (ValueError, RecursionError) as error:  # bad UTF-8 raises ValueError
            raise WireError(f"frame does not decode: {error}") from None


def message_codec() -> Codec[Message]:
    """API process to engine."""
    return Codec(cast(type[Message], Message))  # for the type checker, a union is not a class


def event_codec() -> Codec[Event]:
    """Engine to API process."""
    return Codec(cast(type[Event], Event))


def plan_codec() -> Codec[StepPlan]:
    """Rank 0 to the other ranks."""
    return Codec(StepPlan)


class FrameSocket:
    """One end of a pair.

    Args:
        own: connected, or listening for the peer.
        is_door: listening. Frames sent before the peer connects are kept.
    """

    def __init__(self, own: socket.socket, is_door: bool) -> None:
        own.setblocking(False)
        self._socket = own
        self.is_door = is_door
        self.is_over = False
        """The peer is gone and everything it sent has been read."""
        self._unsent: deque[memoryview] = deque()
        self._begun = bytearray()
        """The first bytes of an incomplete frame."""

    @classmethod
    def bound(cls, address: str) -> Self:
        """The listening end, created first."""
        own = socket.socket(socket.AF_UNIX)
        own.bind(address.removeprefix(_SCHEME))
        own.listen(1)
        return cls(own, True)

    @classmethod
    def connected(cls, address: str) -> Self:
        """The connecting end; OSError if nobody listens."""
        own = socket.socket(socket.AF_UNIX)
        try:
            own.connect(address.removeprefix(_SCHEME))
        except OSError:
            own.close()
            raise
        return cls(own, False)

    def fileno(self) -> int:
        """The descriptor to poll (level-triggered); it changes with `accept`."""
        return self._socket.fileno()

    @property
    def awaits(self) -> int:
        """Poll events to wait for before `take` and `flush`; 0 = nothing more will come."""
        if self.is_over:
            return 0
        return select.POLLIN | (select.POLLOUT if self.has_unsent else 0)

    @property
    def has_unsent(self) -> bool:
        """Whether frames still wait for space in the kernel's buffer."""
        return bool(self._unsent) and not self.is_door

    def accept(self) -> None:
        """Accept the peer, and nobody after it; do nothing while no peer connects."""
        assert self.is_door
        with contextlib.suppress(BlockingIOError):
            came, _ = self._socket.accept()
            came.setblocking(False)
            self._close_door()
            self._socket = came
            self.flush()

    def take(self) -> list[bytes]:
        """The frames that have arrived, in order.

        Raises:
            WireError: the bytes are no frame, so the next frame's start is unknown.
        """
        if self.is_door:
            self.accept()
        frames: list[bytes] = []
        is_more = not (self.is_door or self.is_over)
        while is_more:
            try:
                piece = self._socket.recv(_PIECE_BYTES)
            except BlockingIOError:
                return frames
            except ConnectionError:
                piece = b""
            self.is_over = not piece
            size = len(piece) - _HEAD_BYTES
            if self._begun or int.from_bytes(piece[:_HEAD_BYTES], "little") != size:
                self._begun += piece
                frames += self._cut()
            else:  # one whole frame: the usual case
                frames.append(piece[_HEAD_BYTES:])
            is_more = size + _HEAD_BYTES == _PIECE_BYTES
        return frames

    def send(self, frame: bytes) -> bool:
        """Send a frame; False if the peer is gone."""
        whole = len(frame).to_bytes(_HEAD_BYTES, "little") + frame
        if self._unsent or self.is_door:
            self._unsent.append(memoryview(whole))
            return True
        sent = self._write(whole)
        if 0 <= sent < len(whole):
            self._unsent.append(memoryview(whole)[sent:])
        return sent >= 0

    def flush(self) -> None:
        """Send what the kernel has not accepted yet."""
        while self.has_unsent:
            first = self._unsent.popleft()
            sent = self._write(first)
            if 0 <= sent < len(first):
                self._unsent.appendleft(first[sent:])
                return

    def close(self, linger_s: float = 0.0) -> None:
        """
        Args:
            linger_s: seconds to wait for unsent frames to leave.
        """
        if self.has_unsent and linger_s:
            self._socket.settimeout(linger_s)
            with contextlib.suppress(OSError):
                self._socket.sendall(b"".join(self._unsent))
        self._unsent.clear()
        self._close_door()
        self._socket.close()

    def _close_door(self) -> None:
        if self.is_door:
            self.is_door = False
            with contextlib.suppress(FileNotFoundError):  # its folder may be gone already
                os.unlink(self._socket.getsockname())
            self._socket.close()

    def _write(self, piece: bytes | memoryview) -> int:
        """Number of bytes that the kernel accepted; -1 if the peer is gone."""
        try:
            return self._socket.send(piece)
        except BlockingIOError:
            return 0
        except ConnectionError:
            return -1

    def _cut(self) -> list[bytes]:
        """The complete frames at the beginning of the received bytes."""
        frames: list[bytes] = []
        at = 0
        with memoryview(self._begun) as begun:
            while len(begun) - at >= _HEAD_BYTES:
                start = at + _HEAD_BYTES
                size = int.from_bytes(begun[at:start], "little")
                if size > MAX_FRAME_BYTES:
                    raise WireError(f"frame of {size} bytes; {MAX_FRAME_BYTES} are legal")
                if start + size > len(begun):
                    break
                at = start + size
                frames.append(bytes(begun[start:at]))
        del self._begun[:at]
        return frames
