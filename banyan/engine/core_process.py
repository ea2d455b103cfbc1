# pyright: basic
"""The composition root for one replica: the one file where engine, runner and models meet.

Rank 0 runs engine and runner in one process; the other ranks only take plans and run them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec
import torch
import zmq

from banyan.base.child_process import Process
from banyan.base.clock import WallClock
from banyan.base.errors import ConfigError
from banyan.base.heap import let_go
from banyan.base.log import logger
from banyan.base.trace import Marks
from banyan.base.wake import WakeEvent
from banyan.config.defaults import with_settings
from banyan.config.kv_events import kv_events
from banyan.config.schema import Config, ParallelConfig
from banyan.dp_attention.network_clock import open_far_step_clock
from banyan.dp_attention.step_clock import StepClock, open_step_clock
from banyan.engine.core import EngineCore
from banyan.engine.core_spec import core_spec
from banyan.engine.flight_recorder import Recorders
from banyan.engine.grammar_queue import GrammarQueue
from banyan.engine.grammar_setup import open_grammars
from banyan.engine.kv_events import Publisher
from banyan.engine.kv_transfer_setup import Served, arrange, mover_of, store_preparers
from banyan.engine.launcher import Fanout, Launcher, Threaded
from banyan.engine.loop import EngineLoop, Link
from banyan.engine.model_loader import (
    OpenModel,
    Phases,
    agree_on_memory,
    groups_of,
    open_model,
    plan_the_memory,
    runner_sizes,
)
from banyan.engine.multi_node import Nodes, check_secret, own_hello
from banyan.engine.process_spec import NO_RECORDING, RANK, ProcessSpec
from banyan.engine.ranks import LocalRanks
from banyan.engine.step_log import StepLog
from banyan.formats.shards import size_of_weights
from banyan.grammar.compiler import GrammarCompiler
from banyan.kv_cache.cache import WEIGHTS_BYTES
from banyan.kv_cache.groups import CacheGroup
from banyan.kv_cache.sizing import MemoryPlan
from banyan.kv_transfer.page_mover import PageMover
from banyan.lora.namespaces import AdapterNames
from banyan.lora.pool import LoRAPool, open_lora_pool
from banyan.lora.scheduling import AdapterRules
from banyan.messages.control_ops import (
    ControlOp,
    DropAdapter,
    ForgetDrafts,
    PlaceExperts,
    ReadWeight,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    TakeAdapter,
    TakeWeights,
)
from banyan.messages.events import Ready
from banyan.messages.plan import StepPlan
from banyan.messages.wire import plan_codec
from banyan.model_config.model_config import ModelConfig
from banyan.moe.balancer import ExpertMover, balance_between_steps, open_balancer
from banyan.moe.routing_record import open_expert_record, prepare_nothing, refuse_to_record
from banyan.ops.api import Peaks
from banyan.ops.bind import PROBES
from banyan.parallel.collectives import Meeting
from banyan.parallel.gloo import own_address
from banyan.parallel.process_group import open_store
from banyan.pipeline.launcher import Staged
from banyan.pipeline.runner_stage import PipelineStage, serve_stage
from banyan.runner.control_ops import ControlOpExecutor, PrepareOp, serve_rank
from banyan.runner.kvstore import KVStore
from banyan.runner.op_timer import OpTimer
from banyan.runner.profiler import Profiler
from banyan.runner.rank_page_access import (
    LocalRankAccess,
    RankAccess,
    RemoteRankAccess,
    pages_file_of,
    publish_pages,
    publish_pages_remotely,
    rank_addresses_of,
)
from banyan.runner.rank_pages import EarlyMover
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from banyan.runner.speculative import DRAFTERS
from banyan.runner.speculative.base import Drafter
from banyan.runner.speculative.draft_runner import DraftRunner
from banyan.runner.weights import LoadedWeights

if TYPE_CHECKING:
    from banyan.engine.ray_nodes import RayNodes

log = logger(__name__)

_MULTI_STEP = "schedule.multi_step"


def run_engine(
    config: Config,
    model_config: ModelConfig,
    link: Link,
    started: Callable[[EngineLoop], None],
    secret: str = "",
    recording: int = NO_RECORDING,
    spares: Sequence[Process] = (),
) -> None:
    """Load the model and serve `link` until the loop is stopped.

    Args:
        started: given the loop before it runs, so that it can be stopped from elsewhere.
        secret: what the nodes of this replica have in common, and servers that hand over.
        recording: descriptor of the flight recorder's memory.
        spares: processes for other ranks of this machine, as many as there are, or fewer.
    """
    clock = WallClock()
    phases = Phases(clock)
    with ExitStack() as cleanup:
        ranks = OtherRanks(config, model_config, secret, spares)
        cleanup.push(lambda kind, *_: ranks.close(is_failure=kind is not None))
        phases.done("other ranks")
        opened = open_model(config, model_config, 0, ranks.meeting, phases)
        config, settings = opened.config, opened.settings
        memory = plan_the_memory(model_config, opened)
        sizes = runner_sizes(model_config, opened, memory)
        rank_access = ranks.send_sizes(sizes)
        wake = WakeEvent()
        cleanup.callback(wake.close)
        served = _served(config, model_config, opened, memory.groups)
        open_mover = mover_of(served, wake.wake, secret, rank_access)
        lora_pool = open_lora_pool(config.lora, opened.model, opened.build, opened.platform.stream)
        runner = ModelRunner(
            model=opened.model,
            build=opened.build,
            config=sizes,
            platform=opened.platform,
            open_mover=open_mover,
            open_drafter=_open_drafter(config),
            draft=opened.draft,
            lora_pool=lora_pool,
        )
        runner.wake_fd = wake.fd
        config, settings = _settle_multi_step(config, settings, runner)
        kernels, marks = opened.kernels, Marks("engine")
        switching = store_preparers(served, runner.mover)
        obeying = _with_orders(config, model_config, opened, runner, [marks], lora_pool, switching)
        launcher = _open_launcher(model_config, opened, runner, obeying, ranks, wake.wake)
        balancer = open_balancer(config, model_config, opened.build, wake.wake)
        del opened, served  # only the runner holds the weights, so that others may take their place
        phases.done("cache")
        first, laid_out = (lora_pool.first, lora_pool.laid_out_bytes) if lora_pool else ((), 0)
        spec = core_spec(config, model_config, memory, first, are_laid_out=laid_out > 0)
        recorders = Recorders(config.observe, spec, recording, cleanup)
        grammars = open_grammars(config, model_config, wake.wake)
        desk = _desk_of(grammars, cleanup)
        step_clock = _step_clock(config.parallel, ranks.meeting, secret)
        tells = kv_events(config.observe) is not None
        core = spec.build(grammars, step_clock, recorders.recorder, tells)
        recorders.follow(core, clock.now())
        loop = EngineLoop(
            *(core, launcher, link, wake, clock),
            config.schedule.check_ledger,
            desk,
            ranks if config.parallel.world > 1 else None,
            config.schedule.watchdog_s,
            StepLog(config.observe.step_log_interval),
            marks,
            runner.mover,
            soft_watchdog_s=config.schedule.soft_watchdog_s,
            silence_s=config.server.heartbeat_timeout_s,
            step_clock=step_clock,
            publisher=_publisher(config, core, cleanup),
            crashes_on_nan=config.schedule.crashes_on_nan,
            interrupt=runner.interrupt if config.schedule.multi_step > 1 else None,
            so_far=runner.tokens_so_far,
            balancer=balancer,
            go_on=launcher.go_on if isinstance(launcher, Staged) else None,
            at_rest=let_go,
        )
        ranks.watch(loop.fail)
        started(loop)
        phases.done("scheduler")
        weights = 0 if config.model.load_format == "dummy" else size_of_weights(model_config.path)
        loop.run(_ready(memory, weights, phases, kernels, runner.how, settings, spec.adapters))


def _open_launcher(
    model_config: ModelConfig,
    opened: OpenModel,
    runner: ModelRunner,
    obeying: ControlOpExecutor,
    ranks: "OtherRanks",
    wake: Callable[[], None],
) -> Launcher:
    """What brings plans to all ranks."""
    parallel = opened.config.parallel
    if parallel.pp > 1:
        tell = _sender(ranks.send_turn, runner.mover)
        return Staged(_line(model_config, opened, runner, obeying), wake, tell)
    is_async = opened.platform.traits.async_launch
    threaded = Threaded(obeying, wake, is_async, runner.device_thread.hold, runner.wake_next_step)
    if parallel.world == 1:
        return threaded
    return Fanout(threaded, _sender(ranks.send_plan, runner.mover))


def _line(
    model_config: ModelConfig, opened: OpenModel, runner: ModelRunner, obeying: ControlOpExecutor
) -> PipelineStage:
    """This rank's place among stages."""
    build = opened.build
    like = torch.empty(0, dtype=build.dtype, device=build.device)
    groups = build.groups
    return PipelineStage(
        runner, obeying, groups.stages, groups.world, like, model_config.hidden_size
    )


