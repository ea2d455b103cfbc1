"""DecodeSide: brings the pages of rooms from the servers that compute prompts.

It asks only for pages that copies name, and puts what comes into the places that they say, if it is
as long as a page: nobody who is connected can write anything else. A page that was changed on its
way is a failed copy; a connection that ends, or is silent for too long, is the end of its room.
"""

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from banyan.base.hosts import is_loopback
from banyan.base.log import logger, printable
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

_TOLD_AT_ONCE = 16
"""Pages whose coming is told together: each word wakes the engine."""
_CONNECT_S = 5.0
_BUFFER_BYTES = 1 << 20


@dataclass
class _Download:
    """A room that is being asked for."""

    copies: list[PageCopy] = field(default_factory=list[PageCopy])
    wanted: int = -1
    """Copies that there will be; -1 = not known yet."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def look(self) -> None:
        if len(self.copies) == self.wanted:
            self.ready.set()


class _Lost(Exception):
    """Nothing more comes from a room."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class DecodeSide:
    """Satisfies PageMover. What has no lock belongs to the thread.

    Args:
        carrier: by which pages land in slots; None = they come over the connection.
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
        self._out = EndedTransfers(wake)
        self._sought: dict[bytes, _Download] = {}
        self._thread = LoopThread("rooms")

    # -- from the engine ----------------------------------------------------------------------

    def start(self, copies: list[PageCopy]) -> None:
        coming = [copy for copy in copies if not copy.is_on_device]
        if coming:
            self._thread.call(self._expect, coming)

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

    def _expect(self, copies: list[PageCopy]) -> None:
        failed: list[int] = []
        for copy in copies:
            sought = self._sought.get(transfer_position(copy.src.key)[0])
            if sought is None:
                failed.append(copy.id)
            else:
                sought.copies.append(copy)
                sought.look()
        if failed:
            self._out.tell(CopyResult([], failed))

    def _obey(self, order: KVTransferOp) -> None:
        sought = self._sought.get(order.transfer_id)
        match order:
            case FindTransfer():
                assert sought is None, "a room is asked for twice"
                new = self._sought[order.transfer_id] = _Download()
                new.task = self._thread.run(self._bring(order, new))
            case ReceiveTransfer():
                if sought is not None:
                    sought.wanted = order.copies
                    sought.look()
            case CloseTransfer():
                if sought is not None and sought.task is not None:
                    sought.task.cancel()
            case _:
                raise AssertionError(f"a server that takes was told {order}")

    async def _bring(self, order: FindTransfer, sought: _Download) -> None:
        """All of one room."""
        where = f"the prefill server {printable(order.prefill_address, 80)}"
        writers: list[asyncio.StreamWriter] = []
        sign: asyncio.Task[None] | None = None
        try:
            channel, tokens = await self._find(order, where, writers)
            sign = self._thread.run(channel.say_often())
            self._out.tell(TransferFound(order.transfer_id, tokens))
            await sought.ready.wait()
            await self._take(order, channel, sought, where)
        except _Lost as lost:
            self._out.tell(TransferFailed(order.transfer_id, lost.status, str(lost)))
        except TimeoutError:
            text = f"{where} was silent for {wire.SILENCE_S:g} s"
            self._out.tell(TransferFailed(order.transfer_id, 504, text))
        except (EOFError, OSError, wire.Broken, wire.Corrupt) as error:
            why = str(error) or type(error).__name__
            text = f"{where} was lost before the prompt was handed over: {printable(why, 200)}"
            self._out.tell(TransferFailed(order.transfer_id, 503, text))
        finally:
            del self._sought[order.transfer_id]
            if sign is not None:
                sign.cancel()
            for writer in writers:
                writer.close()
            if sought.copies:
                self._out.tell(CopyResult([], [copy.id for copy in sought.copies]))

    async def _find(
        self, order: FindTransfer, where: str, writers: list[asyncio.StreamWriter]
    ) -> tuple[wire.Channel, int]:
        """A connection to the room, to a server of the same model, and the tokens whose pages it
        gives."""
        host, _, port = order.prefill_address.rpartition(":")
        if not self._options.secret and not is_loopback(host):
            raise _Lost(400, f"{where} is on another machine, and this server has no secret")
        place = host.strip("[]"), int(port)
        channel, kind, body = await self._ask(order, *place, where, writers)
        if kind == wire.ELSEWHERE:
            ports = wire.unpack(body, wire.Redirect).ports
            if not 0 < place[1] + ports < 1 << 16:
                raise wire.Broken(f"a replica {ports} ports further")
            place = place[0], place[1] + ports
            channel, kind, body = await self._ask(order, *place, where, writers)
        if kind != wire.FOUND:
            raise wire.Broken("none of its replicas has the room")
        said = wire.unpack(body, wire.Found)
        _check_facts(said.facts, self._options.facts, where)
        if not 0 <= said.tokens <= order.prompt_len:
            raise wire.Broken(f"pages of {said.tokens:,} tokens")
        return channel, said.tokens

    async def _ask(
        self,
        order: FindTransfer,
        host: str,
        port: int,
        where: str,
        writers: list[asyncio.StreamWriter],
    ) -> tuple[wire.Channel, int, bytes]:
        """A connection to one replica, and what it says of the room."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(host, port, limit=_BUFFER_BYTES)
        except TimeoutError:
            raise _Lost(504, f"{where} did not answer within {_CONNECT_S:g} s") from None
        except OSError as error:
            raise _Lost(503, f"{where} cannot be reached: {error.strerror or error}") from None
        writers.append(writer)
        channel = await wire.greet(reader, writer, self._master, is_prefill=False)
        sizes = [form.tokens for form in self._options.forms]
        seek = wire.Seek(order.transfer_id, order.digest, sizes, order.prefill_replica)
        await channel.send(wire.SEEK, wire.pack(seek))
        patience_s = self._options.patience_s
        try:
            async with asyncio.timeout(patience_s) as patience:
                return channel, *await self._said(channel, wire.MAX_FOUND, where)
        except TimeoutError:
            if not patience.expired():
                raise
            text = f"{where} was not asked for this room within {patience_s:g} s"
            raise _Lost(504, text) from None

    async def _take(
        self, order: FindTransfer, channel: wire.Channel, sought: _Download, where: str
    ) -> None:
        """Pages, and then the rest."""
        wants = [(transfer_position(copy.src.key)[1], copy.group) for copy in sought.copies]
        await channel.send(wire.WANT, wire.pack_wants(wants))
        asked = len(wants)
        while sought.copies:
            some = sought.copies[:_TOLD_AT_ONCE]
            if self._slots is not None:
                first = asked - len(sought.copies)
                come = await self._land(channel, self._slots, some, first, where)
            else:
                come = [await self._bring_page(channel, copy, where) for copy in some]
            ended = list(zip(some, come, strict=False))
            del sought.copies[: len(ended)]
            ids = [copy.id for copy, has_come in ended if has_come]
            failed = [copy.id for copy, has_come in ended if not has_come]
            self._out.tell(CopyResult(ids, failed))
        most = {wire.HANDOFF: wire.MAX_HANDOFF_BYTES}
        _, body = await self._said(channel, most, where)
        sizes = order.prompt_len, self._options.vocab_size
        self._out.tell(wire.read_handoff(body, order.transfer_id, *sizes))
        await channel.send(wire.DONE)

    async def _bring_page(self, channel: wire.Channel, copy: PageCopy, where: str) -> bool:
        """Whether the page has come whole."""
        size = self._pages.page_bytes(copy.group)
        try:
            kind, body = await self._said(channel, {wire.PAGE: size, wire.ABSENT: 0}, where)
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
        """Whether each of the first of these pages has come whole: as many as there are slots for.

        Args:
            first: place of the first one among all that are wanted.
        """
        taken = await slots.take(len(copies))
        try:
            offsets = [slots.offset(slot) for slot in taken]
            await channel.send(wire.GRANT, wire.pack(wire.Grant(slots.landing, offsets)))
            _, body = await self._said(channel, wire.MAX_SENT, where)
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
                    name = slots.engine.name
                    text = (
                        "a page of %s was changed on its way (%s); its tokens are computed instead"
                    )
                    log.warning(text, where, name)
                come.append(is_whole)
            return come
        finally:
            slots.release(taken)

    async def _said(
        self, channel: wire.Channel, most: dict[int, int], where: str
    ) -> tuple[int, bytes]:
        """The next frame, one of `most`."""
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
