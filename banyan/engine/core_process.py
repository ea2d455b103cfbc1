# pyright: basic
"""Builds and runs one replica: the only module where engine, runner and models meet.

Rank 0 runs engine and runner in one process (`run_engine`). The other ranks receive plans and run
them (`run_rank`).
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
from banyan.base.log import logger
from banyan.base.memory import let_go
from banyan.base.thread_pool import WakeEvent
from banyan.base.trace import Marks
from banyan.config.defaults import with_settings
from banyan.config.observability import KVEvents, kv_events
from banyan.config.schema import Config, ObserveConfig, ParallelConfig
from banyan.dp_attention.network_clock import open_network_clock
from banyan.dp_attention.step_clock import StepClock, open_step_clock
from banyan.engine.core import EngineCore
from banyan.engine.core_spec import core_spec
from banyan.engine.flight_recorder import Recorders
from banyan.engine.grammar_queue import GrammarQueue, open_grammars
from banyan.engine.kv_events import KVEventPublisher
from banyan.engine.kv_transfer_setup import arrange, mover_of, served_replica, store_preparers
from banyan.engine.launcher import Fanout, Launcher, PipelineLauncher, Threaded
from banyan.engine.local_processes import LocalRanks
from banyan.engine.loop import EngineLoop, Link, LoopConfig, LoopParts
from banyan.engine.model_loader import (
    OpenModel,
    Phases,
    agree_on_memory,
    open_model,
    plan_the_memory,
    runner_config_of,
)
from banyan.engine.multi_node import Nodes, check_secret, own_hello
from banyan.engine.process_spec import NO_RECORDING, RANK, ProcessSpec
from banyan.engine.step_log import StepLog
from banyan.formats.shards import size_of_weights
from banyan.kv_cache.cache import WEIGHTS_BYTES
from banyan.kv_cache.sizing import MemoryPlan
from banyan.kv_transfer.page_mover import PageMover
from banyan.lora.pool import LoRAPool, open_lora_pool
from banyan.lora.scheduling import AdapterRules, LoRANamespaces
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
from banyan.messages.frames import plan_codec
from banyan.messages.plan import StepPlan
from banyan.model_config.model_config import ModelConfig
from banyan.moe.balancer import ExpertMover, balance_between_steps, open_balancer
from banyan.moe.routing_record import open_expert_record, prepare_nothing, refuse_to_record
from banyan.ops.api import Peaks
from banyan.ops.bind import PROBES
from banyan.parallel.collectives import Rendezvous
from banyan.parallel.process_group import open_store, own_address
from banyan.pipeline.runner_stage import PipelineStage, serve_stage
from banyan.runner.control_ops import ControlOpExecutor, PrepareOp, serve_rank
from banyan.runner.kvstore import KVStore
from banyan.runner.profiler import OpTimer, Profiler
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
from banyan.runner.weight_update import LoadedWeights

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
        started: called with the loop before it runs, so that another thread can stop it.
        secret: shared by the nodes of this replica, and by the servers of a PD pair.
        recording: descriptor of the flight recorder's memory.
        spares: forked processes for the other ranks of this machine; others are started anew.
    """
    clock = WallClock()
    phases = Phases(clock)
    with ExitStack() as cleanup:
        ranks = OtherRanks(config, model_config, secret, spares)
        cleanup.push(lambda kind, *_: ranks.close(is_failure=kind is not None))
        phases.done("other ranks")

        opened = open_model(config, model_config, 0, ranks.meeting, phases)
        config, settings = opened.config, opened.settings
        memory = plan_the_memory(opened)
        runner_config = runner_config_of(opened, memory)
        rank_access = ranks.send_sizes(runner_config)
        wake = WakeEvent()
        cleanup.callback(wake.close)
        replica = served_replica(opened, memory.groups)
        open_mover = mover_of(replica, wake.wake, secret, rank_access)
        lora_pool = open_lora_pool(config.lora, opened.model, opened.build, opened.platform.stream)
        runner = _open_runner(opened, runner_config, open_mover, lora_pool)
        runner.wake_fd = wake.fd
        config, settings = _settle_multi_step(config, settings, runner)
        marks = Marks("engine")
        store_ops = store_preparers(replica, runner.mover)
        executor = _open_executor(config, opened, runner, [marks], lora_pool, store_ops)
        launcher = _open_launcher(opened, runner, executor, ranks, wake.wake)
        balancer = open_balancer(config, model_config, opened.build, wake.wake)
        kernels = opened.kernels
        # The runner alone may hold the weights: a weight update frees the old ones.
        del opened, replica
        phases.done("cache")

        spec = core_spec(
            config,
            model_config,
            memory,
            loads=lora_pool.first if lora_pool else (),
            are_laid_out=lora_pool is not None and lora_pool.laid_out_bytes > 0,
        )
        recorders = Recorders(config.observe, spec, recording, cleanup)
        grammars = open_grammars(config, model_config, wake.wake)
        if grammars is not None:
            cleanup.callback(grammars.close)
        step_clock = _open_step_clock(config.parallel, ranks.meeting, secret)
        events_config = kv_events(config.observe)
        core = spec.build(
            grammars, step_clock, recorders.recorder, records_events=events_config is not None
        )
        recorders.follow(core, clock.now())
        publisher = None
        if events_config is not None:
            publisher = _open_publisher(events_config, config.parallel.replica, core, secret)
            cleanup.callback(publisher.close)
        loop = EngineLoop(
            core,
            launcher,
            link,
            wake,
            clock,
            LoopConfig(
                check_ledger=config.schedule.check_ledger,
                crashes_on_nan=config.schedule.crashes_on_nan,
                receive_interval=config.schedule.receive_interval,
                watchdog_s=config.schedule.watchdog_s,
                soft_watchdog_s=config.schedule.soft_watchdog_s,
                silence_s=config.server.heartbeat_timeout_s,
            ),
            LoopParts(
                grammar_queue=None if grammars is None else GrammarQueue(grammars),
                ranks=ranks if config.parallel.world > 1 else None,
                marks=marks,
                step_log=_open_step_log(config.observe, [marks, runner.marks]),
                mover=runner.mover,
                step_clock=step_clock,
                publisher=publisher,
                balancer=balancer,
                interrupt=runner.interrupt if config.schedule.multi_step > 1 else None,
                so_far=runner.tokens_so_far,
                go_on=launcher.go_on if isinstance(launcher, PipelineLauncher) else None,
                on_rest=let_go,
            ),
        )
        ranks.watch(loop.fail)
        started(loop)
        phases.done("scheduler")
        weights = 0 if config.model.load_format == "dummy" else size_of_weights(model_config.path)
        loop.run(
            _ready(memory, weights, phases, kernels, runner.forward.how, settings, spec.adapters)
        )


