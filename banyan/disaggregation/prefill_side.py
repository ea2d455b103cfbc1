"""PrefillSide: the mover of a prefill server. It keeps KV pages in host memory and sends them.

A page is sent once, to a decode server that names its room, has the secret and asks for the same
sequence. Pages that are not fetched are dropped when their lease ends.
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
_Frames = asyncio.Queue[tuple[int, bytes]]
"""Frames from the decode server."""

_MOST_CONNECTIONS = 1024
"""Connections of decode servers that have the secret."""
_MOST_STRANGERS, _MOST_OF_PEER = 1024, 256
"""Connections that have not shown the secret yet: of all, and of one address."""
_HOLD_S = 1.0
"""How long a connection waits for a room that is not open yet, before it must ask again."""
_MOST_HELD = 128
"""Connections that wait so; the others must ask again at once."""
_REMEMBERED = 4096
"""Ended rooms that are remembered, so that late requests for them fail at once."""
_START_S = 10.0
_TAKEN = wire.Gone(503, "its pages were given away already")
_ENDED = wire.Gone(503, "its request has ended there before its prompt was computed")
_EXPIRED = wire.Gone(504, "nobody took it in time")


@dataclass
class _Kept:
    """A page that has not been sent completely."""

    payload: np.ndarray
    left: int
    """Tokens that have not been sent."""


@dataclass
class _Room:
    """An open room: one KV transfer."""

    digest: bytes
    tokens: int
    pages: dict[tuple[int, int], _Kept] = field(default_factory=dict[tuple[int, int], _Kept])
    """By group and position."""
    sizes: list[int] = field(default_factory=list[int])
    """Tokens of a page of the decode server, by group."""
    handoff: PrefillResult | None = None
    decoder: wire.Channel | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    lease: asyncio.TimerHandle | None = None


class Strangers:
    """Connections that have not shown the secret yet. A new one over a limit ends the oldest of the
    address that has the most, so idle connections keep nobody out.

    Args:
        most, most_of_peer: connections of all addresses, and of one.
    """

    def __init__(self, most: int, most_of_peer: int) -> None:
        self._most, self._most_of_peer = most, most_of_peer
        self._of_peer: dict[str, dict[asyncio.StreamWriter, None]] = {}

    def add(self, peer: str, writer: asyncio.StreamWriter) -> None:
        mine = self._of_peer.setdefault(peer, {})
        mine[writer] = None
        crowd = mine if len(mine) > self._most_of_peer else None
        if sum(map(len, self._of_peer.values())) > self._most:
            crowd = max(self._of_peer.values(), key=len)
        if crowd is not None:
            oldest = next(iter(crowd))
            del crowd[oldest]
            oldest.transport.abort()

    def remove(self, peer: str, writer: asyncio.StreamWriter) -> None:
        mine = self._of_peer.get(peer, {})
        mine.pop(writer, None)
        if not mine:
            self._of_peer.pop(peer, None)


class PrefillSide:
    """Satisfies PageMover. All unlocked state belongs to the thread.

    Args:
        engine: writes pages into the decode server's memory; None = pages go over the connection.

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
        self._ended = EndedTransfers(wake)
        self._rooms: dict[bytes, _Room] = {}
        self._gone: dict[bytes, wire.Gone] = {}
        self._awaited: dict[bytes, tuple[asyncio.Event, int]] = {}
        """Rooms that are not open yet: their event, and the number of connections that wait."""
        self._strangers = Strangers(_MOST_STRANGERS, _MOST_OF_PEER)
        self._connections = self._held = 0
        self._thread = LoopThread("kv transfer")
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
        """A transfer backend has no lookups."""
        assert not lookups

    def execute(self, ops: list[KVTransferOp]) -> None:
        for op in ops:
            self._thread.call(self._execute, op)

    def ended(self) -> list[End]:
        return self._ended.take()

    def close(self) -> None:
        self._thread.close()

    # -- in the thread ------------------------------------------------------------------------

    async def _listen(self) -> None:
        await asyncio.start_server(
            lambda reader, writer: self._thread.run(self._serve(reader, writer)) and None,
            host=self._options.host,
            port=self._options.port,
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
        self._ended.put(CopyResult(ids, failed))

    def _execute(self, op: KVTransferOp) -> None:
        match op:
            case OpenTransfer():
                self._gone.pop(op.transfer_id, None)
                self._rooms[op.transfer_id] = _Room(op.digest, op.tokens)
                self._notify(op.transfer_id)
            case PrefillResult():
                room = self._rooms.get(op.transfer_id)
                if room is None:
                    return
                room.handoff = op
                lease_s = self._options.lease_s
                room.lease = self._thread.loop.call_later(lease_s, self._expire, op.transfer_id)
                room.changed.set()
            case CloseTransfer():
                self._drop(op.transfer_id, _ENDED)
            case _:
                raise AssertionError(f"a prefill server got {op}")

    def _expire(self, name: bytes) -> None:
        log.warning("a room was not taken for %.0f s: its pages go", self._options.lease_s)
        self._drop(name, _EXPIRED)

    def _drop(self, name: bytes, why: wire.Gone) -> None:
        """Close a room and drop its pages."""
        room = self._rooms.pop(name, None)
        self._gone[name] = why
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        self._notify(name)
        if room is None:
            return
        if room.lease is not None:
            room.lease.cancel()
        if room.decoder is not None:
            room.decoder.abort()
        room.changed.set()
        room.pages.clear()
        self._ended.put(TransferClosed(name))

    def _notify(self, name: bytes) -> None:
        """Wake connections that wait for a room."""
        if name in self._awaited:
            self._awaited.pop(name)[0].set()

    # -- one connection -----------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("",))[0])
        self._strangers.add(peer, writer)
        try:
            try:
                channel = await wire.greet(reader, writer, self._master, is_prefill=True)
                _, body = await channel.receive(wire.MAX_SEEK, wire.GREETING_S)
            finally:
                self._strangers.remove(peer, writer)
            if self._connections >= _MOST_CONNECTIONS:
                raise wire.Broken(f"{_MOST_CONNECTIONS} connections are open")
            self._connections += 1
            try:
                await self._answer(channel, wire.unpack(body, wire.Seek))
            finally:
                self._connections -= 1
        except (OSError, EOFError, wire.Broken, wire.Corrupt) as error:
            log.info("a connection about a room ends: %s", str(error) or type(error).__name__)
        finally:
            writer.transport.abort() if writer.is_closing() else writer.close()

    async def _answer(self, channel: wire.Channel, seek: wire.Seek) -> None:
        options = self._options
        replica = seek.prefill_replica
        if replica < 0:
            replica = replica_of(seek.room, options.replicas)
        if replica >= options.replicas:
            none = wire.Gone(400, f"it has {options.replicas} replicas, and none number {replica}")
            await channel.send(wire.GONE, wire.pack(none))
            return
        if ports := replica - options.replica:
            await channel.send(wire.ELSEWHERE, wire.pack(wire.Redirect(ports)))
            return
        room = await self._find(channel, seek.room)
        if room is None:
            await channel.send(wire.LATER)
            return
        if isinstance(room, wire.Gone):
            await channel.send(wire.GONE, wire.pack(room))
            return
        if room.decoder is not None:
            await channel.send(wire.GONE, wire.pack(_TAKEN))
            return
        if odd := wire.odd_layout(self._options.peer_layout, seek.layout, "decode"):
            await channel.send(wire.GONE, wire.pack(wire.Gone(503, odd)))
            return
        if room.digest != seek.digest:
            other = wire.Gone(400, "it computes another prompt there, or with other weights")
            await channel.send(wire.GONE, wire.pack(other))
            return
        room.decoder, room.sizes = channel, seek.sizes
        try:
            await self._hand_over(channel, room)
        finally:
            if self._rooms.get(seek.room) is room:
                self._drop(seek.room, _TAKEN)

    async def _find(self, channel: wire.Channel, name: bytes) -> _Room | wire.Gone | None:
        """A room; None if it is not open, even after a short wait."""
        if name not in self._rooms and name not in self._gone and self._held < _MOST_HELD:
            await self._hold(channel, name)
        return self._rooms.get(name) or self._gone.get(name)

    async def _hold(self, channel: wire.Channel, name: bytes) -> None:
        """Wait a moment for a room to open."""
        event, waiting = self._awaited.get(name, (asyncio.Event(), 0))
        self._awaited[name] = event, waiting + 1
        self._held += 1
        try:
            async with asyncio.timeout(_HOLD_S):
                await self._wait(channel, event)
        except TimeoutError:
            pass
        finally:
            self._held -= 1
            if name in self._awaited:
                event, waiting = self._awaited.pop(name)
                if waiting > 1:
                    self._awaited[name] = event, waiting - 1

    async def _hand_over(self, channel: wire.Channel, room: _Room) -> None:
        facts = wire.Found(room.tokens, self._options.facts, dict(self._options.layout))
        await channel.send(wire.FOUND, wire.pack(facts))
        frames: _Frames = asyncio.Queue(1)
        listening = self._thread.run(_listen(channel, frames))
        try:
            await self._send_pages(channel, room, frames)
        finally:
            listening.cancel()

    async def _send_pages(self, channel: wire.Channel, room: _Room, frames: _Frames) -> None:
        wants = wire.unpack_wants(await self._next(channel, frames, wire.WANT))
        _check_wants(wants, room.sizes, self._options.forms)
        if self._engine is not None:
            await self._write_all(self._engine, channel, room, wants, frames)
        else:
            for want in wants:
                page = await self._computed(channel, room, want)
                if page is None:
                    await channel.send(wire.ABSENT)
                else:
                    await channel.send(wire.PAGE, page.data)
        while room.handoff is None:
            await self._wait(channel, room.changed)
            room.changed.clear()
        await channel.send(wire.HANDOFF, wire.pack(room.handoff))
        await self._next(channel, frames, wire.DONE)

    async def _computed(
        self, channel: wire.Channel, room: _Room, want: tuple[int, int]
    ) -> np.ndarray | None:
        """A page of the decode server's size, once its tokens are computed; None = they never will
        be."""
        position, group = want
        form, tokens = self._options.forms[group], room.sizes[group]
        if position + tokens > room.tokens:
            return None
        places = [(group, at) for at in form.sources(position, tokens)]
        while any(place not in room.pages for place in places) and room.handoff is None:
            await self._wait(channel, room.changed)
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
        frames: _Frames,
    ) -> None:
        """Write the wanted pages into the decode server's memory, one grant after another."""
        at = 0
        while at < len(wants):
            grant = wire.unpack(await self._next(channel, frames, wire.GRANT), wire.Grant)
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
        """Whether the engine has written these pages. Only the first failure is logged."""
        writing = write_in_thread(engine, landing, pages)
        try:
            await self._meanwhile(channel, writing)
        except OSError as error:
            if writing.done() and not self._has_failed:
                self._has_failed = True
                log.warning(
                    "%s; pages that cannot be written are computed by the decode server, and "
                    "this is not logged again",
                    printable(str(error), 300),
                )
            if not writing.done():
                raise  # the connection failed, not the engine
            return False
        return True

    async def _next(self, channel: wire.Channel, frames: _Frames, kind: int) -> bytes:
        """The body of the next frame, which must be of this kind."""
        coming = asyncio.ensure_future(frames.get())
        try:
            received, body = await self._meanwhile(channel, coming)
        finally:
            coming.cancel()
        if received != kind:
            raise wire.Broken(f"a frame of kind {received} in the place of one of kind {kind}")
        return body

    async def _meanwhile(self, channel: wire.Channel, coming: "asyncio.Future[T]") -> T:
        """Wait for a future, and send pings meanwhile."""
        while not (await asyncio.wait({coming}, timeout=wire.PING_S))[0]:
            await channel.send(wire.PING)
        return coming.result()

    async def _wait(self, channel: wire.Channel, event: asyncio.Event) -> None:
        """Wait for an event or the ping interval; sends a ping after the interval.

        Raises:
            EOFError: the decode server has gone.
        """
        try:
            async with asyncio.timeout(wire.PING_S):
                await event.wait()
        except TimeoutError:
            await channel.send(wire.PING)
        if channel.reader.at_eof():
            raise EOFError("the decode server has gone")


def _check_wants(
    wants: list[tuple[int, int]], sizes: Sequence[int], forms: Sequence[PageForm]
) -> None:
    """Broken unless pages can be cut to the wanted sizes, and no page is wanted twice."""
    if len(sizes) != len(forms) or not all(map(PageForm.takes, forms, sizes)):
        raise wire.Broken(f"pages of {printable(str(sizes), 80)} tokens are wanted")
    for position, group in wants:
        if group >= len(sizes) or sizes[group] and position % sizes[group]:
            raise wire.Broken(f"a page of group {group} that begins at {position:,} is wanted")
    if len(dict.fromkeys(wants)) != len(wants):
        raise wire.Broken("a page is wanted twice")


async def _listen(channel: wire.Channel, frames: _Frames) -> None:
    """Queue incoming frames; abort the connection if the peer is silent or breaks the protocol."""
    try:
        while True:
            await frames.put(await channel.receive(wire.MAX_FROM_DECODE, wire.SILENCE_S))
    except (OSError, EOFError, wire.Broken, wire.Corrupt) as error:
        log.debug("a connection about a room is over: %s", str(error) or type(error).__name__)
        channel.abort()
