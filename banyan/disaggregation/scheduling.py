"""Handoff: one server computes prompts, another one continues them. The Giver is the first one's
part of the scheduler, the Taker the second one's.

A request that waits for its room never holds up another one. What it gets are whole units of its
prompt and its first token; the few tokens behind the last unit are computed where it goes on, those
behind the last one of the server that gives too, whose pages may be longer. A page that does not
come is computed. Where nothing comes at all the request fails alone.

A request that gives has its end only once its room is closed. Whoever asked for it can so take it
back for as long as anything of it is kept, by leaving: pages that nobody will take do not stay.

    giving: submitted → opened → pages as their steps complete → first token → handed off → closed
    taking: sought ──RoomFound──► found ──room for it──► loading ──HandOff──► enters like any other
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

import msgspec

from banyan.base.errors import RequestError
from banyan.base.ids import NO_STEP, RequestId
from banyan.disaggregation.peer_pages import PeerTier
from banyan.kv_cache.cache import TOKEN_BYTES, KVCache, unit_keys
from banyan.kv_cache.radix_tree import Node
from banyan.messages.disaggregation import (
    CloseRoom,
    HandOff,
    KVTransferEvent,
    KVTransferOp,
    OpenRoom,
    RoomClosed,
    RoomFound,
    SeekRoom,
    TakeRoom,
)
from banyan.messages.events import Event, Finished
from banyan.messages.plan import RowScores
from banyan.messages.requests import Generate
from banyan.scheduler.request import Request, Taking

GIVES, TAKES = "prefill", "decode"
_DIGEST_BYTES = 32


class Rooms(Protocol):
    """A server's part in handing sequences over. Requests without a room pass it by."""

    orders: list[KVTransferOp]
    """EndedTransfers towards the mover."""
    late: list[Event]
    """Ends of requests that waited for their rooms, for the front."""

    @property
    def num_open(self) -> int:
        """Rooms that something is kept for, or waited for."""
        ...

    def enter(self, generate: Generate) -> Generate:
        """What is done for a request that has come; RequestError when its room is in use."""
        ...

    def refused(self, generate: Generate) -> None:
        """It is refused, before or after it was let in here."""
        ...

    def begin(self, request: Request) -> None:
        """A request waits from now on."""
        ...

    def go_on(self, running: list[Request], waiting: list[Request], free_slots: int) -> None:
        """Before each plan."""
        ...

    def holds_back(self, request: Request) -> bool:
        """Whether a waiting request may not enter yet."""
        ...

    def copies_ended(self) -> None:
        """Some copies have ended."""
        ...

    def scored(self, request: Request, scores: list[RowScores]) -> None:
        """Scores were told of a request."""
        ...

    def completed(self, request: Request) -> None:
        """A request has come to its end in order, and holds its pages still."""
        ...

    def ended(self, request: Request) -> None:
        """A request has ended, in whatever way."""
        ...

    def keep_end(self, request: Request, events: list[Event]) -> None:
        """The last event is the end of a completed request; it may be too early to tell of it."""
        ...

    def abandon(self, request_id: RequestId) -> None:
        """Nobody waits for a request any more that has ended."""
        ...

    def hear(self, news: KVTransferEvent) -> Request | None:
        """Take in what the mover tells; a request that something is to be done about."""
        ...


@dataclass
class _Gift:
    """A room that is open."""

    units: int
    pages: int
    is_admitted: bool = False
    """There is room for its pages beyond the cache."""
    given: int = 0
    """Units, from the first one on."""
    last: list[Node] = field(default_factory=list[Node])
    """Units of a request that has ended whose states are still being kept."""
    scores: list[RowScores] = field(default_factory=list[RowScores])
    handoff: HandOff | None = None
    """Waits until all pages have been given."""


