"""Handover: rooms between simulated prefill and decode replicas, in the place of what carries
pages.

Both sides run the shipped scheduler, so what waits for what is decided as on servers. A page is
there for the other side once the plan that gives it is launched; a decode replica takes one after
another, each as long as its bytes take on the link.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from banyan.messages.disaggregation import (
    CloseTransfer,
    FindTransfer,
    OpenTransfer,
    PrefillResult,
    ReceiveTransfer,
    TransferClosed,
    TransferFound,
)
from banyan.messages.plan import CopyResult, PageCopy, StepPlan, transfer_position
from banyan.sim.replica import Replica
from banyan.sim.world import World

Place = tuple[int, bytes]
"""Group and key of a page."""


@dataclass
class _Room:
    giver: Replica | None = None
    tokens: int = 0
    """Whose pages the giver has."""
    taker: Replica | None = None
    given: dict[Place, None] = field(default_factory=dict[Place, None])
    wanted: list[PageCopy] = field(default_factory=list[PageCopy])
    missing: int = -1
    """Copies that are still to be named or to come; -1 = nobody has said how many."""
    handoff: PrefillResult | None = None


class Handover:
    """Satisfies Carrier of `sim/replica.py`, for all replicas of a study.

    Args:
        page_s: of a page of each group, on the way.
        latency_s: until the first byte of anything is there.
    """

    def __init__(self, world: World, page_s: Sequence[float], latency_s: float) -> None:
        self._world = world
        self._page_s = page_s
        self._latency_s = latency_s
        self._rooms: dict[bytes, _Room] = {}
        self._busy_until_s: dict[Replica, float] = {}

    def carry(self, replica: Replica, plan: StepPlan) -> list[int]:
        """The plan's copies that end with its step; of those to and from rooms it is told later."""
        given, gone = list[int](), list[int]()
        touched: dict[bytes, None] = {}
        for copy in plan.copies:
            if copy.is_on_device:
                continue
            key = copy.dst.key or copy.src.key
            name, _ = transfer_position(key)
            room = self._rooms.get(name)
            if room is None:  # its request has ended
                gone.append(copy.id)
                continue
            touched[name] = None
            if copy.dst.key:
                room.given[copy.group, key] = None
                given.append(copy.id)
            else:
                room.wanted.append(copy)
        if given or gone:
            self._say(replica, CopyResult(given, gone))
        for name in touched:
            self._go_on(name)
        return [copy.id for copy in plan.copies if copy.is_on_device]

    def obey(self, replica: Replica) -> None:
        for order in replica.take_transfer_ops():
            room = self._rooms.setdefault(order.transfer_id, _Room())
            match order:
                case OpenTransfer():
                    room.giver, room.tokens = replica, order.tokens
                case FindTransfer():
                    room.taker = replica
                case ReceiveTransfer():
                    room.missing = order.copies
                case PrefillResult():
                    room.handoff = order
                case CloseTransfer():
                    self._close(order.transfer_id)
                    continue
            if isinstance(order, OpenTransfer | FindTransfer) and room.giver and room.taker:
                self._say(room.taker, TransferFound(order.transfer_id, room.tokens))
            self._go_on(order.transfer_id)

    def _go_on(self, name: bytes) -> None:
        """Send what is there, in order, and the rest behind it."""
        room = self._rooms.get(name)
        if room is None or room.taker is None or room.missing < 0:
            return
        now, taker = self._world.clock.now(), room.taker
        free_s = self._busy_until_s.get(taker, 0.0)
        while room.wanted:
            copy = room.wanted[0]
            is_there = (copy.group, copy.src.key) in room.given
            if not is_there and room.handoff is None:
                return
            del room.wanted[0]
            room.missing -= 1
            free_s = max(now, free_s) + (self._page_s[copy.group] if is_there else 0.0)
            ended = CopyResult([copy.id]) if is_there else CopyResult([], [copy.id])
            self._world.at(free_s + self._latency_s, lambda ended=ended: taker.hear(ended))
        self._busy_until_s[taker] = free_s
        if room.missing or room.handoff is None:
            return
        handoff = room.handoff
        self._world.at(max(now, free_s) + self._latency_s, lambda: taker.hear(handoff))
        self._close(name)

    def _close(self, name: bytes) -> None:
        room = self._rooms.pop(name, None)
        if room is not None and room.giver is not None:
            self._say(room.giver, TransferClosed(name))

    def _say(self, replica: Replica, news: CopyResult | TransferFound | TransferClosed) -> None:
        self._world.at(self._world.clock.now() + self._latency_s, lambda: replica.hear(news))
