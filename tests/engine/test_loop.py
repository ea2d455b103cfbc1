"""The live loop with a scripted runner, over a real in-process link."""

import contextlib
import logging
import threading
from array import array
from dataclasses import fields
from queue import SimpleQueue

import msgspec
import pytest

from banyan.base.clock import WallClock
from banyan.base.errors import DeviceError
from banyan.base.thread_pool import WakeEvent
from banyan.engine.core import EngineCore
from banyan.engine.launcher import Threaded
from banyan.engine.loop import EngineLoop, LoopConfig, LoopParts
from banyan.kv_cache.cache import KVCache
from banyan.kv_cache.eviction import lru
from banyan.kv_cache.sizing import FULL, CacheGroup
from banyan.messages.events import Failed, Fatal, Finished, LiveRequest, Ready, Reply, Stats, Tokens
from banyan.messages.plan import NOT_FINITE, SAMPLE, RowFailure, StepResult
from banyan.messages.requests import Abort, Control, Generate, StopAt
from banyan.messages.sampling_params import SamplingParams
from banyan.scheduler.budget import SchedulerLimits
from banyan.scheduler.schedule_policy import fcfs
from banyan.scheduler.scheduler import Scheduler
from tests.support.flags import config_of

READY = Ready(max_total_tokens=1, max_request_tokens=1, max_running=1)
WAIT_S = 60
CONFIG_FIELDS = {field.name for field in fields(LoopConfig)}


class QueueLink:
    """A link whose front end is the test itself."""

    def __init__(self):
        self.wake = WakeEvent()
        self.inbox, self.outbox = SimpleQueue(), SimpleQueue()

    def poll_fd(self):
        return self.wake.fd

    def receive(self):
        self.wake.clear()
        return [self.inbox.get() for _ in range(self.inbox.qsize())]

    def send(self, events):
        for event in events:
            self.outbox.put(event)

    def tell(self, message):
        self.inbox.put(message)
        self.wake.wake()

    def hear(self, kind):
        """The next event of this kind; others are skipped."""
        while not isinstance(event := self.outbox.get(timeout=WAIT_S), kind):
            pass
        return event


class Pending:
    def __init__(self, result):
        self._result = result

    def result(self):
        return self._result

    def copies(self):
        return None