Sent = TypeVar("Sent", StepPlan, StepPlan | None)


def _sender(send: Callable[[Sent], None], mover: PageMover | None) -> Callable[[Sent], None]:
    """Sends a plan to the other ranks, once its copies from their pages are made."""
    if not isinstance(mover, EarlyMover):
        return send

    def send_after(plan: Sent) -> None:
        if plan is not None:
            mover.begin(plan.copies)
        send(plan)

    return send_after


def _settle_multi_step(
    config: Config, settings: dict[str, object], runner: ModelRunner
) -> tuple[Config, dict[str, object]]:
    """One step to a plan where this runner cannot have several; ConfigError where those were asked
    for.

    Args:
        settings: what the device has decided.
    """
    multi_step = config.schedule.multi_step
    if multi_step == 1 or runner.abilities.multi_steps:
        return config, settings
    if _MULTI_STEP not in settings:
        raise ConfigError(
            f"--num-continuous-decode-steps {multi_step}: steps are {runner.how} here, and only "
            "recorded ones can follow each other by themselves",
            hint="leave the flag out",
        )
    log.debug("set burst=1 because steps are %s here", runner.how)
    return with_settings(config, {_MULTI_STEP: 1}), settings | {_MULTI_STEP: 1}


def _desk_of(grammars: GrammarCompiler | None, cleanup: ExitStack) -> GrammarQueue | None:
    if grammars is None:
        return None
    cleanup.callback(grammars.close)
    return GrammarQueue(grammars)


