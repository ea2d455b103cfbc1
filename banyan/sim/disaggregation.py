"""SimulatedTransfer: KV transfers between simulated prefill and decode replicas.

Both sides run the real scheduler, so the order of events is decided as on servers. A page is
available to the decode side once the plan that sends it is launched. A decode replica receives one
page after another, each for as long as its bytes take on the link.
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
from banyan.sim.device import World
from banyan.sim.replica import SimulatedReplica

Place = tuple[int, bytes]
"""Group and key of a page."""


@dataclass
class _Transfer:
    prefill: SimulatedReplica | None = None
    tokens: int = 0
    """Tokens whose pages the prefill replica has cached."""
    decode: SimulatedReplica | None = None
    sent: dict[Place, None] = field(default_factory=dict[Place, None])
    wanted: list[PageCopy] = field(default_factory=list[PageCopy])
    missing: int | None = None
    """Copies that have not been requested or have not arrived; None = not announced yet."""
    handoff: PrefillResult | None = None


class SimulatedTransfer:
    """Satisfies `sim.replica.TransferPort` for all replicas of a study.

    Args:
        page_s: transfer seconds of a page, by group.
        latency_s: seconds until the first byte arrives.
    """

    def __init__(self, world: World, page_s: Sequence[float], latency_s: float) -> None:
        self._world = world
        self._page_s = page_s
        self._latency_s = latency_s
        self._transfers: dict[bytes, _Transfer] = {}
        self._busy_until_s: dict[SimulatedReplica, float] = {}

    def carry(self, replica: SimulatedReplica, plan: StepPlan) -> list[int]:
        """Start a plan's copies to and from other replicas.

        Returns:
            The plan's other copies, which end with its step.
        """
        sent, dropped = list[int](), list[int]()
        touched: dict[bytes, None] = {}
        for copy in plan.copies:
            if copy.is_on_device:
                continue
            key = copy.dst.key or copy.src.key
            name, _ = transfer_position(key)
            transfer = self._transfers.get(name)
            if transfer is None:  # its request has ended
                dropped.append(copy.id)
                continue
            touched[name] = None
            if copy.dst.key:
                transfer.sent[copy.group, key] = None
                sent.append(copy.id)
            else:
                transfer.wanted.append(copy)
        if sent or dropped:
            self._notify(replica, CopyResult(sent, dropped))
        for name in touched:
            self._advance(name)
        return [copy.id for copy in plan.copies if copy.is_on_device]

    def run_transfer_ops(self, replica: SimulatedReplica) -> None:
        for op in replica.take_transfer_ops():
            transfer = self._transfers.setdefault(op.transfer_id, _Transfer())
            match op:
                case OpenTransfer():
                    transfer.prefill, transfer.tokens = replica, op.tokens
                case FindTransfer():
                    transfer.decode = replica
                case ReceiveTransfer():
                    transfer.missing = op.copies
                case PrefillResult():
                    transfer.handoff = op
                case CloseTransfer():
                    self._close(op.transfer_id)
                    continue
            if isinstance(op, OpenTransfer | FindTransfer) and transfer.prefill and transfer.decode:
                self._notify(transfer.decode, TransferFound(op.transfer_id, transfer.tokens))
            self._advance(op.transfer_id)

    def _advance(self, name: bytes) -> None:
        """Send the pages that are available, in order, then the handoff."""
        transfer = self._transfers.get(name)
        if transfer is None or transfer.decode is None or transfer.missing is None:
            return
        now, decode = self._world.clock.now(), transfer.decode
        free_s = self._busy_until_s.get(decode, 0.0)
        while transfer.wanted:
            copy = transfer.wanted[0]
            is_available = (copy.group, copy.src.key) in transfer.sent
            if not is_available and transfer.handoff is None:
                return
            del transfer.wanted[0]
            transfer.missing -= 1
            free_s = max(now, free_s) + (self._page_s[copy.group] if is_available else 0.0)
            ended = CopyResult([copy.id]) if is_available else CopyResult([], [copy.id])
            self._world.at(free_s + self._latency_s, lambda ended=ended: decode.receive(ended))
        self._busy_until_s[decode] = free_s
        if transfer.missing or transfer.handoff is None:
            return
        handoff = transfer.handoff
        self._world.at(max(now, free_s) + self._latency_s, lambda: decode.receive(handoff))
        self._close(name)

    def _close(self, name: bytes) -> None:
        transfer = self._transfers.pop(name, None)
        if transfer is not None and transfer.prefill is not None:
            self._notify(transfer.prefill, TransferClosed(name))

    def _notify(
        self, replica: SimulatedReplica, event: CopyResult | TransferFound | TransferClosed
    ) -> None:
        self._world.at(self._world.clock.now() + self._latency_s, lambda: replica.receive(event))