def _open_step_log(observe: ObserveConfig, marks: Sequence[Marks]) -> StepLog:
    """Open what writes lines about the load."""
    costs = marks if observe.shows_costs else ()
    return StepLog(observe.step_log_interval, observe.step_log_format == "plain", costs)


def run_rank(
    config: Config, model_config: ModelConfig, rank: int, address: str, mesh_address: str
) -> None:
    """Run a rank other than 0: receive sizes, then plans, from rank 0 at `address`."""
    opened = open_model(config, model_config, rank, mesh_address, Phases(WallClock()))
    agree_on_memory(opened)
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.connect(address)
    runner_config = msgspec.json.decode(socket.recv(), type=RunnerConfig)

    def publish(store: KVStore) -> None:
        """Give rank 0 access to this rank's pages: it moves the pages of all ranks."""
        arrange(opened_config, store)
        if rank in runner_config.rank_addresses:
            publish_pages_remotely(store, runner_config.rank_addresses[rank])
        else:
            publish_pages(store, pages_file_of(address))

    opened_config = opened.config
    stream = opened.platform.stream
    lora_pool = open_lora_pool(opened.config.lora, opened.model, opened.build, stream)
    open_mover = publish if runner_config.shares_pages else None
    runner = _open_runner(opened, runner_config, open_mover, lora_pool)
    store_ops = store_preparers(served_replica(opened, ()), None)
    executor = _open_executor(opened.config, opened, runner, [], lora_pool, store_ops)
    stage = _open_stage(opened, runner, executor) if config.parallel.pp > 1 else None
    del opened  # as on rank 0
    codec = plan_codec()

    def receive() -> list[StepPlan] | None:
        frame = socket.recv()
        return codec.decode(frame) if frame else None

    if stage is not None:
        serve_stage(stage, receive)
    else:
        serve_rank(executor, lambda: next(iter(receive() or ()), None))