def _publisher(config: Config, core: EngineCore, cleanup: ExitStack) -> Publisher | None:
    asked = kv_events(config.observe)
    if asked is None:
        return None
    unit = core.scheduler.cache.unit
    adapters = core.scheduler.adapters
    names = AdapterNames() if adapters is None else adapters.names
    replica = config.parallel.replica
    publisher = Publisher(asked, replica, unit, WEIGHTS_BYTES, names.adapter_of)
    cleanup.callback(publisher.close)
    return publisher


def _served(
    config: Config, model_config: ModelConfig, opened: OpenModel, pools: Sequence[CacheGroup]
) -> Served:
    """What the bytes of this replica's pages depend on."""
    groups = groups_of(model_config, opened)
    return Served(config, model_config, opened.platform, opened.build, groups, pools, opened.draft)


def _with_orders(
    config: Config,
    model_config: ModelConfig,
    opened: OpenModel,
    runner: ModelRunner,
    marks: list[Marks],
    lora_pool: LoRAPool | None,
    more: Mapping[type[ControlOp], PrepareOp],
) -> ControlOpExecutor:
    """The runner of one rank, and what carries out the orders that it gets.

    Args:
        marks: of this process's other threads, to be recorded with the runner's.
        rack: the adapters of this rank; None without any.
        more: carriers of other kinds of orders.
    """
    rank = opened.build.groups.world.rank
    name = f"engine{config.parallel.replica}" + (f"-rank{rank}" if rank else "")
    profiler = Profiler([*marks, runner.marks], config.observe.profile_dir, name)
    loaded_weights = LoadedWeights(
        *(config.model, model_config, opened.build, runner),
        may_release=config.device.memory_saver,
        offload=opened.offload,
    )
    preparers: dict[type[ControlOp], PrepareOp] = {
        **more,
        TakeWeights: loaded_weights.prepare_take,
        ReleaseMemory: loaded_weights.prepare_release,
        ResumeMemory: loaded_weights.prepare_resume,
        ReadWeight: loaded_weights.prepare_read,
        StartProfile: profiler.prepare_start,
        StopProfile: profiler.prepare_stop,
    }
    record = open_expert_record(
        config.experts, model_config, opened.build, name, config.observe.step_log_interval
    )
    preparers[RecordExperts] = prepare_nothing if record is None else record.prepare
    if not config.experts.recorder:
        preparers[RecordExperts] = refuse_to_record
    if opened.build.places is not None:
        preparers[PlaceExperts] = ExpertMover(opened.build, lambda: runner.model).prepare
        balance_between_steps(config, model_config, opened.build, lambda: runner.model)
    if runner.drafting is not None:
        preparers[ForgetDrafts] = runner.drafting.prepare_flush
    if lora_pool is not None:
        preparers |= {TakeAdapter: lora_pool.prepare_load, DropAdapter: lora_pool.prepare_unload}
        preparers[TakeWeights] = lora_pool.guard_weight_update(loaded_weights.prepare_take)
    return ControlOpExecutor(
        runner, preparers, opened.build.groups.world, opened.build.device, profiler.stepped
    )