class Giver:
    """Rooms that this server opens.

    Args:
        most_pages: pages that open rooms may take beyond the cache; one room alone may take more.
    """

    def __init__(self, cache: KVCache, peers: PeerTier, most_pages: int) -> None:
        self.orders: list[KVTransferOp] = []
        self.late: list[Event] = []
        self._cache = cache
        self._peers = peers
        self._most_pages = most_pages
        self._gifts: dict[bytes, _Gift] = {}
        """Those that are being made."""
        self._kept: dict[bytes, int] = {}
        """Pages of the rooms that are not closed yet."""
        self._ends: dict[bytes, Finished] = {}
        """Of requests that have ended, by rooms that are not closed yet."""

    @property
    def num_open(self) -> int:
        return len(self._kept)

    def enter(self, generate: Generate) -> Generate:
        if not generate.room:
            return generate
        if self._is_in_use(generate.room):
            raise _in_use()
        sampling = generate.sampling
        one = msgspec.structs.replace(sampling, max_new_tokens=min(1, sampling.max_new_tokens))
        return msgspec.structs.replace(generate, sampling=one)

    def refused(self, generate: Generate) -> None:
        if generate.room and not self._is_in_use(generate.room):
            self.orders.append(CloseRoom(generate.room))

    def begin(self, request: Request) -> None:
        room = request.generate.room
        if not room:
            return
        units = request.prompt_len // self._cache.unit
        self._gifts[room] = _Gift(units, max(1, self._peers.pages_of(units)))
        digest = digest_of(request.generate, self._cache)
        self.orders.append(OpenRoom(room, digest, units * self._cache.unit))

    def go_on(self, running: list[Request], waiting: list[Request], free_slots: int) -> None:
        """Pages wait for whoever takes them in memory of the host, which is bounded: a request
        whose pages find no room there waits, and those behind it do."""
        taken = sum(self._kept.values())
        for request in waiting:
            gift = self._gifts.get(request.generate.room)
            if gift is None or gift.is_admitted:
                continue
            if taken and taken + gift.pages > self._most_pages:
                break
            gift.is_admitted = True
            self._kept[request.generate.room] = gift.pages
            taken += gift.pages
        for request in running:
            gift = self._gifts.get(request.generate.room)
            if gift is not None:
                self._give(request, gift)

    def holds_back(self, request: Request) -> bool:
        gift = self._gifts.get(request.generate.room)
        return gift is not None and not gift.is_admitted

    def copies_ended(self) -> None:
        over = [g for g in self._gifts.values() if g.handoff is not None]
        for gift in over:
            handoff = gift.handoff
            assert handoff is not None
            if gift.last and not self._cache.states.is_target(gift.last[0]):
                self._give_path(handoff.room, gift, gift.last)
                gift.last.clear()
            if not gift.last and not self._peers.is_giving(handoff.room):
                self.orders.append(handoff)
                del self._gifts[handoff.room]

    def scored(self, request: Request, scores: list[RowScores]) -> None:
        gift = self._gifts.get(request.generate.room)
        if gift is not None:
            gift.scores += scores

    def completed(self, request: Request) -> None:
        room = request.generate.room
        gift = self._gifts.get(room)
        if gift is None:
            return
        if request.lease is not None:
            path = request.lease.path[gift.given : gift.units]
            self._give_path(room, gift, path)
            gift.last = [node for node in path[:1] if self._cache.states.is_target(node)]
        output = bytes(request.tokens[request.prompt_len * TOKEN_BYTES :])
        gift.handoff = HandOff(room, output, gift.scores, request.cached_tokens)
        self.copies_ended()

    def ended(self, request: Request) -> None:
        gift = self._gifts.get(request.generate.room)
        if gift is not None and gift.handoff is None:
            del self._gifts[request.generate.room]
            self.orders.append(CloseRoom(request.generate.room))

    def keep_end(self, request: Request, events: list[Event]) -> None:
        if request.generate.room in self._kept:
            end = events.pop()
            assert isinstance(end, Finished)
            self._ends[request.generate.room] = end

    def abandon(self, request_id: RequestId) -> None:
        found = [room for room, end in self._ends.items() if end.request == request_id]
        for room in found:
            self.late.append(self._ends.pop(room))
            self._gifts.pop(room, None)
            self.orders.append(CloseRoom(room))

    def hear(self, news: KVTransferEvent) -> Request | None:
        if isinstance(news, RoomClosed):
            self._kept.pop(news.room, None)
            if news.room in self._ends:
                self.late.append(self._ends.pop(news.room))
        return None

    def _is_in_use(self, room: bytes) -> bool:
        return room in self._gifts or room in self._kept

    def _give(self, request: Request, gift: _Gift) -> None:
        """Give the units whose steps are complete."""
        if request.lease is not None:
            path = request.lease.path[gift.given : gift.units]
            self._give_path(request.generate.room, gift, path)

    def _give_path(self, room: bytes, gift: _Gift, path: list[Node]) -> None:
        """Give units from `gift.given` on, as far as they are there; those leave the list."""
        while path:
            node = path[0]
            if node.promised != NO_STEP or not node.is_attached:
                return
            is_last = gift.given == gift.units - 1  # the one whose states are wanted
            if is_last and self._cache.states.is_target(node):
                return
            self._peers.give(room, node, gift.given, gift.units)
            gift.given += 1
            del path[0]