def _open_runner(
    opened: OpenModel,
    runner_config: RunnerConfig,
    open_mover: Callable[[KVStore], PageMover | None] | None,
    lora_pool: LoRAPool | None,
) -> ModelRunner:
    """Open the runner of one rank. Every rank has its own drafter; all of them draft alike."""
    speculative = opened.config.speculative
    open_drafter = None
    if speculative.drafts:
        open_drafter = partial(DRAFTERS.load(speculative.algorithm), speculative)
    return ModelRunner(
        model=opened.model,
        build=opened.build,
        config=runner_config,
        platform=opened.platform,
        open_mover=open_mover,
        open_drafter=open_drafter,
        draft=opened.draft,
        lora_pool=lora_pool,
    )


def _open_executor(
    config: Config,
    opened: OpenModel,
    runner: ModelRunner,
    marks: list[Marks],
    lora_pool: LoRAPool | None,
    store_ops: Mapping[type[ControlOp], PrepareOp],
) -> ControlOpExecutor:
    """Open what runs plans and control ops on one rank.

    Args:
        marks: spans of other threads of this process, recorded with the runner's.
        store_ops: what attaches and detaches stores.
    """
    model_config, build = opened.model_config, opened.build
    rank = build.groups.world.rank
    name = f"engine{config.parallel.replica}" + (f"-rank{rank}" if rank else "")
    profiler = Profiler(runner, marks, config.observe.profile_dir, name)
    loaded_weights = LoadedWeights(
        config.model,
        model_config,
        build,
        runner,
        may_release=config.device.memory_saver,
        keeps_backup=config.device.weights_backup,
        draft=None
        if opened.draft is None or not config.device.draft_backup
        else opened.draft.model,
        offload=opened.offload,
    )
    preparers: dict[type[ControlOp], PrepareOp] = {
        **store_ops,
        TakeWeights: loaded_weights.prepare_take,
        ReleaseMemory: loaded_weights.prepare_release,
        ResumeMemory: loaded_weights.prepare_resume,
        ReadWeight: loaded_weights.prepare_read,
        StartProfile: profiler.prepare_start,
        StopProfile: profiler.prepare_stop,
    }
    record = open_expert_record(
        config.experts, model_config, build, name, config.observe.step_log_interval
    )
    preparers[RecordExperts] = prepare_nothing if record is None else record.prepare
    if not config.experts.recorder:
        preparers[RecordExperts] = refuse_to_record
    if build.places is not None:
        preparers[PlaceExperts] = ExpertMover(
            build, lambda: runner.model, runner.platform.stream
        ).prepare
        balance_between_steps(config, model_config, build, lambda: runner.model)
    if runner.drafting is not None:
        preparers[ForgetDrafts] = runner.drafting.prepare_flush
    if lora_pool is not None:
        preparers |= {TakeAdapter: lora_pool.prepare_load, DropAdapter: lora_pool.prepare_unload}
        preparers[TakeWeights] = lora_pool.guard_weight_update(loaded_weights.prepare_take)
    return ControlOpExecutor(runner, preparers, build.groups.world, build.device)


def _open_launcher(
    opened: OpenModel,
    runner: ModelRunner,
    executor: ControlOpExecutor,
    ranks: "OtherRanks",
    wake: Callable[[], None],
) -> Launcher:
    """Open what brings plans to all ranks."""
    parallel = opened.config.parallel
    if parallel.pp > 1:
        send = _after_copies(ranks.send_turn, runner.mover)
        return PipelineLauncher(_open_stage(opened, runner, executor), wake, send)
    threaded = Threaded(
        runner,
        wake,
        is_async=opened.platform.traits.async_launch,
        inside=runner.device_thread.hold,
        wake_next=runner.wake_next_step,
        executor=executor,
    )
    if parallel.world == 1:
        return threaded
    return Fanout(threaded, _after_copies(ranks.send_plan, runner.mover))


def _open_stage(
    opened: OpenModel, runner: ModelRunner, executor: ControlOpExecutor
) -> PipelineStage:
    build, groups = opened.build, opened.build.groups
    like = torch.empty(0, dtype=build.dtype, device=build.device)
    width = opened.model_config.hidden_size
    return PipelineStage(runner, executor, groups.stages, groups.world, like, width)


Sent = TypeVar("Sent", StepPlan, StepPlan | None)


