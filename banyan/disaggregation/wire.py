"""Frames between the server that gives and the one that takes.

A connection begins with a greeting of both sides: what is spoken, and a random number. Every frame
after it is a head (length, kind), a body, and a code of 16 bytes over both, the frame's number and
the direction, with a key made of the secret and both random numbers. So whoever does not know the
secret is not heard, frames of another connection are not, and a bit that changes on the way is
noticed. Without a secret the code is a checksum. Nothing is encrypted, and a body is msgpack of one
known struct or the bytes of a page.
"""

import asyncio
import hmac
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, scrypt
from typing import TypeVar

import msgspec

from banyan.disaggregation.transfer_engine import Landing
from banyan.messages.disaggregation import PrefillResult
from banyan.messages.plan import TRANSFER_ID_BYTES

GREETING = b"banyan rooms 3\n"
SEEK, WANT, DONE, PING, FOUND, PAGE, ABSENT, HANDOFF, GONE, GRANT, SENT, ELSEWHERE = range(1, 13)
"""Kinds of frames: SEEK, WANT, DONE and GRANT come from the server that takes."""
PING_S = 1.0
"""Either side says at least so often that it lives, once the greeting is over."""
SILENCE_S = 5.0
"""One that is not heard of for so long is taken for dead."""
GREETING_S = 5.0
"""For the greeting, and for saying which room is wanted."""
MAX_HANDOFF_BYTES = 64 << 20
_MAX_WORDS_BYTES = 1 << 16
_NONCE_BYTES, _CODE_BYTES = 16, 16
_HEAD = struct.Struct("<IB")
_WANT = struct.Struct("<QB")

T = TypeVar("T")


class Broken(Exception):
    """The other side is not who it should be, or what it says is nothing that may be said."""


class Corrupt(Exception):
    """A frame whose code is wrong; those after it can still be read."""


class Seek(msgspec.Struct, frozen=True):
    """Which room is wanted, and of which sequence."""

    room: bytes
    digest: bytes
    sizes: list[int]
    """Tokens of a page, by group; 0 = it holds a state."""
    giver: int = -1
    """The replica that was told to compute it; -1 = the one that the room belongs to."""


class Found(msgspec.Struct, frozen=True):
    """The room is there; facts that both servers must have in common."""

    tokens: int
    """Whose pages will come."""
    facts: dict[str, str]


class Grant(msgspec.Struct, frozen=True):
    """Where the next of the pages that are wanted go, by distance from the base."""

    landing: Landing
    offsets: list[int]


class SentCodes(msgspec.Struct, frozen=True):
    """The code of each page of a grant, as it was written; b"" = none was."""

    codes: list[bytes]


class Redirect(msgspec.Struct, frozen=True):
    """Another replica of this server has the room: so many ports further."""

    ports: int


class Gone(msgspec.Struct, frozen=True):
    """The room is not there, and will not be."""

    status: int
    text: str


@dataclass
class Channel:
    """One end of a connection whose greeting is over."""

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
        """The next frame; pings are passed over.

        Args:
            most: kinds that may come, and how long their bodies may be.

        Raises:
            Broken: another kind, or a longer one.
            Corrupt: a legal frame whose code is wrong.
            TimeoutError: nothing has come for `silence_s`.
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

    async def say_often(self) -> None:
        """Say again and again that this side lives, until it is cancelled or the other has gone."""
        with suppress(OSError):
            while True:
                await self.send(PING)
                await asyncio.sleep(PING_S)

    def abort(self) -> None:
        """End the connection at once, whatever waits to be sent."""
        self.writer.transport.abort()

    def _code(self, is_prefill: bool, number: int, head: bytes, body: bytes | memoryview) -> bytes:
        made = blake2b(head, digest_size=_CODE_BYTES, key=self.key, person=b"giver" * is_prefill)
        made.update(number.to_bytes(8, "little"))
        made.update(body)
        return made.digest()


def master_of(secret: str) -> bytes:
    """The key behind all keys. Takes a while, so that short secrets are not found by trying."""
    return scrypt(secret.encode(), salt=b"banyan rooms", n=1 << 14, r=8, p=1, dklen=32)


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, master: bytes, is_prefill: bool
) -> Channel:
    """Exchange greetings.

    Args:
        master: made of the secret by `master_of`.

    Raises:
        Broken: something else is spoken there.
        OSError, asyncio.IncompleteReadError, TimeoutError.
    """
    mine = os.urandom(_NONCE_BYTES)
    writer.write(GREETING + mine)
    await writer.drain()
    async with asyncio.timeout(GREETING_S):
        said = await reader.readexactly(len(GREETING) + _NONCE_BYTES)
    if not said.startswith(GREETING):
        raise Broken("it does not speak of rooms as this release does")
    theirs = said[len(GREETING) :]
    both = mine + theirs if is_prefill else theirs + mine
    return Channel(reader, writer, blake2b(both, key=master, digest_size=32).digest(), is_prefill)


def pack(body: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(body)


def unpack(body: bytes, kind: type[T]) -> T:
    """Broken when it is nothing of that kind."""
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
    """What was handed over, checked: nothing in it may be what no engine says.

    Raises:
        Broken.
    """
    handoff = unpack(body, PrefillResult)
    if (
        handoff.transfer_id != room
        or len(room) != TRANSFER_ID_BYTES
        or len(handoff.tokens) not in (0, 4)
    ):
        raise Broken("a handoff of another room, or of several tokens")
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
MAX_FOUND = {FOUND: _MAX_WORDS_BYTES, ELSEWHERE: _MAX_WORDS_BYTES}
MAX_GONE = {GONE: _MAX_WORDS_BYTES}
MAX_WANT = {WANT: 1 << 24}
MAX_GRANT = {GRANT: _MAX_WORDS_BYTES}
MAX_HEARD = {**MAX_WANT, **MAX_GRANT, DONE: 0}
MAX_SENT = {SENT: _MAX_WORDS_BYTES}
