"""Rooms: where a server that computes prompts hands sequences over to one that continues them.

A room is one sequence, called so by both servers. What a core tells its mover and hears from it
goes between plans, like lookups of a store; pages travel as copies of plans, to and from the tier
PEER.

    giving:  OpenRoom → copies → HandOff            ⇢ RoomClosed: taken, expired or closed
    taking:  SeekRoom ⇢ RoomFound → TakeRoom, copies ⇢ HandOff, or RoomLost at any time
"""

import msgspec

from banyan.messages.plan import RowScores


class OpenRoom(msgspec.Struct, frozen=True, tag="open_room"):
    """A sequence is about to be computed; whoever asks for it may wait."""

    room: bytes
    digest: bytes
    """Of what the pages depend on beside the model: prompt, weights, embeddings."""
    tokens: int
    """Of the prompt, from its first one on, whose pages will come."""


class SeekRoom(msgspec.Struct, frozen=True, omit_defaults=True, tag="seek_room"):
    """Find the room at the server that gives. Answered by RoomFound or RoomLost."""

    room: bytes
    peer: str
    """host:port."""
    digest: bytes
    prompt_len: int
    giver: int = -1
    """Which replica there was told to compute it; -1 = the one that the room belongs to."""


class TakeRoom(msgspec.Struct, frozen=True, tag="take_room"):
    """Bring the pages that so many copies from the room name, then the rest of the handoff."""

    room: bytes
    copies: int


class HandOff(msgspec.Struct, frozen=True, omit_defaults=True, tag="hand_off"):
    """What a sequence is beside its pages, once its prompt has been computed."""

    room: bytes
    tokens: bytes = b""
    """int32: the first token of the output; none when none was asked for."""
    scores: list[RowScores] = []
    """Log-probabilities that were asked for, up to that token."""
    cached_tokens: int = 0
    """Of the prompt, those that the giving server found in its cache."""


class CloseRoom(msgspec.Struct, frozen=True, omit_defaults=True, tag="close_room"):
    """The sequence has ended here: nothing more is given, or nothing more is wanted."""

    room: bytes


class RoomFound(msgspec.Struct, frozen=True, tag="room_found"):
    """The room is open at the other server, which runs the same model."""

    room: bytes
    tokens: int
    """Of the prompt, whose pages come from there: whole pages of that server's size."""


class RoomLost(msgspec.Struct, frozen=True, tag="room_lost"):
    """Nothing more comes from the room: why, and the HTTP status that says so."""

    room: bytes
    status: int
    text: str
    code: str = "handoff_failed"


class RoomClosed(msgspec.Struct, frozen=True, tag="room_closed"):
    """The memory that an opened room took is free again."""

    room: bytes


def replica_of(room: bytes, replicas: int) -> int:
    """Which replica of a server that gives has a room; all sequences of a prompt have the same."""
    return int.from_bytes(room[:8], "little") % replicas


KVTransferOp = OpenRoom | SeekRoom | TakeRoom | HandOff | CloseRoom
"""From a core to its mover."""
KVTransferEvent = RoomFound | HandOff | RoomLost | RoomClosed
"""From a mover to its core."""
