"""run_server: the server process, from bound sockets to its exit code.

The listeners start before anything heavy, so that health checks are answered at once. Functions of
the caller find the model and start the engines. SIGTERM drains. After a signal to end, the process
has a deadline, which also holds if no line of Python runs any more (`set_deadline_on`).
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import fcntl
import math
import os
import signal
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from types import FrameType

import uvloop

from banyan.base.errors import DeviceError
from banyan.base.log import logger, printable
from banyan.base.table import load_named
from banyan.base.thread_pool import use_threads
from banyan.config.schema import Config
from banyan.engine_client.client import EngineClient
from banyan.engine_client.data_parallel import DataParallelClient
from banyan.model_config.model_config import ModelConfig
from banyan.scheduler.routing import FOLLOW_ROOM, ROUTES
from banyan.server.admin.recordings import dumper
from banyan.server.batches import resume_batches
from banyan.server.http.auth import open_signer
from banyan.server.http.listen import CLOSING_S, check_exposure
from banyan.server.lifecycle.startup import end_phase, open_service, report
from banyan.server.lifecycle.supervisor import StartEngine, Supervisor, in_daemon_thread
from banyan.server.listeners import LISTENERS, Listener, bind_listeners
from banyan.server.state import ServerState
from banyan.server.tool_servers.start import start_tool_servers

log = logger(__name__)

DEATH_NOTICE_S = 10.0
"""How long a server whose engine has died still answers with the reason before it exits."""

ENDED_S = 1.0
"""Time after the loss of an engine until its requests have ended."""

LAST_SPANS_S = 3.0
"""Time for the trace collector to take the last spans."""

LEAVING_S = 30.0
"""Time for engines and connections to end after the drain; then the process is killed."""

STUCK = signal.SIGIO
"""Its number is the seconds that a process without running Python has left: 29."""

Prepare = Callable[[], tuple[Config, ModelConfig]]
"""Fetch the model and resolve the Config. May take minutes; called from a thread."""


class Ending(Enum):
    """Why the server ends."""

    DRAIN = "drain"
    NOW = "now"
    INTERRUPTED = "interrupted"
    """By Ctrl-C, before the server was ready."""
    DEAD = "dead"


def run_server(
    config: Config, prepare: Prepare, start_engine: StartEngine, secret: str = ""
) -> int:
    """Serve until stopped.

    Args:
        secret: BANYAN_DIST_SECRET, by which routers sign their callers.

    Returns:
        The exit code: 0 after a signal, 130 after a Ctrl-C before the server was ready, 5 after
        the death of the engine.

    Raises:
        CapacityError: the port is in use.
        ConfigError: the address cannot be bound, or needs a key.
        BanyanError: the model does not exist, or the engine or the tokenizer did not start.
    """
    check_exposure(config.server)
    with contextlib.ExitStack() as sockets:
        bound = bind_listeners(config.server)
        for _, listener in bound:
            sockets.enter_context(contextlib.closing(listener))
        server = Server(config, prepare, bound, start_engine)
        server.state.signer = open_signer(secret)
        return uvloop.run(server.run())


class Server:
    """One server process with its listeners and engines.

    Args:
        bound: the listeners by name (`LISTENERS`), each with its socket; the first has --port.
    """

    def __init__(
        self,
        config: Config,
        prepare: Prepare,
        bound: Sequence[tuple[str, socket.socket]],
        start_engine: StartEngine,
    ) -> None:
        # Stored files are in a folder named by the port, so port 0 is replaced by the real one.
        port = bound[0][1].getsockname()[1]
        self.state = ServerState(replace(config, server=replace(config.server, port=port)))
        end_phase(self.state.phases, "server process")
        self._listeners: list[Listener] = [
            LISTENERS.load(name)(self.state, listener) for name, listener in bound
        ]
        self._config = config
        self._prepare = prepare
        self._start_engine = start_engine
        self._ending: asyncio.Future[Ending] | None = None
        self._now = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        use_threads(self._config.server.waiting_texts)
        ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        # nohup starts the process with SIGHUP ignored; keep it so.
        handled = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]
        for number in handled:
            loop.add_signal_handler(number, self._on_signal, number)
        set_deadline_on(handled)
        loop.add_signal_handler(signal.SIGUSR1, self._on_dump_signal)
        loop.add_signal_handler(signal.SIGUSR2, log.info, "SIGUSR2 has no effect")
        for listener in self._listeners:
            await listener.start()
        supervisors, fleet = self._open_engines()
        await fleet.start()
        watch = asyncio.create_task(self._keep_engines(supervisors))
        try:
            return await self._serve(fleet, supervisors)
        finally:
            watch.cancel()
            self.state.history.stop()
            self.state.storage.close()
            self._end_all()
            is_now = self._now.is_set()
            stops = [listener.stop(is_now) for listener in self._listeners]
            stops += [supervisor.stop() for supervisor in supervisors]
            await asyncio.gather(watch, *stops, return_exceptions=True)
            await fleet.close()
            await self._send_traces()

    async def _send_traces(self) -> None:
        """Send the remaining spans, and give up after LAST_SPANS_S."""
        if self.state.traces is None:
            return
        try:
            await asyncio.wait_for(in_daemon_thread(self.state.traces.close), LAST_SPANS_S)
        except TimeoutError:
            log.warning("the last spans were not taken within %g s", LAST_SPANS_S)

    def _open_engines(self) -> tuple[list[Supervisor], DataParallelClient]:
        """A supervisor for each replica, or group of replicas, and the client of all of them."""
        parallel = self._config.parallel
        numbers = range(parallel.dp)
        groups = [list(numbers)] if parallel.uses_dp_attention else [[number] for number in numbers]

        def on_loss(lost: EngineClient) -> None:
            fleet.share_out(lost)
            self._dump(lost.health().reason)

        supervisors = [
            Supervisor(self._config, group, self._start_engine, on_loss) for group in groups
        ]
        engines = [engine for supervisor in supervisors for engine in supervisor.engines]
        self.state.recordings = lambda: dict(
            recording for each in supervisors for recording in each.recordings().items()
        )
        fleet = DataParallelClient(
            engines,
            ROUTES.load(parallel.load_balance),
            parallel.uses_dp_attention,
            self._config.handoff.mode == "prefill",
            parallel.load_balance == FOLLOW_ROOM,
        )
        return supervisors, fleet

    def _dump(self, why: str) -> None:
        """Write the recordings of the engines, which end with them, and the last requests.

        The requests are written ENDED_S later, when those that end with the loss have ended.
        """
        if self.state.recent is None:
            return
        dump = dumper(self.state, why)
        loop = asyncio.get_running_loop()
        loop.call_later(ENDED_S, lambda: loop.run_in_executor(None, dump))

    def _on_dump_signal(self) -> None:
        if self.state.recent is None:
            log.warning("SIGUSR1 writes nothing: no --crash-dump-folder was given")
            return
        asyncio.get_running_loop().run_in_executor(None, dumper(self.state, "SIGUSR1"))

    async def _serve(self, fleet: DataParallelClient, supervisors: list[Supervisor]) -> int:
        """Start, serve and end; returns the exit code."""
        assert self._ending is not None
        starting = asyncio.create_task(self._start(fleet, supervisors))
        await asyncio.wait((starting, self._ending), return_when=asyncio.FIRST_COMPLETED)
        if not self._ending.done():
            starting.result()  # raises if the start failed
        ending = await self._ending
        if ending is Ending.DEAD and self.state.service is None:
            await starting  # raises with the message of the engine
        starting.cancel()
        match ending:
            case Ending.DEAD:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._now.wait(), DEATH_NOTICE_S)
                return DeviceError.exit_code
            case Ending.DRAIN:
                await self._drain()
            case Ending.INTERRUPTED:
                return 128 + signal.SIGINT
        return 0

    async def _start(self, fleet: DataParallelClient, supervisors: list[Supervisor]) -> None:
        self.state.tool_servers = await start_tool_servers(self._config.server.tool_servers)
        self.state.config, model_config = await in_daemon_thread(self._prepare)
        end_phase(self.state.phases, "model files")
        if name := self._config.observe.sigquit_handler:
            install_sigquit_handler(name, self.state.config.model.path)
        for supervisor in supervisors:
            supervisor.start(self.state.config, model_config)
        self.state.service = service = await open_service(self.state, model_config, fleet)
        for supervisor in supervisors:
            supervisor.settled()
        await resume_batches(self.state)
        report(self.state, service, [listener.url for listener in self._listeners])

    async def _drain(self) -> None:
        limit_s = self._config.server.drain_timeout_s
        log.info("draining requests=%d limit_s=%g", len(self.state.open), limit_s)
        idle = asyncio.gather(*(listener.drain() for listener in self._listeners))
        now = asyncio.create_task(self._now.wait())
        await asyncio.wait((idle, now), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        if not idle.done():
            log.warning("drain ended early requests=%d", len(self.state.open))
            self._end_all()
            await asyncio.wait((idle,), timeout=CLOSING_S)
        idle.cancel()

    def _end_all(self) -> None:
        for listener in self._listeners:
            listener.end_all("The server is shutting down.")

    def _on_signal(self, number: int) -> None:
        """First SIGTERM or SIGHUP: drain. SIGINT, or any second signal: stop now."""
        assert self._ending is not None
        is_first = not self._ending.done()
        log.info("received %s", signal.Signals(number).name)
        drain_s = self._config.server.drain_timeout_s if is_first else 0.0
        extend_deadline(drain_s + LEAVING_S)
        self.state.draining = True
        if is_first:
            self._ending.set_result(self._ending_of(number))
        if not is_first or number == signal.SIGINT:
            self._now.set()

    def _ending_of(self, number: int) -> Ending:
        is_ready = self.state.service is not None
        if number == signal.SIGINT:
            return Ending.NOW if is_ready else Ending.INTERRUPTED
        return Ending.DRAIN if is_ready else Ending.NOW

    async def _keep_engines(self, supervisors: list[Supervisor]) -> None:
        """Keep every replica running; the server ends when the last one is lost."""
        reasons: list[str] = []

        async def keep(supervisor: Supervisor) -> None:
            reasons.append(await supervisor.keep())
            if left := len(supervisors) - len(reasons):
                log.error("an engine is lost for good, %d still run: %s", left, reasons[-1])

        try:
            async with asyncio.TaskGroup() as group:
                for supervisor in supervisors:
                    group.create_task(keep(supervisor))
        except Exception as error:
            log.exception("engines can no longer be kept running")
            reasons.append(f"{type(error).__name__}: {error}")
        self.state.dead = reasons[-1]
        assert self._ending is not None
        self._dump(self.state.dead)
        if self.state.service is not None:  # else the start fails with this reason
            log.error("engine died: %s", self.state.dead)
            if self._config.observe.sigquit_handler:
                signal.raise_signal(signal.SIGQUIT)
        if not self._ending.done():
            self._ending.set_result(Ending.DEAD)


def set_deadline_on(numbers: Iterable[signal.Signals]) -> None:
    """From now on each of these signals ends the process within STUCK seconds, unless
    `extend_deadline` is called. Install their handlers before.

    A thread of a native library may keep the interpreter's lock, so the bound must work without
    Python. Three parts of the system do it: faulthandler, whose handler needs no lock, writes into
    a pipe and passes the signal on to Python; the kernel signals that there is something to read
    (O_ASYNC); and the handler of that signal is the C library's `alarm`. A handler is called with
    the number of its signal, which `alarm` takes as seconds; SIGALRM ends the process.
    """
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(STUCK, ctypes.cast(libc.alarm, ctypes.c_void_p))
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETSIG, STUCK)
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    for number in numbers:
        faulthandler.register(number, writer, all_threads=False, chain=True)


def extend_deadline(seconds: float) -> None:
    """Python runs: give the process this many more seconds."""
    signal.alarm(math.ceil(seconds))


def install_sigquit_handler(name: str, checkpoint: str) -> None:
    """Call the operator's function on SIGQUIT, as SGLang does, with the signal's number and frame.

    It runs in the main thread. An exception in it is logged.

    Raises:
        ConfigError: the function does not exist, or it lies in the checkpoint's folder.
    """
    handler = load_named("--custom-sigquit-handler", name, checkpoint)

    def call(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except Exception:
            log.exception("--custom-sigquit-handler %s failed", printable(name))

    signal.signal(signal.SIGQUIT, call)