class CountingRunner:
    """Samples 5 everywhere; blocks or raises on demand."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.raises = False
        self.holds_multi_step, self.held = threading.Event(), SimpleQueue()

    def launch(self, plan, mask_of=None):
        if plan.steps > 1 and self.holds_multi_step.is_set():
            self.gate.clear()
            self.held.put(plan.step)
        assert self.gate.wait(WAIT_S)
        if self.raises:
            raise RuntimeError("device lost")
        five = array("i", [5]).tobytes()
        tokens = [five if row.want & SAMPLE else b"" for row in plan.rows]
        return Pending(StepResult(step=plan.step, tokens=tokens, seconds=0.001))


@pytest.fixture
def served():
    with serving(check_ledger=True) as parts:
        yield parts


@contextlib.contextmanager
def serving(check_ledger, multi_step=1, **options):
    link, runner, wake = QueueLink(), CountingRunner(), WakeEvent()
    cache = KVCache((CacheGroup(FULL, 4, 50),), lru)
    limits = SchedulerLimits(
        max_running=4, chunk_tokens=64, max_request_tokens=100, depth=2, multi_step=multi_step
    )
    core = EngineCore(Scheduler(cache, limits, fcfs))
    link.loop_wake = wake
    launcher = Threaded(runner, wake.wake)
    numbers = {name: options.pop(name) for name in CONFIG_FIELDS & options.keys()}
    config = LoopConfig(check_ledger=check_ledger, **numbers)
    loop = EngineLoop(core, launcher, link, wake, WallClock(), config, LoopParts(**options))
    thread = threading.Thread(target=loop.run, args=(READY,))
    thread.start()
    link.hear(Ready)
    yield link, runner, core
    runner.gate.set()
    loop.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def generate(name, new=3, stride=1):
    tokens = array("i", [1, 2, 3]).tobytes()
    params = SamplingParams(max_new_tokens=new)
    return Generate(request=name, tokens=tokens, sampling=params, stream_interval=stride)


def test_a_request_is_answered_token_by_token(served):
    link, _, _ = served
    link.tell(generate("a"))
    got = [link.hear(Tokens) for _ in range(3)]
    assert [t.first for t in got] == [0, 1, 2]
    assert link.hear(Finished).output_tokens == 3


def test_messages_are_read_every_so_many_steps() -> None:
    """Each step brings a message, so that one always waits."""
    every = config_of("--scheduler-recv-interval", "8").schedule.receive_interval
    reads = list[int]()
    with serving(check_ledger=True, receive_interval=every) as (link, runner, _):
        launch, receive, launched = runner.launch, link.receive, list[int]()

        def launch_and_tell(plan, mask_of=None):
            launched.append(1)
            link.tell(Abort(request="nobody"))
            return launch(plan, mask_of)

        def receive_and_note():
            reads.append(len(launched))
            return receive()

        runner.launch, link.receive = launch_and_tell, receive_and_note
        link.tell(generate("a", new=80))
        assert link.hear(Finished).output_tokens == 80
    # Before the first step and after the last one the loop is idle, and reads what comes. It may
    # also be idle for a moment between two steps on a busy machine.
    during = [step for step in reads if 0 < step < 72]
    assert 0 < len(during) <= 72 // 4, reads


def test_tokens_that_nobody_reads_before_the_end_come_in_fewer_events(served):
    link, _, _ = served
    link.tell(generate("a", new=60, stride=0))
    got = list[Tokens]()
    while not isinstance(event := link.outbox.get(timeout=WAIT_S), Finished):
        got += [event] if isinstance(event, Tokens) else []
    assert [t.first for t in got] == [
        sum(len(t.tokens) // 4 for t in got[:i]) for i in range(len(got))
    ]
    assert event.output_tokens == sum(len(t.tokens) // 4 for t in got) == 60
    assert len(got) < 60 and len(got[0].tokens) == 4


def test_an_end_comes_with_the_counters_that_know_of_it(served):
    link, _, _ = served
    link.tell(generate("long", new=90))
    link.hear(Tokens)
    link.tell(generate("short"))
    assert link.hear(Finished).request == "short"
    reported = link.hear(Stats)
    assert (reported.finished, reported.running) == (1, 1), "while the other one runs"


@pytest.mark.parametrize("flags", [("--check-ledger",), ()])
def test_the_ledger_is_checked_after_every_step_when_that_is_asked_for(flags, monkeypatch):
    checks = []
    monkeypatch.setattr(EngineCore, "check", lambda core: checks.append(core))
    with serving(config_of(*flags).schedule.check_ledger) as (link, _, _):
        link.tell(generate("a", new=20))
        link.hear(Finished)
    assert (len(checks) >= 20) == bool(flags)


def test_the_heart_beats_while_a_step_hangs_and_tells_its_age(served):
    link, runner, _ = served
    runner.gate.clear()
    link.tell(generate("a"))
    while link.hear(Stats).step_age_s == 0.0:
        pass
    first = link.hear(Stats).step_age_s
    assert link.hear(Stats).step_age_s > first
    runner.gate.set()
    link.hear(Finished)


def test_an_abort_is_heard_while_a_step_runs(served):
    link, runner, _ = served
    runner.gate.clear()
    link.tell(generate("a", new=50))
    while not link.hear(Stats).running:
        pass
    link.tell(Abort("a"))
    assert link.hear(Finished).reason == "abort"
    runner.gate.set()
    while link.hear(Stats).held_pages:
        pass


def test_an_exception_in_the_runner_fails_the_request_and_not_the_engine(served):
    link, runner, _ = served
    runner.raises = True
    link.tell(generate("a"))
    assert "device lost" in link.hear(Failed).text
    runner.raises = False
    link.tell(generate("b"))
    assert link.hear(Finished).request == "b"


def test_control_verbs_are_answered(served):
    link, _, _ = served
    link.tell(Control(1, "flush_cache"))
    assert link.hear(Reply) == Reply(1, True, "Cache flushed.")
    link.tell(Control(2, "no_such_verb"))
    reply = link.hear(Reply)
    assert not reply.ok and "flush_cache" in reply.text


def test_the_engine_tells_of_each_live_request_and_of_no_more_than_asked(served):
    link, runner, _ = served
    runner.gate.clear()
    for name in "abcdefgh":
        link.tell(generate(name, new=50))
    while link.hear(Stats).running + link.hear(Stats).waiting < 8:
        pass
    link.tell(Control(1, "requests", args={"limit": 6}))
    found = msgspec.json.decode(link.hear(Reply).body, type=list[LiveRequest])
    assert [one.request for one in found] == list("abcdef")
    assert {one.phase for one in found} <= {"queue", "prefill", "decode"}
    assert all(one.prompt_tokens == 3 for one in found)
    runner.gate.set()
    link.tell(Control(2, "abort_all"))
    link.hear(Reply)
    link.tell(Control(3, "requests", args={"limit": 6}))
    assert msgspec.json.decode(link.hear(Reply).body) == []


@pytest.mark.parametrize(("pause_s", "again"), [(0.0, True), (1e9, False)])
def test_rest_is_reported_after_the_first_work_and_then_in_long_pauses_only(
    monkeypatch, pause_s, again
):
    monkeypatch.setattr("banyan.engine.loop.REST_S", pause_s)
    rests = SimpleQueue()
    with serving(check_ledger=True, on_rest=lambda: rests.put("rest")) as (link, _, _):
        assert rests.empty()
        for name in ("a", "b"):
            tokens = array("i", [ord(name)] * 3).tobytes()  # nothing of it is in the cache
            link.tell(msgspec.structs.replace(generate(name), tokens=tokens))
            link.hear(Finished)
            if name == "a" or again:
                assert rests.get(timeout=WAIT_S) == "rest"
        for _ in range(3):  # heartbeats
            link.hear(Stats)
        assert rests.empty()


def test_a_broken_loop_tells_the_front_before_it_dies():
    link, wake = QueueLink(), WakeEvent()
    runner = CountingRunner()
    cache = KVCache((CacheGroup(FULL, 4, 50),), lru)
    limits = SchedulerLimits(max_running=4, chunk_tokens=64, max_request_tokens=100)
    core = EngineCore(Scheduler(cache, limits, fcfs))
    loop = EngineLoop(core, Threaded(runner, wake.wake), link, wake, WallClock())
    link.tell(generate("a"))
    core.receive = lambda message, now: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loop.run(READY)
    assert "division by zero" in link.hear(Fatal).text


def nan_loop(*flags):
    """A loop whose runner finds nothing to choose from, and its link."""
    link, wake, runner = QueueLink(), WakeEvent(), CountingRunner()

    def launch(plan, mask_of=None):
        failed = [RowFailure(0, NOT_FINITE)]
        return Pending(StepResult(step=plan.step, tokens=[b""], failed=failed))

    runner.launch = launch
    cache = KVCache((CacheGroup(FULL, 4, 50),), lru)
    limits = SchedulerLimits(max_running=4, chunk_tokens=64, max_request_tokens=100)
    crashes = config_of(*flags).schedule.crashes_on_nan
    core = EngineCore(Scheduler(cache, limits, fcfs))
    link.loop_wake = wake
    launcher = Threaded(runner, wake.wake)
    loop = EngineLoop(core, launcher, link, wake, WallClock(), LoopConfig(crashes_on_nan=crashes))
    link.tell(generate("a"))
    return loop, link


def test_logits_that_are_not_finite_end_the_engine_when_that_is_asked_for():
    loop, link = nan_loop("--crash-on-nan")
    limit = threading.Timer(WAIT_S, loop.stop)
    limit.daemon = True
    limit.start()
    with pytest.raises(DeviceError, match="not finite numbers, and --crash-on-nan is given"):
        loop.run(READY)
    assert "row 0 of step 1" in link.hear(Fatal).text


def test_logits_that_are_not_finite_end_one_request_otherwise():
    loop, link = nan_loop()
    thread = threading.Thread(target=loop.run, args=(READY,))
    thread.start()
    assert link.hear(Failed).text == NOT_FINITE
    loop.stop()
    thread.join(WAIT_S)


class Ranks:
    """Another rank, which is silent for as long as a test says."""

    silent_s = 0.0

    def silence(self):
        return 1, self.silent_s

    def stacks(self):
        return [(1, "in collectives.py")]


def broken_loop(ranks):
    """A loop whose first step fails, with a request for it."""
    link, wake, runner = QueueLink(), WakeEvent(), CountingRunner()
    runner.raises = True
    cache = KVCache((CacheGroup(FULL, 4, 50),), lru)
    limits = SchedulerLimits(max_running=4, chunk_tokens=64, max_request_tokens=100)
    core = EngineCore(Scheduler(cache, limits, fcfs))
    link.tell(generate("a"))
    launcher = Threaded(runner, wake.wake)
    parts = LoopParts(ranks=ranks)
    return link, EngineLoop(core, launcher, link, wake, WallClock(), parts=parts)


def test_a_step_that_fails_on_one_of_several_ranks_ends_the_replica(monkeypatch):
    monkeypatch.setattr("banyan.engine.loop.BLAME_S", 0.01)
    link, loop = broken_loop(Ranks())
    with pytest.raises(DeviceError):
        loop.run(READY)
    text = link.hear(Fatal).text
    assert "step 1 failed on rank 0: RuntimeError: device lost" in text and "start" in text


def test_a_rank_that_has_died_is_the_reason_why_a_step_failed(monkeypatch):
    link, loop = broken_loop(Ranks())
    monkeypatch.setattr(loop._failed, "wait", lambda _: loop.fail("rank1 was killed by SIGKILL"))
    with pytest.raises(DeviceError):
        loop.run(READY)
    assert "rank1 was killed by SIGKILL" in link.hear(Fatal).text


def test_heartbeats_name_the_rank_that_is_silent():
    ranks = Ranks()
    ranks.silent_s = 7.5
    with serving(check_ledger=True, ranks=ranks) as (link, _, _):
        stats = link.hear(Stats)
        assert (stats.silent_rank, stats.silent_s) == (1, 7.5)


def test_the_log_reports_once_where_a_stuck_engine_stands(caplog):
    called = threading.Event()

    class Reporter(logging.Handler):
        def emit(self, record):
            if "in flight: step=1" in record.getMessage():
                called.set()

    logger = logging.getLogger("banyan.engine.watchdog")
    handler = Reporter()
    logger.addHandler(handler)
    try:
        with serving(check_ledger=True, watchdog_s=0.3) as (link, runner, _):
            runner.gate.clear()
            link.tell(generate("a"))
            assert called.wait(WAIT_S)
            while link.hear(Stats).step_age_s < 1.0:
                pass  # several more looks
            runner.gate.set()
            link.hear(Finished)
    finally:
        logger.removeHandler(handler)
    lines = [r.getMessage() for r in caplog.records if r.name == logger.name]
    end = next(at for at, line in enumerate(lines) if line.startswith("queues: running="))
    # Of this process: it may have other engines.
    stacks = [line for line in lines[:end] if line.startswith("thread runner:")]
    assert sum("self.gate.wait(WAIT_S)" in stack for stack in stacks) == 1
    plans = [line for line in lines if line.startswith("in flight: ")]
    assert "step=1 joins=1" in plans[0] and "1:0+3" in plans[0]
    # A machine that is busy may let a later step stand too.
    assert not any("step=1 " in plan for plan in plans[1:])


def test_an_engine_that_works_is_never_reported_as_stuck(caplog):
    with serving(check_ledger=True, watchdog_s=1.0) as (link, _, _):
        for name in "abc":
            link.tell(generate(name, new=20))
            link.hear(Finished)
        while link.hear(Stats).running:
            pass
    assert not [r for r in caplog.records if "progress" in r.getMessage()]


@pytest.mark.parametrize("patience", [{"soft_watchdog_s": 0.2}, {"silence_s": 5.0}])
def test_the_log_reports_a_slow_step_or_a_silent_rank_and_where_the_others_stand(caplog, patience):
    ranks, called = Ranks(), threading.Event()

    class Reporter(logging.Handler):
        def emit(self, record):
            if record.getMessage() == "stack traces of rank 1:\nin collectives.py":
                called.set()

    logger, handler = logging.getLogger("banyan.engine.watchdog"), Reporter()
    logger.addHandler(handler)
    try:
        with serving(check_ledger=True, ranks=ranks, **patience) as (link, runner, _):
            if "silence_s" in patience:
                ranks.silent_s = 7.5
            else:
                runner.gate.clear()
                link.tell(generate("a"))
            assert called.wait(WAIT_S)
            runner.gate.set()
            if "silence_s" not in patience:
                link.hear(Finished)
    finally:
        logger.removeHandler(handler)


def test_who_comes_while_a_multi_step_plan_runs_ends_it_with_the_step_that_runs():
    interrupted = SimpleQueue()
    with serving(check_ledger=True, multi_step=4, interrupt=interrupted.put) as (link, runner, _):
        runner.holds_multi_step.set()
        link.tell(generate("a", new=20, stride=0))
        step = runner.held.get(timeout=WAIT_S)
        assert interrupted.empty(), "nobody has come"
        link.tell(generate("b", new=2))
        assert interrupted.get(timeout=WAIT_S) >= step
        runner.holds_multi_step.clear()
        runner.gate.set()
        assert link.hear(Finished).request == "b"


def test_tokens_of_a_multi_step_plan_go_out_while_it_runs_and_its_end_waits_for_the_decision():
    reported = {}
    interrupted = SimpleQueue()
    options = {"interrupt": interrupted.put, "so_far": reported.get}
    with serving(check_ledger=True, multi_step=4, **options) as (link, runner, _):
        runner.holds_multi_step.set()
        link.tell(generate("a", new=20))
        step = runner.held.get(timeout=WAIT_S)
        assert link.hear(Tokens).first == 0
        reported[step] = {0: array("i", [5]).tobytes()}
        link.loop_wake.wake()
        early = link.hear(Tokens)
        assert (early.first, early.tokens) == (1, reported[step][0])
        link.tell(StopAt("a", 2))
        assert interrupted.get(timeout=WAIT_S) >= step
        runner.holds_multi_step.clear()
        runner.gate.set()
        finished = link.hear(Finished)
        assert (finished.reason, finished.output_tokens) == ("stop", 2)
