"""PrefillSide: keeps the pages of rooms in memory of the host until they are taken, and gives them.

A page is given to whoever names the room that it was put into, knows the secret, and asks for the
same sequence; once. What nobody takes goes when its lease is over.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.disaggregation import wire
from banyan.disaggregation.page_cutting import PageForm
from banyan.disaggregation.transfer import End, EndedTransfers, LoopThread, TransferOptions
from banyan.disaggregation.transfer_engine import Landing, TransferEngine, code_of, write_in_thread
from banyan.kv_transfer.page_mover import Pages
from banyan.messages.disaggregation import (
    CloseTransfer,
    KVTransferOp,
    OpenTransfer,
    PrefillResult,
    TransferClosed,
    replica_of,
)
from banyan.messages.plan import CopyResult, Lookup, PageCopy, transfer_position

log = logger(__name__)
T = TypeVar("T")
_Heard = asyncio.Queue[tuple[int, bytes]]
"""Frames of the server that takes."""

_MOST_CONNECTIONS = 1024
_REMEMBERED = 4096
"""Rooms that have ended, so that whoever asks for them later need not wait."""
_START_S = 10.0
_TAKEN = wire.Gone(503, "its pages were given away already")
_ENDED = wire.Gone(503, "its request has ended there before its prompt was computed")
_EXPIRED = wire.Gone(504, "nobody took it in time")


@dataclass
class _Kept:
    """A page that waits for whoever takes it."""

    payload: np.ndarray
    left: int
    """Tokens that have not been given."""


@dataclass
class _Room:
    """A room that is open."""

    digest: bytes
    tokens: int
    pages: dict[tuple[int, int], _Kept] = field(default_factory=dict[tuple[int, int], _Kept])
    """By group and position."""
    sizes: list[int] = field(default_factory=list[int])
    """Tokens of a page of whoever takes it, by group."""
    handoff: PrefillResult | None = None
    taker: wire.Channel | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    lease: asyncio.TimerHandle | None = None


class PrefillSide:
    """Satisfies PageMover. What has no lock belongs to the thread.

    Args:
        carrier: writes pages where they are wanted; None = they go over the connection.

    Raises:
        ConfigError: it cannot listen there.
    """

    is_attached = True

    def __init__(
        self,
        pages: Pages,
        options: TransferOptions,
        wake: Callable[[], None],
        engine: TransferEngine | None = None,
    ) -> None:
        self._pages = pages
        self._engine = engine
        self._has_failed = False
        self._options = options
        self._master = wire.master_of(options.secret)
        self._out = EndedTransfers(wake)
        self._rooms: dict[bytes, _Room] = {}
        self._gone: dict[bytes, wire.Gone] = {}
        self._awaited: dict[bytes, asyncio.Event] = {}
        self._connections = 0
        self._thread = LoopThread("rooms")
        try:
            self._thread.wait(self._listen(), _START_S)
        except OSError as error:
            self._thread.close()
            raise ConfigError(
                f"--disaggregation-bootstrap-port {options.port}: cannot listen at "
                f"{options.host}: {error.strerror}",
                hint="name a port that is free",
            ) from None

    # -- from the engine ----------------------------------------------------------------------

    def start(self, copies: list[PageCopy]) -> None:
        away = [copy for copy in copies if not copy.is_on_device]
        if away:
            taken = [(copy, self._pages.take(copy.group, copy.src.page)) for copy in away]
            self._thread.call(self._keep, taken)

    def look(self, lookups: list[Lookup]) -> None:
        """Rooms hold nothing that is looked up."""
        assert not lookups

    def obey(self, orders: list[KVTransferOp]) -> None:
        for order in orders:
            self._thread.call(self._obey, order)

    def ended(self) -> list[End]:
        return self._out.take()

    def close(self) -> None:
        self._thread.close()

    # -- in the thread ------------------------------------------------------------------------

    async def _listen(self) -> None:
        await asyncio.start_server(
            lambda reader, writer: self._thread.run(self._serve(reader, writer)) and None,
            *(self._options.host, self._options.port),
        )

    def _keep(self, taken: list[tuple[PageCopy, np.ndarray]]) -> None:
        ids, failed = list[int](), list[int]()
        for copy, payload in taken:
            name, position = transfer_position(copy.dst.key)
            room = self._rooms.get(name)
            (failed if room is None else ids).append(copy.id)
            if room is not None:
                tokens = self._options.forms[copy.group].tokens
                room.pages[copy.group, position] = _Kept(payload, tokens)
                room.changed.set()
        self._out.tell(CopyResult(ids, failed))

    def _obey(self, order: KVTransferOp) -> None:
        match order:
            case OpenTransfer():
                self._gone.pop(order.transfer_id, None)
                self._rooms[order.transfer_id] = _Room(order.digest, order.tokens)
                self._call(order.transfer_id)
            case PrefillResult():
                room = self._rooms.get(order.transfer_id)
                if room is None:
                    return
                room.handoff = order
                lease_s = self._options.lease_s
                room.lease = self._thread.loop.call_later(lease_s, self._expire, order.transfer_id)
                room.changed.set()
            case CloseTransfer():
                self._drop(order.transfer_id, _ENDED)
            case _:
                raise AssertionError(f"a server that gives was told {order}")

    def _expire(self, name: bytes) -> None:
        log.warning("a room was not taken for %.0f s: its pages go", self._options.lease_s)
        self._drop(name, _EXPIRED)

    def _drop(self, name: bytes, why: wire.Gone) -> None:
        """Let a room and its pages go."""
        room = self._rooms.pop(name, None)
        self._gone[name] = why
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        self._call(name)
        if room is None:
            return
        if room.lease is not None:
            room.lease.cancel()
        if room.taker is not None:
            room.taker.abort()
        room.changed.set()
        room.pages.clear()
        self._out.tell(TransferClosed(name))

    def _call(self, name: bytes) -> None:
        """Tell who waits for a room that there is news of it."""
        if name in self._awaited:
            self._awaited.pop(name).set()

    # -- one connection -----------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > _MOST_CONNECTIONS:
                raise wire.Broken(f"{_MOST_CONNECTIONS} connections are open")
            channel = await wire.greet(reader, writer, self._master, is_prefill=True)
            _, body = await channel.receive(wire.MAX_SEEK, wire.GREETING_S)
            await self._answer(channel, wire.unpack(body, wire.Seek))
        except (OSError, EOFError, wire.Broken, wire.Corrupt) as error:
            log.info("a connection about a room ends: %s", str(error) or type(error).__name__)
        finally:
            self._connections -= 1
            writer.transport.abort() if writer.is_closing() else writer.close()

    async def _answer(self, channel: wire.Channel, seek: wire.Seek) -> None:
        options = self._options
        giver = seek.giver if seek.giver >= 0 else replica_of(seek.room, options.replicas)
        if giver >= options.replicas:
            none = wire.Gone(400, f"it has {options.replicas} replicas, and none number {giver}")
            await channel.send(wire.GONE, wire.pack(none))
            return
        if ports := giver - options.replica:
            await channel.send(wire.ELSEWHERE, wire.pack(wire.Redirect(ports)))
            return
        room = await self._find(channel, seek.room)
        if isinstance(room, wire.Gone):
            await channel.send(wire.GONE, wire.pack(room))
            return
        if room.taker is not None:
            await channel.send(wire.GONE, wire.pack(_TAKEN))
            return
        if room.digest != seek.digest:
            other = wire.Gone(400, "it computes another prompt there, or with other weights")
            await channel.send(wire.GONE, wire.pack(other))
            return
        room.taker, room.sizes = channel, seek.sizes
        try:
            await self._hand_over(channel, room)
        finally:
            if self._rooms.get(seek.room) is room:
                self._drop(seek.room, _TAKEN)

    async def _find(self, channel: wire.Channel, name: bytes) -> _Room | wire.Gone:
        loop = self._thread.loop
        until = loop.time() + self._options.patience_s
        while (room := self._rooms.get(name)) is None:
            if name in self._gone:
                return self._gone[name]
            if loop.time() > until:
                return wire.Gone(504, f"it was not asked for within {self._options.patience_s:g} s")
            await self._news(channel, self._awaited.setdefault(name, asyncio.Event()))
        return room

    async def _hand_over(self, channel: wire.Channel, room: _Room) -> None:
        facts = wire.Found(room.tokens, self._options.facts)
        await channel.send(wire.FOUND, wire.pack(facts))
        heard: _Heard = asyncio.Queue(1)
        listening = self._thread.run(_listen(channel, heard))
        try:
            await self._give(channel, room, heard)
        finally:
            listening.cancel()

    async def _give(self, channel: wire.Channel, room: _Room, heard: _Heard) -> None:
        wants = wire.unpack_wants(await self._next(channel, heard, wire.WANT))
        _check_wants(wants, room.sizes, self._options.forms)
        if self._engine is not None:
            await self._write_all(self._engine, channel, room, wants, heard)
        else:
            for want in wants:
                page = await self._computed(channel, room, want)
                if page is None:
                    await channel.send(wire.ABSENT)
                else:
                    await channel.send(wire.PAGE, page.data)
        while room.handoff is None:
            await self._news(channel, room.changed)
            room.changed.clear()
        await channel.send(wire.HANDOFF, wire.pack(room.handoff))
        await self._next(channel, heard, wire.DONE)

    async def _computed(
        self, channel: wire.Channel, room: _Room, want: tuple[int, int]
    ) -> np.ndarray | None:
        """A page of the other server's size, when its tokens have been computed; None when they
        never will be."""
        position, group = want
        form, tokens = self._options.forms[group], room.sizes[group]
        if position + tokens > room.tokens:
            return None
        places = [(group, at) for at in form.sources(position, tokens)]
        while any(place not in room.pages for place in places) and room.handoff is None:
            await self._news(channel, room.changed)
            room.changed.clear()
        if any(place not in room.pages for place in places):
            return None
        page = form.cut({at: room.pages[group, at].payload for _, at in places}, position, tokens)
        for place in places:
            kept = room.pages[place]
            kept.left -= form.overlap(place[1], position, tokens)
            if kept.left <= 0:
                del room.pages[place]
        return page

    async def _write_all(
        self,
        engine: TransferEngine,
        channel: wire.Channel,
        room: _Room,
        wants: list[tuple[int, int]],
        heard: _Heard,
    ) -> None:
        """Write what is wanted where it is wanted, in grants of one page or more."""
        at = 0
        while at < len(wants):
            grant = wire.unpack(await self._next(channel, heard, wire.GRANT), wire.Grant)
            some = wants[at : at + len(grant.offsets)]
            if not grant.offsets or len(some) < len(grant.offsets):
                raise wire.Broken(f"a grant of {len(grant.offsets)} pages")
            codes, pages = [b""] * len(some), list[tuple[int, np.ndarray]]()
            for index, (want, offset) in enumerate(zip(some, grant.offsets, strict=True)):
                page = await self._computed(channel, room, want)
                if page is not None:
                    pages.append((offset, page))
                    codes[index] = code_of(page, channel.key, at + index)
            if pages and not await self._is_written(engine, channel, grant.landing, pages):
                codes = [b""] * len(some)
            await channel.send(wire.SENT, wire.pack(wire.SentCodes(codes)))
            at += len(some)

    async def _is_written(
        self,
        engine: TransferEngine,
        channel: wire.Channel,
        landing: Landing,
        pages: list[tuple[int, np.ndarray]],
    ) -> bool:
        """Whether an engine has carried these pages. The log hears once of one that cannot."""
        writing = write_in_thread(engine, landing, pages)
        try:
            await self._meanwhile(channel, writing)
        except OSError as error:
            if writing.done() and not self._has_failed:
                self._has_failed = True
                log.warning(
                    "%s; where it cannot, pages are computed by the server that takes them, and "
                    "this is not told again",
                    printable(str(error), 300),
                )
            if not writing.done():
                raise  # the connection has ended, not the engine
            return False
        return True

    async def _next(self, channel: wire.Channel, heard: _Heard, kind: int) -> bytes:
        """What is wanted next; said when there is room for it."""
        coming = asyncio.ensure_future(heard.get())
        try:
            said, body = await self._meanwhile(channel, coming)
        finally:
            coming.cancel()
        if said != kind:
            raise wire.Broken(f"a frame of kind {said} in the place of one of kind {kind}")
        return body

    async def _meanwhile(self, channel: wire.Channel, coming: "asyncio.Future[T]") -> T:
        """Wait, and say meanwhile that this server lives."""
        while not (await asyncio.wait({coming}, timeout=wire.PING_S))[0]:
            await channel.send(wire.PING)
        return coming.result()

    async def _news(self, channel: wire.Channel, event: asyncio.Event) -> None:
        """Wait until something is new, and say meanwhile that this server lives.

        Raises:
            EOFError: the other side has gone.
        """
        try:
            async with asyncio.timeout(wire.PING_S):
                await event.wait()
        except TimeoutError:
            await channel.send(wire.PING)
        if channel.reader.at_eof():
            raise EOFError("the server that takes has gone")


def _check_wants(
    wants: list[tuple[int, int]], sizes: Sequence[int], forms: Sequence[PageForm]
) -> None:
    """Broken unless pages can be cut to the size that is wanted, and no token goes twice."""
    if len(sizes) != len(forms) or not all(map(PageForm.takes, forms, sizes)):
        raise wire.Broken(f"pages of {printable(str(sizes), 80)} tokens are wanted")
    for position, group in wants:
        if group >= len(sizes) or sizes[group] and position % sizes[group]:
            raise wire.Broken(f"a page of group {group} that begins at {position:,} is wanted")
    if len(dict.fromkeys(wants)) != len(wants):
        raise wire.Broken("a page is wanted twice")


async def _listen(channel: wire.Channel, heard: _Heard) -> None:
    """Take in what the other side says, and end the connection when it says nothing any more."""
    try:
        while True:
            await heard.put(await channel.receive(wire.MAX_HEARD, wire.SILENCE_S))
    except (OSError, EOFError, wire.Broken, wire.Corrupt) as error:
        log.debug("a connection about a room is over: %s", str(error) or type(error).__name__)
        channel.abort()
