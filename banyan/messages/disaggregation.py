"""KV transfers of prefill/decode disaggregation: messages between an engine core and its mover.

A transfer is one sequence that a prefill server computes and a decode server continues. Both name
it by its transfer id (`bootstrap_room` on the wire). These messages pass between plans, like
lookups of a store. Pages travel as copies of plans, to and from the tier PEER.

    prefill side: OpenTransfer → copies → PrefillResult ⇢ TransferClosed: read, expired or closed
    decode side:  FindTransfer ⇢ TransferFound → ReceiveTransfer, copies ⇢ PrefillResult,
                  or TransferFailed at any time

The encoded names of fields and the tags are kept from older journals.
"""

import msgspec

from banyan.messages.plan import RowScores


class OpenTransfer(msgspec.Struct, frozen=True, tag="open_room"):
    """Prefill side: a sequence will be computed; a decode server that asks for it may wait."""

    transfer_id: bytes = msgspec.field(name="room")
    digest: bytes
    """Hash of everything the pages depend on besides the model: prompt, weights, embeddings."""
    tokens: int
    """Number of prompt tokens, from the first, whose pages will be sent."""


class FindTransfer(msgspec.Struct, frozen=True, omit_defaults=True, tag="seek_room"):
    """Decode side: find the transfer at the prefill server. Answered by TransferFound or
    TransferFailed.
    """

    transfer_id: bytes = msgspec.field(name="room")
    prefill_address: str = msgspec.field(name="peer")
    """host:port."""
    digest: bytes
    prompt_len: int
    prefill_replica: int = msgspec.field(name="giver", default=-1)
    """Replica of the prefill server that computes it; -1 = the one that `replica_of` returns."""


class ReceiveTransfer(msgspec.Struct, frozen=True, tag="take_room"):
    """Decode side: fetch the pages that `copies` page copies name, then the PrefillResult."""

    transfer_id: bytes = msgspec.field(name="room")
    copies: int


class PrefillResult(msgspec.Struct, frozen=True, omit_defaults=True, tag="hand_off"):
    """Everything the decode server needs besides the pages, once the prompt has been computed."""

    transfer_id: bytes = msgspec.field(name="room")
    tokens: bytes = b""
    """int32: the first output token; empty when none was requested."""
    scores: list[RowScores] = []
    """Requested log-probabilities, up to that token."""
    cached_tokens: int = 0
    """Prompt tokens that the prefill server found in its cache."""


class CloseTransfer(msgspec.Struct, frozen=True, omit_defaults=True, tag="close_room"):
    """The sequence has ended here: nothing more is sent, or nothing more is needed."""

    transfer_id: bytes = msgspec.field(name="room")


class TransferFound(msgspec.Struct, frozen=True, tag="room_found"):
    """The transfer is open at the prefill server, which runs the same model."""

    transfer_id: bytes = msgspec.field(name="room")
    tokens: int
    """Prompt tokens whose pages it sends: whole pages of its own page size."""


class TransferFailed(msgspec.Struct, frozen=True, tag="room_lost"):
    """Nothing more arrives for the transfer. Carries the reason and its HTTP status."""

    transfer_id: bytes = msgspec.field(name="room")
    status: int
    text: str
    code: str = "handoff_failed"


class TransferClosed(msgspec.Struct, frozen=True, tag="room_closed"):
    """Prefill side: the host memory of an open transfer is free again."""

    transfer_id: bytes = msgspec.field(name="room")


def replica_of(transfer_id: bytes, replicas: int) -> int:
    """The prefill replica of a transfer. All sequences of one prompt map to the same replica."""
    return int.from_bytes(transfer_id[:8], "little") % replicas


KVTransferOp = OpenTransfer | FindTransfer | ReceiveTransfer | PrefillResult | CloseTransfer
"""From an engine core to its mover."""
KVTransferEvent = TransferFound | PrefillResult | TransferFailed | TransferClosed
"""From a mover to its engine core."""
