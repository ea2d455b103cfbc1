"""Frames between a prefill server and a decode server.

Both sides of a connection first send a greeting: the protocol version and a random number. Every
later frame is a head (length, kind), a body, and a 16-byte code over both, the frame's number and
the direction. The code's key is made from the secret and both random numbers. So peers without the
secret, frames of another connection and changed bits are detected. Without a secret the code is a
checksum. Nothing is encrypted. A body is msgpack of one known struct, or the bytes of a page.

The room (`bootstrap_room`) names one KV transfer.
"""

import asyncio
import hmac
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, scrypt
from typing import TypeVar

import msgspec

from banyan.disaggregation.transfer_engine import Landing
from banyan.messages.disaggregation import PrefillResult
from banyan.messages.plan import TRANSFER_ID_BYTES

GREETING = b"banyan rooms 4\n"
SEEK, WANT, DONE, PING, FOUND, PAGE, ABSENT, HANDOFF, GONE, GRANT, SENT = range(1, 12)
ELSEWHERE, LATER = 12, 13
"""Kinds of frames. The decode server sends SEEK, WANT, DONE and GRANT. LATER: the room is not open
yet, ask again over another connection."""
PING_S = 1.0
"""After the greeting each side sends a ping at least this often."""
SILENCE_S = 5.0
"""A peer that sends nothing for this long counts as dead."""
GREETING_S = 5.0
"""Time limit of the greeting and of the SEEK frame."""
MAX_HANDOFF_BYTES = 64 << 20
_MAX_STRUCT_BYTES = 1 << 16
_NONCE_BYTES, _CODE_BYTES = 16, 16
_HEAD = struct.Struct("<IB")
_WANT = struct.Struct("<QB")

T = TypeVar("T")


class Broken(Exception):
    """The peer is not the expected one, or it sends something that the protocol forbids."""


class Corrupt(Exception):
    """A frame whose code is wrong; later frames can still be read."""


class Seek(msgspec.Struct, frozen=True):
    """Asks for the pages of one KV transfer."""

    room: bytes
    digest: bytes
    sizes: list[int]
    """Tokens of a page of the decode server, by group; 0 = it holds a state."""
    prefill_replica: int = msgspec.field(name="giver", default=-1)
    """The replica that computes the prompt; -1 = the one that the room number selects."""
    layout: dict[str, int] = {}
    """Ranks and replicas of the decode server, by their flags."""


class Found(msgspec.Struct, frozen=True):
    """The room is open. Both servers must have the same facts."""

    tokens: int
    """Number of tokens whose pages will come."""
    facts: dict[str, str]
    layout: dict[str, int] = {}
    """Of the prefill server, as in Seek."""


class Grant(msgspec.Struct, frozen=True):
    """Where the next wanted pages are written, as offsets from the base."""

    landing: Landing
    offsets: list[int]


class SentCodes(msgspec.Struct, frozen=True):
    """The code of each page of a grant; b"" = the page was not written."""

    codes: list[bytes]


class Redirect(msgspec.Struct, frozen=True):
    """Another replica of this server has the room; its port is `ports` higher."""

    ports: int


class Gone(msgspec.Struct, frozen=True):
    """The room does not exist and will not exist."""

    status: int
    text: str


def odd_layout(wanted: Mapping[str, int], theirs: Mapping[str, int], role: str) -> str:
    """How a peer differs from the one that flags of this server describe; "" = it does not.

    Args:
        wanted: flag of the peer -> its value.
        role: of the peer.
    """
    for flag, value in wanted.items():
        if theirs.get(flag, 0) != value:
            found = theirs.get(flag, "no")
            return f"the {role} server has {flag} {found}, and {value} was announced"
    return ""