def open_op_timer(config: Config, model_config: ModelConfig) -> OpTimer:
    """A model with a cache of its own, to time the ops of its steps. One rank only."""
    opened = open_model(config, model_config, 0, "", Phases(WallClock()))
    memory = plan_the_memory(model_config, opened)
    sizes = runner_sizes(model_config, opened, memory)
    recorder = opened.build.ops.recorder
    device = opened.platform.traits.name

    def probe() -> Peaks:
        return PROBES.load(device)(recorder)

    return OpTimer(
        ModelRunner(opened.model, opened.build, sizes, opened.platform),
        sizes,
        opened.threads,
        probe,
    )


def run_rank(
    config: Config, model_config: ModelConfig, rank: int, address: str, mesh_address: str
) -> None:
    """A rank other than 0: take sizes, then plans, from rank 0 at `address`."""
    opened = open_model(config, model_config, rank, mesh_address, Phases(WallClock()))
    agree_on_memory(model_config, opened)
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.connect(address)
    sizes = msgspec.json.decode(socket.recv(), type=RunnerConfig)
    stream = opened.platform.stream
    lora_pool = open_lora_pool(opened.config.lora, opened.model, opened.build, stream)
    telling = _telling(opened.config, sizes, rank, address)
    runner = ModelRunner(
        model=opened.model,
        build=opened.build,
        config=sizes,
        platform=opened.platform,
        open_mover=telling,
        open_drafter=_open_drafter(opened.config),
        draft=opened.draft,
        lora_pool=lora_pool,
    )
    switching = store_preparers(_served(opened.config, model_config, opened, ()), None)
    obeying = _with_orders(opened.config, model_config, opened, runner, [], lora_pool, switching)
    line = _line(model_config, opened, runner, obeying) if config.parallel.pp > 1 else None
    del opened  # as on rank 0
    codec = plan_codec()

    def receive() -> list[StepPlan] | None:
        frame = socket.recv()
        return codec.decode(frame) if frame else None

    if line is not None:
        serve_stage(line, receive)
    else:
        serve_rank(obeying, lambda: next(iter(receive() or ()), None))


def _telling(
    config: Config, sizes: RunnerConfig, rank: int, address: str
) -> Callable[[KVStore], None] | None:
    """What tells rank 0 of this rank's pages, where it moves them; nothing is moved from here."""
    if not sizes.shares_pages:
        return None

    def tell(store: KVStore) -> None:
        arrange(config, store)
        if rank in sizes.rank_addresses:
            publish_pages_remotely(store, sizes.rank_addresses[rank])
        else:
            publish_pages(store, pages_file_of(address))

    return tell


