"""DecodeSide: the mover of a decode server. It fetches KV pages from prefill servers.

It asks only for pages that copies name, and writes what comes to the places they name, if it has
the size of a page: a peer can write nothing else. A page that was changed on its way is a failed
copy. A connection that ends or is silent for too long ends its transfer.
"""

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from banyan.base.log import logger, printable
from banyan.base.os import is_loopback
from banyan.disaggregation import wire
from banyan.disaggregation.transfer import End, EndedTransfers, LoopThread, TransferOptions
from banyan.disaggregation.transfer_engine import LandingSlots, TransferEngine, code_of, open_slots
from banyan.kv_transfer.page_mover import Pages
from banyan.messages.disaggregation import (
    CloseTransfer,
    FindTransfer,
    KVTransferOp,
    ReceiveTransfer,
    TransferFailed,
    TransferFound,
)
from banyan.messages.plan import CopyResult, Lookup, PageCopy, transfer_position

log = logger(__name__)

_REPORTED_AT_ONCE = 16
"""Pages whose arrival is reported together, since each report wakes the engine."""
_CONNECT_S = 5.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 2.0
"""Pause before a room that is not open yet is asked for again; it doubles each time."""
_BUFFER_BYTES = 1 << 20


@dataclass
class _Download:
    """One KV transfer."""

    copies: list[PageCopy] = field(default_factory=list[PageCopy])
    wanted: int = -1
    """Number of copies in all; -1 = not known yet."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def check(self) -> None:
        if len(self.copies) == self.wanted:
            self.ready.set()


class _Lost(Exception):
    """A transfer has failed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class DecodeSide:
    """Satisfies PageMover. All unlocked state belongs to the thread.

    Args:
        engine: transfer engine that writes pages into landing slots; None = pages come over the
            connection.
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
        self._slots: LandingSlots | None = None
        if engine is not None:
            longest = max(pages.page_bytes(group) for group in range(len(pages.groups)))
            self._slots = open_slots(engine, longest)
        self._options = options
        self._master = wire.master_of(options.secret)
        self._ended = EndedTransfers(wake)
        self._downloads: dict[bytes, _Download] = {}
        self._thread = LoopThread("kv transfer")

    # -- from the engine ----------------------------------------------------------------------

    def start(self, copies: list[PageCopy]) -> None:
        coming = [copy for copy in copies if not copy.is_on_device]
        if coming:
            self._thread.call(self._expect, coming)

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

    def _expect(self, copies: list[PageCopy]) -> None:
        failed: list[int] = []
        for copy in copies:
            download = self._downloads.get(transfer_position(copy.src.key)[0])
            if download is None:
                failed.append(copy.id)
            else:
                download.copies.append(copy)
                download.check()
        if failed:
            self._ended.put(CopyResult([], failed))

    def _execute(self, op: KVTransferOp) -> None:
        download = self._downloads.get(op.transfer_id)
        match op:
            case FindTransfer():
                assert download is None, "a room is asked for twice"
                new = self._downloads[op.transfer_id] = _Download()
                new.task = self._thread.run(self._fetch(op, new))
            case ReceiveTransfer():
                if download is not None:
                    download.wanted = op.copies
                    download.check()
            case CloseTransfer():
                if download is not None and download.task is not None:
                    download.task.cancel()
            case _:
                raise AssertionError(f"a decode server got {op}")

    async def _fetch(self, op: FindTransfer, download: _Download) -> None:
        """Run one KV transfer from beginning to end."""
        where = f"the prefill server {printable(op.prefill_address, 80)}"
        writers: list[asyncio.StreamWriter] = []
        pings: asyncio.Task[None] | None = None
        try:
            channel, tokens = await self._find(op, where, writers)
            pings = self._thread.run(channel.keep_alive())
            self._ended.put(TransferFound(op.transfer_id, tokens))
            await download.ready.wait()
            await self._take(op, channel, download, where)
        except _Lost as lost:
            self._ended.put(TransferFailed(op.transfer_id, lost.status, str(lost)))
        except TimeoutError:
            text = f"{where} was silent for {wire.SILENCE_S:g} s"
            self._ended.put(TransferFailed(op.transfer_id, 504, text))
        except (EOFError, OSError, wire.Broken, wire.Corrupt) as error:
            why = str(error) or type(error).__name__
            text = f"{where} was lost before the prompt was handed over: {printable(why, 200)}"
            self._ended.put(TransferFailed(op.transfer_id, 503, text))
        finally:
            del self._downloads[op.transfer_id]
            if pings is not None:
                pings.cancel()
            for writer in writers:
                writer.close()
            if download.copies:
                self._ended.put(CopyResult([], [copy.id for copy in download.copies]))

    async def _find(
        self, op: FindTransfer, where: str, writers: list[asyncio.StreamWriter]
    ) -> tuple[wire.Channel, int]:
        """Connect to the replica that has the room, and check that its pages are compatible.

        returns: the connection, and the number of tokens whose pages will come.
        """
        host, _, port = op.prefill_address.rpartition(":")
        if not self._options.secret and not is_loopback(host):
            raise _Lost(400, f"{where} is on another machine, and this server has no secret")
        place = host.strip("[]"), int(port)
        channel, kind, body = await self._ask(op, *place, where, writers)
        if kind == wire.ELSEWHERE:
            ports = wire.unpack(body, wire.Redirect).ports
            if not 0 < place[1] + ports < 1 << 16:
                raise wire.Broken(f"a replica {ports} ports further")
            place = place[0], place[1] + ports
            channel, kind, body = await self._ask(op, *place, where, writers)
        if kind != wire.FOUND:
            raise wire.Broken("none of its replicas has the room")
        found = wire.unpack(body, wire.Found)
        _check_facts(found.facts, self._options.facts, where)
        if odd := wire.odd_layout(self._options.peer_layout, found.layout, "prefill"):
            raise _Lost(503, f"{where}: {odd}")
        if not 0 <= found.tokens <= op.prompt_len:
            raise wire.Broken(f"pages of {found.tokens:,} tokens")
        return channel, found.tokens

    async def _ask(
        self,
        op: FindTransfer,
        host: str,
        port: int,
        where: str,
        writers: list[asyncio.StreamWriter],
    ) -> tuple[wire.Channel, int, bytes]:
        """Ask one replica for the room until it is open; returns its answer."""
        loop, pause_s = asyncio.get_running_loop(), _PAUSE_S
        until = loop.time() + self._options.patience_s
        while True:
            channel, kind, body = await self._ask_once(op, host, port, where, writers)
            if kind != wire.LATER:
                return channel, kind, body
            writers.pop().close()
            patience_s = self._options.patience_s
            if loop.time() + pause_s > until:
                raise _Lost(504, f"{where} was not asked for this room within {patience_s:g} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _ask_once(
        self,
        op: FindTransfer,
        host: str,
        port: int,
        where: str,
        writers: list[asyncio.StreamWriter],
    ) -> tuple[wire.Channel, int, bytes]:
        """Connect to one replica and ask for the room once.

        Clients name the address. So what happens before the other side has shown the secret goes to
        the log, and the error is the same: otherwise clients could look for open ports.
        """
        stranger = f"{where} does not answer as a prefill server with the same secret"
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(host, port, limit=_BUFFER_BYTES)
            writers.append(writer)
            channel = await wire.greet(reader, writer, self._master, is_prefill=False)
            sizes = [form.tokens for form in self._options.forms]
            layout = dict(self._options.layout)
            seek = wire.Seek(op.transfer_id, op.digest, sizes, op.prefill_replica, layout)
            await channel.send(wire.SEEK, wire.pack(seek))
            return channel, *await self._next_frame(channel, wire.MAX_FOUND, where)
        except TimeoutError:
            log.warning("%s was silent", where)
            raise _Lost(504, stranger) from None
        except (OSError, EOFError, wire.Broken, wire.Corrupt) as error:
            why = getattr(error, "strerror", "") or str(error) or type(error).__name__
            log.warning("%s: %s", where, printable(why, 200))
            raise _Lost(503, stranger) from None

    async def _take(
        self, op: FindTransfer, channel: wire.Channel, download: _Download, where: str
    ) -> None:
        """Receive the pages, then the handoff."""
        wants = [(transfer_position(copy.src.key)[1], copy.group) for copy in download.copies]
        await channel.send(wire.WANT, wire.pack_wants(wants))
        asked = len(wants)
        while download.copies:
            some = download.copies[:_REPORTED_AT_ONCE]
            if self._slots is not None:
                first = asked - len(download.copies)
                come = await self._land(channel, self._slots, some, first, where)
            else:
                come = [await self._receive_page(channel, copy, where) for copy in some]
            ended = list(zip(some, come, strict=False))
            del download.copies[: len(ended)]
            ids = [copy.id for copy, has_come in ended if has_come]
            failed = [copy.id for copy, has_come in ended if not has_come]
            self._ended.put(CopyResult(ids, failed))
        most = {wire.HANDOFF: wire.MAX_HANDOFF_BYTES}
        _, body = await self._next_frame(channel, most, where)
        sizes = op.prompt_len, self._options.vocab_size
        self._ended.put(wire.read_handoff(body, op.transfer_id, *sizes))
        await channel.send(wire.DONE)

    async def _receive_page(self, channel: wire.Channel, copy: PageCopy, where: str) -> bool:
        """Receive one page; whether it is complete."""
        size = self._pages.page_bytes(copy.group)
        try:
            kind, body = await self._next_frame(channel, {wire.PAGE: size, wire.ABSENT: 0}, where)
        except wire.Corrupt as error:
            log.warning("a page of %s: %s; its tokens are computed instead", where, error)
            return False
        if kind == wire.ABSENT:
            return False
        if len(body) != size:
            raise wire.Broken(f"a page of {len(body):,} bytes, not {size:,}")
        self._pages.put(copy.group, copy.dst.page, np.frombuffer(body, np.uint8))
        return True

    async def _land(
        self,
        channel: wire.Channel,
        slots: LandingSlots,
        copies: list[PageCopy],
        first: int,
        where: str,
    ) -> list[bool]:
        """Receive the first of these pages, as many as there are free slots; whether each is
        complete.

        Args:
            first: index of the first one among all wanted pages.
        """
        taken = await slots.take(len(copies))
        try:
            offsets = [slots.offset(slot) for slot in taken]
            await channel.send(wire.GRANT, wire.pack(wire.Grant(slots.landing, offsets)))
            _, body = await self._next_frame(channel, wire.MAX_SENT, where)
            codes = wire.unpack(body, wire.SentCodes).codes
            if len(codes) != len(taken):
                raise wire.Broken(f"{len(codes)} codes for {len(taken)} pages")
            come: list[bool] = []
            for at, (copy, slot, code) in enumerate(zip(copies, taken, codes, strict=False)):
                page = slots.read(slot, self._pages.page_bytes(copy.group))
                is_whole = hmac.compare_digest(code, code_of(page, channel.key, first + at))
                if is_whole:
                    self._pages.put(copy.group, copy.dst.page, page)
                elif code:
                    log.warning(
                        "a page of %s was changed on its way (%s); its tokens are computed instead",
                        where,
                        slots.engine.name,
                    )
                come.append(is_whole)
            return come
        finally:
            slots.release(taken)

    async def _next_frame(
        self, channel: wire.Channel, most: dict[int, int], where: str
    ) -> tuple[int, bytes]:
        """The next frame, one of `most`; _Lost if the prefill server gives up."""
        kind, body = await channel.receive({**most, **wire.MAX_GONE}, wire.SILENCE_S)
        if kind == wire.GONE:
            gone = wire.unpack(body, wire.Gone)
            status = gone.status if gone.status in (400, 503, 504) else 503
            raise _Lost(status, f"{where} does not have this room: {printable(gone.text, 200)}")
        return kind, body


def _check_facts(theirs: dict[str, str], ours: dict[str, str], where: str) -> None:
    for name in sorted({**theirs, **ours}):
        there, here = theirs.get(name, "nothing"), ours.get(name, "nothing")
        if there != here:
            shown = printable(name, 40), printable(there, 80), printable(here, 80)
            raise _Lost(503, "{}: the {} differs: {} there, {} here".format(where, *shown))