@dataclass
class Channel:
    """One end of a connection after the greeting."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    key: bytes
    is_prefill: bool
    sent: int = 0
    received: int = 0

    async def send(self, kind: int, body: bytes | memoryview = b"") -> None:
        head = _HEAD.pack(len(body), kind)
        code = self._code(self.is_prefill, self.sent, head, body)
        self.sent += 1
        self.writer.writelines((head, body, code))
        await self.writer.drain()

    async def receive(self, most: dict[int, int], silence_s: float) -> tuple[int, bytes]:
        """The next frame; pings are skipped.

        Args:
            most: allowed kinds, and the longest body of each.

        Raises:
            Broken: another kind, or a longer body.
            Corrupt: a legal frame whose code is wrong.
            TimeoutError: nothing came for `silence_s`.
            OSError, asyncio.IncompleteReadError: the connection has ended.
        """
        while True:
            async with asyncio.timeout(silence_s):
                head = await self.reader.readexactly(_HEAD.size)
            size, kind = _HEAD.unpack(head)
            if kind != PING and size > most.get(kind, -1) or kind == PING and size:
                raise Broken(f"a frame of kind {kind} and {size:,} bytes")
            async with asyncio.timeout(silence_s + size / 1e6):
                body = await self.reader.readexactly(size)
                code = await self.reader.readexactly(_CODE_BYTES)
            right = self._code(not self.is_prefill, self.received, head, body)
            self.received += 1
            if not hmac.compare_digest(code, right):
                raise Corrupt(f"a frame of kind {kind} and {size:,} bytes was changed on its way")
            if kind != PING:
                return kind, body

    async def keep_alive(self) -> None:
        """Send pings until cancelled or the peer has gone."""
        with suppress(OSError):
            while True:
                await self.send(PING)
                await asyncio.sleep(PING_S)

    def abort(self) -> None:
        """End the connection at once and drop unsent data."""
        self.writer.transport.abort()

    def _code(self, is_prefill: bool, number: int, head: bytes, body: bytes | memoryview) -> bytes:
        made = blake2b(head, digest_size=_CODE_BYTES, key=self.key, person=b"giver" * is_prefill)
        made.update(number.to_bytes(8, "little"))
        made.update(body)
        return made.digest()


def master_of(secret: str) -> bytes:
    """The key from which all connection keys are made. Slow on purpose: guessing short secrets must
    be expensive."""
    return scrypt(secret.encode(), salt=b"banyan rooms", n=1 << 14, r=8, p=1, dklen=32)


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, master: bytes, is_prefill: bool
) -> Channel:
    """Exchange greetings.

    Args:
        master: from `master_of`.

    Raises:
        Broken: the peer speaks another protocol.
        OSError, asyncio.IncompleteReadError, TimeoutError.
    """
    mine = os.urandom(_NONCE_BYTES)
    writer.write(GREETING + mine)
    await writer.drain()
    async with asyncio.timeout(GREETING_S):
        greeting = await reader.readexactly(len(GREETING) + _NONCE_BYTES)
    if not greeting.startswith(GREETING):
        raise Broken("it speaks another version of the KV transfer protocol")
    theirs = greeting[len(GREETING) :]
    both = mine + theirs if is_prefill else theirs + mine
    return Channel(reader, writer, blake2b(both, key=master, digest_size=32).digest(), is_prefill)


def pack(body: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(body)


def unpack(body: bytes, kind: type[T]) -> T:
    """Decode a struct; Broken if it is not of that kind."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise Broken(f"{kind.__name__} does not decode: {error}") from None


def pack_wants(wants: list[tuple[int, int]]) -> bytes:
    """(position, group) of each page."""
    return b"".join(_WANT.pack(*want) for want in wants)


def unpack_wants(body: bytes) -> list[tuple[int, int]]:
    if len(body) % _WANT.size:
        raise Broken(f"a list of pages of {len(body)} bytes")
    return [(position, group) for position, group in _WANT.iter_unpack(body)]


def read_handoff(body: bytes, room: bytes, prompt_len: int, vocab_size: int) -> PrefillResult:
    """Decode a handoff and check every field against what an engine could send.

    Raises:
        Broken.
    """
    handoff = unpack(body, PrefillResult)
    if (
        handoff.transfer_id != room
        or len(room) != TRANSFER_ID_BYTES
        or len(handoff.tokens) not in (0, 4)
    ):
        raise Broken("a handoff of another room, or with several tokens")
    if handoff.tokens and not 0 <= int.from_bytes(handoff.tokens, "little") < vocab_size:
        raise Broken("a token that the model does not have")
    end = prompt_len + len(handoff.tokens) // 4
    for score in handoff.scores:
        rows = len(score.logprobs) // 4
        parts = (score.logprobs, score.top_ids, score.top_logprobs, score.picked)
        is_whole = rows > 0 and not any(len(part) % (4 * rows) for part in parts)
        if not is_whole or not 0 <= score.first <= end - rows:
            raise Broken("scores of positions that there are not")
    return handoff


MAX_SEEK = {SEEK: 1 << 10}
MAX_FOUND = {FOUND: _MAX_STRUCT_BYTES, ELSEWHERE: _MAX_STRUCT_BYTES, LATER: 0}
MAX_GONE = {GONE: _MAX_STRUCT_BYTES}
MAX_WANT = {WANT: 1 << 24}
MAX_GRANT = {GRANT: _MAX_STRUCT_BYTES}
MAX_FROM_DECODE = {**MAX_WANT, **MAX_GRANT, DONE: 0}
MAX_SENT = {SENT: _MAX_STRUCT_BYTES}
