"""run_router: the life of a router process, from a bound socket to its exit code."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable

import uvloop

from banyan.base.errors import ConfigError, DeviceError
from banyan.base.log import logger
from banyan.base.thread_pool import use_threads
from banyan.router.config import RouterConfig
from banyan.router.figures import Figures
from banyan.router.gate import Gate
from banyan.router.routes import create_app
from banyan.router.state import RouterState
from banyan.router.watch import Watch
from banyan.router.worker_pool import Fleet
from banyan.server.http.listen import bind, check_exposure, web_server
from banyan.server.http.tls import tls_context

log = logger(__name__)

CLOSING_S = 1.0
"""For last events to reach clients, and for connections to close."""
_LOOK_S = 0.1


def run_router(config: RouterConfig, lost: Callable[[], str]) -> int:
    """Route until stopped. Returns the exit code: 0 after a signal, 5 when no worker came.

    Args:
        lost: says which server that was started for this router has ended; "" = none.

    Raises:
        CapacityError: the port is taken.
        ConfigError: the address cannot be listened on, needs a key, or counting is not possible.
    """
    check_exposure(config.server)
    listener = bind(config.server)
    with contextlib.closing(listener):
        return uvloop.run(Router(config, listener, lost).run())


class Router:
    """One router process."""

    def __init__(
        self, config: RouterConfig, listener: socket.socket, lost: Callable[[], str]
    ) -> None:
        self._config = config
        self._lost = lost
        self._listener = listener
        fleet = Fleet(config)
        self.state = RouterState(config, fleet, Gate(config.limits), open_figures(config, fleet))
        self.app = create_app(self.state)
        self._web = web_server(
            self.app, config.server.keep_alive_s, CLOSING_S, tls_context(config.server)
        )
        self._drains = asyncio.Event()
        self._now = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        use_threads()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._signalled, number)
        web = asyncio.create_task(self._web.serve([self._listener]))
        watch = asyncio.create_task(Watch(self._config, self.state.fleet).run())
        try:
            return await self._serve(watch)
        finally:
            watch.cancel()
            self.app.end_all("The router is shutting down.")
            self._web.should_exit = True
            self._web.force_exit = self._now.is_set()
            await asyncio.gather(web, watch, return_exceptions=True)

    async def _serve(self, watch: asyncio.Task[None]) -> int:
        told = asyncio.create_task(self._tell_when_ready())
        ending = asyncio.create_task(self._drains.wait())
        try:
            await asyncio.wait((told, ending, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            if told.done() and told.result():
                await asyncio.wait((ending, watch), return_when=asyncio.FIRST_COMPLETED)
            if not self._drains.is_set():
                return DeviceError.exit_code
            await self._drain()
            return 0
        finally:
            told.cancel()
            ending.cancel()

    async def _tell_when_ready(self) -> bool:
        """Whether there is somebody to ask within the time that a start has."""
        host, port = self._config.server.host, self._listener.getsockname()[1]
        address = f"{self._config.server.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        log.info("routing on %s for %d workers", address, len(self.state.fleet.workers))
        if not self.state.fleet.workers:
            log.info("no worker is named: POST /workers adds them")
            return True
        limit_s = self._config.fleet.startup_s
        try:
            async with asyncio.timeout(limit_s):
                while self.state.fleet.trouble():
                    if gone := self._lost():
                        raise DeviceError(gone, hint="its message stands above")
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            log.error("nobody to ask after %g s: %s", limit_s, self.state.fleet.trouble())
            return False
        log.info("ready on %s", address)
        return True

    async def _drain(self) -> None:
        limit_s = self._config.server.drain_timeout_s
        log.info("draining requests=%d limit_s=%g", self.state.gate.inside, limit_s)
        idle = asyncio.create_task(self.app.wait_idle())
        now = asyncio.create_task(self._now.wait())
        await asyncio.wait((idle, now), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        if not idle.done():
            log.warning("drain ended early requests=%d", self.state.gate.inside)
            self.app.end_all("The router is shutting down.")
            await asyncio.wait((idle,), timeout=CLOSING_S)
        idle.cancel()

    def _signalled(self, number: int) -> None:
        """First SIGTERM or SIGHUP: drain. SIGINT, or any second signal: stop now."""
        log.info("received %s", signal.Signals(number).name)
        if self.state.draining or number == signal.SIGINT:
            self._now.set()
        self.state.draining = True
        self._drains.set()


def open_figures(config: RouterConfig, fleet: Fleet) -> Figures | None:
    """None where nothing is counted. The library is loaded only where something is.

    Raises:
        ConfigError: it is not installed, or the figures' own port cannot be listened on.
    """
    if not config.observe.metrics:
        return None
    try:
        from banyan.router.prometheus import PrometheusFigures
    except ImportError:
        raise ConfigError(
            "figures for Prometheus need the package prometheus-client",
            hint="pip install 'banyan[metrics]', or leave the flags out",
        ) from None
    figures = PrometheusFigures(config.figures.buckets, lambda: fleet.workers)
    if config.figures.port:
        figures.show_at(config.figures.host or config.server.host, config.figures.port)
    return figures
