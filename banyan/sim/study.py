"""Study: one workload on one layout of devices, from memory to what clients would have seen.

Prefill and decode replicas run the real scheduler, and `SimulatedTransfer` moves pages between
them: a page is available to the decode side once the plan that sends it is launched. A decode
replica receives one page after another, each for as long as its bytes take on the link.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from banyan.base.errors import CapacityError, ConfigError
from banyan.base.ids import SlotId, StepId
from banyan.config.schema import Config, ScheduleConfig
from banyan.engine.core_spec import core_spec
from banyan.kv_cache.sizing import MemoryPlan
from banyan.messages.disaggregation import (
    CloseTransfer,
    FindTransfer,
    OpenTransfer,
    PrefillResult,
    ReceiveTransfer,
    TransferClosed,
    TransferFound,
)
from banyan.messages.plan import CopyResult, PageCopy, Row, StepPlan, transfer_position
from banyan.model_config.model_config import ModelConfig
from banyan.scheduler.routing import ROUTES
from banyan.sim.device import (
    Device,
    DPAttentionDevice,
    DPAttentionDevices,
    OneDevice,
    PipelineDevice,
    Roofline,
    World,
)
from banyan.sim.layout import Hardware, ParallelLayout, cache_groups, room_for_cache
from banyan.sim.replica import PrefillDecodePairs, ReplicaSet, SimulatedReplica, SimulationReport
from banyan.sim.workload import Arrival

_BYTES = {
    "float32": 4.0,
    "f32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "f16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "w8a8_int8": 1.0,
    "q8_0": 34 / 32,
    "q5_k": 176 / 256,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "q4_k": 144 / 256,
}
"""Bytes per weight: type -> bytes of a block / weights in it."""
_CACHE_BYTES = {"fp32": 4.0, "int8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}


@dataclass(frozen=True)
class StudyQuestion:
    """What is simulated.

    Attributes:
        weight_bits: per weight; 0 = as the checkpoint says.
        concurrency: requests kept open; 0 = they come at their times.
        context: cached positions of each row of the steps whose time is estimated.
        host_s: time that planning and launching a step takes on the host.
        peer_bytes_per_s: from a prefill to a decode server; 0 = as between devices.
    """

    config: Config
    model_config: ModelConfig
    hardware: Hardware
    arrivals: Sequence[Arrival]
    weight_bits: float = 0.0
    concurrency: int = 0
    context: int = 1024
    host_s: float = 0.0
    peer_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Study:
    """The answer for one layout. `memory` and `report` are None where the model does not fit.

    Attributes:
        decode_s: of a step in which so many rows decode.
        prefill_s: of a step with one full chunk of a prompt.
    """

    layout: ParallelLayout
    memory: MemoryPlan | None
    decode_s: dict[int, float]
    prefill_s: float
    report: SimulationReport | None
    why: str = ""


def weight_bytes_of(model_config: ModelConfig) -> float:
    """
    Raises:
        ConfigError: the size of the weight type is unknown.
    """
    name = model_config.quant.method if model_config.quant is not None else model_config.dtype
    if name not in _BYTES:
        raise ConfigError(
            f"how much a weight of type {name!r} takes is not known",
            hint="say it with --weight-bits, e.g. 4.5 for 4 bits with a scale per 32",
        )
    return _BYTES[name]


def study(
    question: StudyQuestion, layout: ParallelLayout, rows: Sequence[int] = (1, 8, 64)
) -> Study:
    """Play the arrivals of `question` on `layout`."""
    config, model_config, hardware = question.config, question.model_config, question.hardware
    weights = question.weight_bits / 8 or weight_bytes_of(model_config)
    cache = _CACHE_BYTES.get(config.cache.dtype, 2.0)
    world = World()
    config = for_layout(config, layout)
    roofline = Roofline(model_config, hardware, layout, weight_bytes=weights, cache_bytes=cache)
    decode_s = {n: roofline.seconds(_plan(n, question.context, 1)) for n in rows}
    prefill_s = roofline.seconds(_plan(1, 0, max(1, config.schedule.chunk_tokens)))
    try:
        memory = room_for_cache(config, model_config, hardware, layout, weights, cache)
    except CapacityError as error:
        return Study(layout, None, decode_s, prefill_s, None, error.text)
    question = replace(question, config=config)
    if layout.prefill:
        fleet = _pairs(question, layout, memory, world, roofline, cache)
    else:
        replicas = _replicas(question, layout, memory, world, roofline)
        fleet = ReplicaSet(world, replicas, ROUTES.load(config.parallel.load_balance))
    if question.concurrency:
        fleet.play_at_concurrency(question.arrivals, question.concurrency)
    else:
        fleet.play(question.arrivals)
    world.run()
    return Study(layout, memory, decode_s, prefill_s, fleet.report())


def for_layout(config: Config, layout: ParallelLayout) -> Config:
    """With as many steps in flight as the stages of this layout have, whatever the flags named."""
    schedule, pp = config.schedule, layout.pp
    if schedule.depth > 1:
        depth = pp + schedule.async_depth if pp > 1 else ScheduleConfig.depth
        schedule = replace(schedule, depth=depth, token_gap=pp - 1)
    return replace(config, schedule=schedule)


def _replicas(
    question: StudyQuestion,
    layout: ParallelLayout,
    memory: MemoryPlan,
    world: World,
    roofline: Roofline,
) -> list[SimulatedReplica]:
    """Replicas that do all, independent or with DP attention."""
    spec = core_spec(question.config, question.model_config, memory)
    if not layout.uses_dp_attention:
        devices = [_device(world, roofline, layout) for _ in range(layout.dp)]
        return [
            SimulatedReplica(world, spec.build(), device, question.host_s) for device in devices
        ]
    devices_of_all = DPAttentionDevices(world, roofline, layout.dp)
    found: list[SimulatedReplica] = []
    for number in range(layout.dp):
        mine = DPAttentionDevice(devices_of_all, number)
        found.append(
            SimulatedReplica(world, spec.build(step_agreement=mine), mine, question.host_s)
        )
        devices_of_all.wake.append(found[-1].turn)
    return found


def _device(world: World, roofline: Roofline, layout: ParallelLayout) -> Device:
    if layout.pp > 1:
        return PipelineDevice(world, roofline, layout.pp)
    return OneDevice(world, roofline)


def _pairs(
    question: StudyQuestion,
    layout: ParallelLayout,
    memory: MemoryPlan,
    world: World,
    roofline: Roofline,
    cache_bytes: float,
) -> PrefillDecodePairs:
    """Servers of two kinds, and rooms between them."""
    config, hardware = question.config, question.hardware
    rate = question.peer_bytes_per_s or hardware.link_bytes_per_s
    whole = cache_groups(config, question.model_config, ParallelLayout(), cache_bytes)
    carrier = SimulatedTransfer(
        world, [group.page_bytes / rate for group in whole], hardware.link_s
    )

    def replicas(count: int, mode: str) -> list[SimulatedReplica]:
        role = replace(config, handoff=replace(config.handoff, mode=mode))
        spec = core_spec(role, question.model_config, memory)
        return [
            SimulatedReplica(
                world, spec.build(), _device(world, roofline, layout), question.host_s, carrier
            )
            for _ in range(count)
        ]

    route = ROUTES.load(config.parallel.load_balance)
    prefill, decode = replicas(layout.prefill, "prefill"), replicas(layout.decode, "decode")
    return PrefillDecodePairs(world, prefill, decode, route)


def _plan(rows: int, start: int, count: int) -> StepPlan:
    return StepPlan(step=StepId(1), rows=[Row(slot=SlotId(1), start=start, count=count)] * rows)


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