def _after_copies(send: Callable[[Sent], None], mover: PageMover | None) -> Callable[[Sent], None]:
    """Send a plan to the other ranks only after the copies from their pages have begun."""
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
    """Fall back to one decode step per plan if this runner cannot run several.

    Args:
        settings: the fields that the device has decided.

    Raises:
        ConfigError: the user asked for several.
    """
    multi_step = config.schedule.multi_step
    if multi_step == 1 or runner.abilities.multi_steps:
        return config, settings
    if _MULTI_STEP not in settings:
        raise ConfigError(
            f"--num-continuous-decode-steps {multi_step}: steps are {runner.forward.how} here, and "
            "only recorded ones can follow each other by themselves",
            hint="leave the flag out",
        )
    log.debug("set multi_step=1 because steps are %s here", runner.forward.how)
    return with_settings(config, {_MULTI_STEP: 1}), settings | {_MULTI_STEP: 1}


def _open_publisher(
    config: KVEvents, replica: int, core: EngineCore, secret: str
) -> KVEventPublisher:
    adapters = core.scheduler.adapters
    names = LoRANamespaces() if adapters is None else adapters.names
    return KVEventPublisher(
        config,
        replica,
        block_tokens=core.scheduler.cache.block_size,
        bare_bytes=WEIGHTS_BYTES,
        adapter_of=names.adapter_of,
        secret=secret,
    )


def _open_step_clock(parallel: ParallelConfig, meeting: str, secret: str) -> StepClock | None:
    """Meet the replicas of DP attention; None without it."""
    if not parallel.uses_dp_attention:
        return None
    replica, replicas, limit_s = parallel.replica, parallel.dp, parallel.meet_timeout_s
    if parallel.nodes == 1:
        return open_step_clock(meeting, replica, replicas, limit_s)
    board = open_store(Rendezvous(1, 1, meeting, limit_s, name=".clock"))
    return open_network_clock(
        own_address(urlsplit(meeting).hostname, parallel.interface),
        replica,
        replicas,
        secret,
        limit_s,
        publish=board.set,
        lookup=lambda name: board.get(name).decode(),
    )


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


def open_op_timer(config: Config, model_config: ModelConfig) -> OpTimer:
    """Open a model with its own cache to time the ops of its steps. One rank only."""
    opened = open_model(config, model_config, 0, "", Phases(WallClock()))
    memory = plan_the_memory(opened)
    runner_config = runner_config_of(opened, memory)
    recorder = opened.build.ops.recorder
    device = opened.platform.traits.name

    def probe() -> Peaks:
        return PROBES.load(device)(recorder)

    return OpTimer(
        ModelRunner(opened.model, opened.build, runner_config, platform=opened.platform),
        runner_config,
        opened.threads,
        probe,
    )


class OtherRanks:
    """Ranks 1, 2 … of a replica, seen from rank 0: on this machine and on other nodes.

    Args:
        secret: shared by the nodes.
        spares: forked processes for the ranks of this machine.
    """

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
                from banyan.engine import ray_nodes

                self._ray = ray_nodes.RayNodes(parallel)
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
            if not self.meeting and parallel.port:
                self.meeting = f"tcp://127.0.0.1:{parallel.port + parallel.replica}"
            self._local = LocalRanks(
                range(1, parallel.local_world), process_spec, self.meeting, spares
            )
            self.meeting = self._local.meeting
            if self._nodes is not None:
                self._nodes.start(lambda _: [process_spec], self.meeting)
            undo.pop_all()

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` from a thread when a rank ends unexpectedly."""
        for part in (self._local, self._nodes, self._ray):
            if part is not None:
                part.watch(on_death)

    def silence(self) -> tuple[int, float]:
        """The rank whose last sign of life is the oldest, and its age in seconds."""
        parts = [part.silence() for part in (self._local, self._nodes) if part is not None]
        return max(parts, key=lambda sign: sign[1])

    def stacks(self) -> list[tuple[int, str]]:
        """(rank, stack traces of its threads)."""
        parts = [part for part in (self._local, self._nodes) if part is not None]
        return [found for part in parts for found in part.stacks()]

    def send_sizes(self, sizes: RunnerConfig) -> list[RankAccess]:
        """Send every rank its sizes.

        Returns:
            Access to the pages of each rank, in order; [] if pages are not moved.
        """
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
        """Pipeline parallel: send the plan that enters the first stage, if any."""
        self._send(self._codec.encode([] if plan is None else [plan]))

    def close(self, is_failure: bool = False) -> None:
        """End the ranks.

        Args:
            is_failure: another engine may replace this one, so other nodes register again.
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