class OtherRanks:
    """Ranks 1, 2 … of a replica, as rank 0 sees them: on this machine, and on other nodes."""

    def __init__(
        self, config: Config, model_config: ModelConfig, secret: str, spares: Sequence[Process] = ()
    ) -> None:
        parallel = config.parallel
        self._codec = plan_codec()
        self._local: LocalRanks | None = None
        self._nodes: Nodes | None = None
        self._ray: RayNodes | None = None
        self._remote: list[int] = []
        self.meeting = parallel.ranks_meet if parallel.uses_dp_attention else ""
        if parallel.world == 1:
            return
        process_spec = ProcessSpec(RANK, config, model_config, "")
        with ExitStack() as undo:
            undo.callback(self.close)
            if parallel.by_ray:
                self._ray = _ray_nodes(parallel)
                parallel = self._ray.parallel
            if parallel.rank_nodes > 1:
                check_secret(parallel, secret)
                self.meeting = parallel.ranks_meet
                self._nodes = Nodes(parallel, secret, own_hello(parallel, model_config))
                self._remote = list(range(parallel.local_world, parallel.world))
                if self._ray is None:
                    self._nodes.gather()
                else:
                    self._ray.start(process_spec)
                    self._nodes.gather(self._ray.check)
            self._local = LocalRanks(
                range(1, parallel.local_world), process_spec, self.meeting, spares
            )
            self.meeting = self._local.meeting
            if self._nodes is not None:
                self._nodes.start(lambda _: [process_spec], self.meeting)
            undo.pop_all()

    def watch(self, on_death: Callable[[str], None]) -> None:
        for some in (self._local, self._nodes, self._ray):
            if some is not None:
                some.watch(on_death)

    def silence(self) -> tuple[int, float]:
        """The rank that has given no sign of life for longest, and for how many seconds."""
        signs = [some.silence() for some in (self._local, self._nodes) if some is not None]
        return max(signs, key=lambda sign: sign[1])

    def stacks(self) -> list[tuple[int, str]]:
        """(rank, where its threads stand)."""
        some = [part for part in (self._local, self._nodes) if part is not None]
        return [found for part in some for found in part.stacks()]

    def send_sizes(self, sizes: RunnerConfig) -> list[RankAccess]:
        """returns: the ways to their pages, in their order, where rank 0 moves these."""
        rank_access = self._rank_access() if sizes.shares_pages else []
        self._send(
            msgspec.json.encode(replace(sizes, rank_addresses=rank_addresses_of(rank_access)))
        )
        return rank_access

    def _rank_access(self) -> list[RankAccess]:
        rank_access = list[RankAccess]()
        if self._local is not None:
            rank_access += [
                LocalRankAccess(pages_file_of(address)) for address in self._local.addresses
            ]
        if self._nodes is not None:
            nodes, host = self._nodes, urlsplit(self.meeting).hostname or ""
            rank_access += [RemoteRankAccess(host, lambda: nodes.is_lost) for _ in self._remote]
        return rank_access

    def send_plan(self, plan: StepPlan) -> None:
        self._send(self._codec.encode([plan]))

    def send_turn(self, plan: StepPlan | None) -> None:
        """Where there are stages: what comes in."""
        self._send(self._codec.encode([] if plan is None else [plan]))

    def close(self, is_failure: bool = False) -> None:
        """
        Args:
            is_failure: another engine may come in the place of this one.
        """
        if self._local is not None:
            self._local.close()
        if self._nodes is not None:
            self._nodes.close(is_failure)
        if self._ray is not None:
            self._ray.close()

    def _send(self, frame: bytes) -> None:
        if self._local is None:
            return
        for rank in self._remote:
            assert self._nodes is not None
            self._nodes.send(rank, frame)
        for rank in self._local.numbers:
            self._local.send(rank, frame)


def _ray_nodes(parallel: ParallelConfig) -> "RayNodes":
    from banyan.engine.ray_nodes import RayNodes

    return RayNodes(parallel)


def _step_clock(parallel: ParallelConfig, meeting: str, secret: str) -> StepClock | None:
    """What joined replicas agree by; None for one by itself."""
    if not parallel.uses_dp_attention:
        return None
    mine, limit_s = (parallel.replica, parallel.dp), parallel.meet_timeout_s
    if parallel.nodes == 1:
        return open_step_clock(meeting, *mine, limit_s)
    board = open_store(Meeting(1, 1, meeting, limit_s, name=".clock"))
    host = own_address(urlsplit(meeting).hostname)
    return open_far_step_clock(
        host, *mine, secret, limit_s, board.set, lambda name: board.get(name).decode()
    )


def _open_drafter(config: Config) -> Callable[[Callable[[], DraftRunner]], Drafter] | None:
    """Every rank has one of its own, and all of them draft alike."""
    speculative = config.speculative
    if not speculative.drafts:
        return None
    return partial(DRAFTERS.load(speculative.algorithm), speculative)


def _ready(
    memory: MemoryPlan,
    weight_bytes: int,
    phases: Phases,
    kernels: str,
    steps: str,
    settings: dict[str, object],
    adapters: AdapterRules | None,
) -> Ready:
    facts = {
        "phases": phases.seconds,
        "memory": {"weight_bytes": weight_bytes, **asdict(memory)},
        "kernels": kernels,
        "steps": steps,
        "settings": settings,
    }
    if adapters is not None:
        facts["adapters"] = {"max_bytes": adapters.max_bytes, "max_loaded": adapters.max_loaded}
    return Ready(
        max_total_tokens=memory.max_total_tokens,
        max_request_tokens=memory.max_request_tokens,
        max_running=memory.max_running,
        facts=msgspec.json.encode(facts),
    )