class Taker:
    """Rooms that this server takes sequences from."""

    def __init__(self, cache: KVCache, peers: PeerTier, chunk_tokens: int) -> None:
        self.orders: list[KVTransferOp] = []
        self.late: list[Event] = []
        self._cache = cache
        self._peers = peers
        self._chunk_tokens = chunk_tokens
        self._takers: dict[bytes, Request] = {}

    @property
    def num_open(self) -> int:
        takings = [request.taking for request in self._takers.values()]
        return sum(taking is not None and not taking.has_handoff for taking in takings)

    def enter(self, generate: Generate) -> Generate:
        if generate.room in self._takers:
            raise _in_use()
        return generate

    def refused(self, generate: Generate) -> None:
        """The other server has been told the same request."""

    def begin(self, request: Request) -> None:
        generate = request.generate
        if not generate.room:
            return
        request.taking = Taking(request.prompt_len // self._cache.unit)
        self._takers[generate.room] = request
        digest = digest_of(generate, self._cache)
        length = request.prompt_len
        order = SeekRoom(generate.room, generate.peer, digest, length, generate.prefill_replica)
        self.orders.append(order)

    def go_on(self, running: list[Request], waiting: list[Request], free_slots: int) -> None:
        """Begin to load for those that are next, as many as may soon enter."""
        reserved = [0] * len(self._cache.groups)
        left = max(1, free_slots)
        for request in waiting:
            taking = request.taking
            if not left:
                return
            if taking is None or not taking.is_found:
                continue
            left -= 1
            if not taking.is_asked and not self._begin_load(request, taking, reserved):
                return
            for g, group in enumerate(self._cache.groups):
                reserved[g] += group.pages_for(request.known + 1)

    def holds_back(self, request: Request) -> bool:
        return request.taking is not None and not request.taking.is_over

    def copies_ended(self) -> None:
        """Nothing follows from it before the next plan."""

    def scored(self, request: Request, scores: list[RowScores]) -> None:
        """Nothing is given on."""

    def completed(self, request: Request) -> None:
        """Nothing is given on."""

    def ended(self, request: Request) -> None:
        taking = request.taking
        if taking is None:
            return
        self._takers.pop(request.generate.room, None)
        if not taking.has_handoff:
            self.orders.append(CloseRoom(request.generate.room))

    def keep_end(self, request: Request, events: list[Event]) -> None:
        """Nobody else has a part in it any more."""

    def abandon(self, request_id: RequestId) -> None:
        """Nothing is kept."""

    def hear(self, news: KVTransferEvent) -> Request | None:
        request = self._takers.get(news.room)
        if request is None or request.taking is None or request.taking.has_handoff:
            return None
        if isinstance(news, RoomFound):
            taking = request.taking
            taking.units = min(taking.units, news.tokens // self._cache.unit)
            taking.is_found = True
            return None
        if isinstance(news, HandOff):
            request.taking.has_handoff = True
        return request

    def _begin_load(self, request: Request, taking: Taking, reserved: list[int]) -> bool:
        """Ask for what the cache does not have; False (and nothing begun) without room."""
        unit, units, namespace = self._cache.unit, taking.units, request.namespace
        match = self._cache.probe(namespace, request.tokens, units * unit).whole
        depth, copies = len(match.path), 0
        if depth < units:
            tokens = request.known + 1
            if not self._cache.admits(match, tokens, self._chunk_tokens, reserved):
                return False
            keys = list(unit_keys(request.tokens, unit, depth, units))
            namespace = self._cache.weights + namespace
            begun = self._peers.load(request.generate.room, namespace, match.path, keys, units)
            if begun is None and not self._cache.horizon.is_clear:
                return False  # pages are on their way back
            if begun is not None:
                taking.load, copies = begun
        taking.is_asked = True
        self.orders.append(TakeRoom(request.generate.room, copies))
        return True


def open_rooms(role: str, cache: KVCache, chunk_tokens: int) -> Rooms | None:
    """The part of a server of this role; None for one that does both itself."""
    if not role or cache.peers is None:
        return None
    if role == TAKES:
        return Taker(cache, cache.peers, chunk_tokens)
    assert role == GIVES, role
    return Giver(cache, cache.peers, sum(pool.total for pool in cache.pools) // 2)


def digest_of(generate: Generate, cache: KVCache) -> bytes:
    """What two servers must agree about before one takes the other's pages of a sequence: pages of
    another prompt would become part of answers to this one, and to those that begin like it."""
    made = blake2b(cache.weights, digest_size=_DIGEST_BYTES, person=b"banyan handoff")
    # An adapter's name, the digest of its matrices and whose request it is are its namespace.
    adapter = generate.namespace if generate.adapter else b""
    for part in (generate.tokens, generate.embeds, adapter):
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()


def _in_use() -> RequestError:
    return RequestError(
        "bootstrap_room is in use by another request",
        param="bootstrap_room",
        code="room_in_use",
        hint="Give every request a number of its own.",
    )
