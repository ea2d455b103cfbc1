"""Frames between API process and engine: one version byte, then msgpack of a list of messages.

A frame that does not decode raises WireError and changes nothing.
"""

from typing import Generic, TypeVar, cast

import msgspec

from banyan.messages.events import Event
from banyan.messages.plan import StepPlan
from banyan.messages.requests import Message

T = TypeVar("T")

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
