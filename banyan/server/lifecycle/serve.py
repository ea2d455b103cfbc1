"""run_server: the life of the server process, from a bound socket to its exit code.

Listens before anything heavy starts, so that health answers at once; finds the model and starts
the engine through functions that the composition root gives; drains on SIGTERM. Knows no route.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

import uvloop

from banyan.base.errors import DeviceError
from banyan.base.log import logger
from banyan.base.thread_pool import use_threads
from banyan.config.schema import Config
from banyan.engine_client.client import EngineClient
from banyan.engine_client.data_parallel import DataParallelClient
from banyan.model_config.model_config import ModelConfig
from banyan.scheduler.routing import ROUTES
from banyan.server.admin.flight_recorder import dumper
from banyan.server.batches.route import resume_batches
from banyan.server.http.app import App
from banyan.server.http.listen import bind, check_exposure, web_server
from banyan.server.http.tls import tls_context
from banyan.server.lifecycle import deadline
from banyan.server.lifecycle.daemon import in_daemon
from banyan.server.lifecycle.sigquit import hear_sigquit
from banyan.server.lifecycle.startup import end_phase, open_service, report
from banyan.server.lifecycle.supervisor import StartEngine, Supervisor
from banyan.server.routes import create_app
from banyan.server.state import ServerState
from banyan.server.tool_servers.start import start_tool_servers

log = logger(__name__)

DEATH_NOTICE_S = 10.0
"""How long a server whose engine has died goes on saying so before it exits."""

ENDED_S = 1.0
"""After a loss, until what ends with it has ended."""
CLOSING_S = 1.0
"""For last events to reach clients, and for connections to close."""

LAST_SPANS_S = 3.0
"""For a collector to take the last spans of a server that ends."""

LEAVING_S = 30.0
"""For engines and connections to end once the drain is over; what takes longer is cut off."""

Prepare = Callable[[], tuple[Config, ModelConfig]]
"""Fetch the model and resolve the Config. May take minutes; called from a thread."""


class Ending(Enum):
    """Why the server ends."""

    DRAIN = "drain"
    NOW = "now"
    INTERRUPTED = "interrupted"
    """By Ctrl-C, before there was anything to use."""
    DEAD = "dead"


def run_server(config: Config, prepare: Prepare, start_engine: StartEngine) -> int:
    """Serve until stopped. Returns the exit code: 0 after a signal, 130 after a Ctrl-C before it is
    ready, 5 after the engine's death.

    Raises:
        CapacityError: the port is taken.
        ConfigError: the address cannot be listened on, or needs a key.
        BanyanError: there is no such model, or the engine or the tokenizer did not start.
    """
    check_exposure(config.server)
    listener = bind(config.server)
    with contextlib.closing(listener):
        return uvloop.run(Server(config, prepare, listener, start_engine).run())


class Server:
    """One server process with its engines."""

    def __init__(
        self,
        config: Config,
        prepare: Prepare,
        listener: socket.socket,
        start_engine: StartEngine,
    ) -> None:
        port = listener.getsockname()[1]  # files lie in a folder of the port, which 0 is not
        self.state = ServerState(replace(config, server=replace(config.server, port=port)))
        end_phase(self.state.phases, "server process")
        self.app: App = create_app(self.state)
        self._config = config
        self._prepare = prepare
        self._listener = listener
        self._start_engine = start_engine
        self._ending: asyncio.Future[Ending] | None = None
        self._now = asyncio.Event()
        self._web = web_server(
            self.app, config.server.keep_alive_s, CLOSING_S, tls_context(config.server)
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()
        use_threads(self._config.server.waiting_texts)
        ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        # nohup leaves SIGHUP ignored
        heard = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]
        for number in heard:
            loop.add_signal_handler(number, self._signalled, number)
        deadline.bound(heard)
        loop.add_signal_handler(signal.SIGUSR1, self._dump_asked)
        loop.add_signal_handler(signal.SIGUSR2, log.info, "SIGUSR2 means nothing here")
        web = asyncio.create_task(self._web.serve([self._listener]))
        supervisors, fleet = self._open_engines()
        await fleet.start()
        watch = asyncio.create_task(self._keep_engines(supervisors))
        try:
            return await self._serve(fleet, supervisors)
        finally:
            watch.cancel()
            self.state.storage.close()
            self.app.end_all("The server is shutting down.")
            self._web.should_exit = True
            self._web.force_exit = self._now.is_set()
            stops = [supervisor.stop() for supervisor in supervisors]
            await asyncio.gather(web, watch, *stops, return_exceptions=True)
            await fleet.close()
            await self._send_traces()

    async def _send_traces(self) -> None:
        """The spans that have not been sent; a collector that does not answer is not waited for."""
        if self.state.traces is None:
            return
        try:
            await asyncio.wait_for(in_daemon(self.state.traces.close), LAST_SPANS_S)
        except TimeoutError:
            log.warning("the last spans were not taken within %g s", LAST_SPANS_S)

    def _open_engines(self) -> tuple[list[Supervisor], DataParallelClient]:
        """Who keeps each replica running, and the face of all of them."""
        parallel = self._config.parallel
        numbers = range(parallel.dp)
        together = (
            [list(numbers)] if parallel.uses_dp_attention else [[number] for number in numbers]
        )
        supervisors = [
            Supervisor(self._config, some, self._start_engine, lambda lost: self._lost(fleet, lost))
            for some in together
        ]
        engines = [engine for supervisor in supervisors for engine in supervisor.engines]
        self.state.recordings = lambda: dict(
            recording for each in supervisors for recording in each.recordings().items()
        )
        fleet = DataParallelClient(
            *(engines, ROUTES.load(parallel.load_balance), parallel.uses_dp_attention),
            self._config.handoff.mode == "prefill",
        )
        return supervisors, fleet

    def _lost(self, fleet: DataParallelClient, lost: EngineClient) -> None:
        fleet.share_out(lost)
        self._dump(lost.health().reason)

    def _dump(self, why: str) -> None:
        """What the engines have recorded, which goes with them; and the last requests, once those
        that end with the loss have ended."""
        if self.state.recent is None:
            return
        dump = dumper(self.state, why)
        loop = asyncio.get_running_loop()
        loop.call_later(ENDED_S, lambda: loop.run_in_executor(None, dump))

    def _dump_asked(self) -> None:
        if self.state.recent is None:
            log.warning("SIGUSR1 has nothing dumped: no --crash-dump-folder was given")
            return
        asyncio.get_running_loop().run_in_executor(None, dumper(self.state, "SIGUSR1"))

    async def _serve(self, fleet: DataParallelClient, supervisors: list[Supervisor]) -> int:
        """Start, serve, end in order; returns the exit code."""
        assert self._ending is not None
        starting = asyncio.create_task(self._start(fleet, supervisors))
        await asyncio.wait((starting, self._ending), return_when=asyncio.FIRST_COMPLETED)
        if not self._ending.done():
            starting.result()  # raises what went wrong
        ending = await self._ending
        if ending is Ending.DEAD and self.state.service is None:
            await starting  # raises what the engine said
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
        self.state.config, model_config = await in_daemon(self._prepare)
        end_phase(self.state.phases, "model files")
        if name := self._config.observe.sigquit_handler:
            hear_sigquit(name, self.state.config.model.path)
        for supervisor in supervisors:
            supervisor.start(self.state.config, model_config)
        self.state.service = service = await open_service(self.state, model_config, fleet)
        self.app.around = self.state.around
        for supervisor in supervisors:
            supervisor.settled()
        host = self._config.server.host
        shown = f"[{host}]" if ":" in host else host
        await resume_batches(self.state)
        report(
            self.state,
            service,
            f"{self._config.server.scheme}://{shown}:{self._listener.getsockname()[1]}",
        )

    async def _drain(self) -> None:
        limit_s = self._config.server.drain_timeout_s
        log.info("draining requests=%d limit_s=%g", len(self.state.open), limit_s)
        idle = asyncio.create_task(self.app.wait_idle())
        now = asyncio.create_task(self._now.wait())
        await asyncio.wait((idle, now), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        if not idle.done():
            log.warning("drain ended early requests=%d", len(self.state.open))
            self.app.end_all("The server is shutting down.")
            await asyncio.wait((idle,), timeout=CLOSING_S)
        idle.cancel()

    def _signalled(self, number: int) -> None:
        """First SIGTERM or SIGHUP: drain. SIGINT, or any second signal: stop now."""
        assert self._ending is not None
        is_first = not self._ending.done()
        log.info("received %s", signal.Signals(number).name)
        drain_s = self._config.server.drain_timeout_s if is_first else 0.0
        deadline.put_off(drain_s + LEAVING_S)
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
        """Keep every replica running; the server ends with the last of them."""
        reasons: list[str] = []

        async def keep(supervisor: Supervisor) -> None:
            reasons.append(await supervisor.keep())
            if left := len(supervisors) - len(reasons):
                log.error("an engine stays lost, %d go on: %s", left, reasons[-1])

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
        if self.state.service is not None:  # else the start fails with these words
            log.error("engine died: %s", self.state.dead)
            if self._config.observe.sigquit_handler:
                signal.raise_signal(signal.SIGQUIT)
        if not self._ending.done():
            self._ending.set_result(Ending.DEAD)
