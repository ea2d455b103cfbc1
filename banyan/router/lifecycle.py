"""Run a router process, from a bound socket to its exit code."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable

import uvloop

from banyan.base.errors import ConfigError, DeviceError, RequestError
from banyan.base.log import logger, printable
from banyan.base.thread_pool import use_threads
from banyan.router.config import RouterConfig
from banyan.router.health import HealthMonitor
from banyan.router.models import ModelHost, ModelServers
from banyan.router.routes import create_app
from banyan.router.state import AdmissionLimiter, RouterMetrics, RouterState
from banyan.router.worker_pool import WorkerPool
from banyan.server.http.listen import bind, check_exposure, web_server
from banyan.server.http.tls import tls_context

log = logger(__name__)

CLOSING_S = 1.0
"""Seconds for the last events to reach clients and for connections to close."""
_LOOK_S = 0.1


def run_router(config: RouterConfig, lost: Callable[[], str], host: ModelHost | None = None) -> int:
    """Route until stopped; the exit code: 0 after a signal, 5 if no worker became ready.

    Args:
        lost: returns which server started for this router has ended; "" if none.
        host: starts servers for models on demand; None without models.

    Raises:
        CapacityError: the port is taken.
        ConfigError: the address cannot be listened on or needs a key, or metrics are unavailable.
    """
    check_exposure(config.server)
    listener = bind(config.server)
    with contextlib.closing(listener):
        return uvloop.run(RouterServer(config, listener, lost, host).run())


class RouterServer:
    """One router process."""

    def __init__(
        self,
        config: RouterConfig,
        listener: socket.socket,
        lost: Callable[[], str],
        host: ModelHost | None = None,
    ) -> None:
        self._config = config
        self._lost = lost
        self._listener = listener
        pool = WorkerPool(config)
        models = None if host is None else ModelServers(config, pool, host)
        self.state = RouterState(
            config, pool, AdmissionLimiter(config.limits), open_metrics(config, pool), models
        )
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
        watch = asyncio.create_task(self._watch())
        try:
            return await self._serve(watch)
        finally:
            watch.cancel()
            self.app.end_all("The router is shutting down.")
            self._web.should_exit = True
            self._web.force_exit = self._now.is_set()
            await asyncio.gather(web, watch, return_exceptions=True)

    async def _watch(self) -> None:
        """Check the workers, and unload models; an error in either ends the router."""
        async with asyncio.TaskGroup() as group:
            group.create_task(HealthMonitor(self._config, self.state.pool).run())
            if self.state.models is not None:
                group.create_task(self.state.models.run())

    async def _serve(self, watch: asyncio.Task[None]) -> int:
        ready = asyncio.create_task(self._wait_until_ready())
        ending = asyncio.create_task(self._drains.wait())
        try:
            await asyncio.wait((ready, ending, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            if ready.done() and ready.result():
                await asyncio.wait((ending, watch), return_when=asyncio.FIRST_COMPLETED)
            if not self._drains.is_set():
                return DeviceError.exit_code
            await self._drain()
            return 0
        finally:
            ready.cancel()
            ending.cancel()

    async def _wait_until_ready(self) -> bool:
        """Wait until a worker is ready; False if none is within the start-up time."""
        host, port = self._config.server.host, self._listener.getsockname()[1]
        address = f"{self._config.server.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        if self.state.models is not None:
            return await self._load_first(self.state.models, address)
        log.info("routing on %s for %d workers", address, len(self.state.pool.workers))
        if not self.state.pool.workers:
            log.info("no worker is named: POST /workers adds them")
            return True
        limit_s = self._config.pool.startup_s
        try:
            async with asyncio.timeout(limit_s):
                while self.state.pool.trouble():
                    if gone := self._lost():
                        raise DeviceError(gone, hint="see its message above")
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            log.error("nobody to ask after %g s: %s", limit_s, self.state.pool.trouble())
            return False
        log.info("ready on %s", address)
        return True

    async def _load_first(self, models: ModelServers, address: str) -> bool:
        """Load the first model that is named, so that an error in the flags ends the start."""
        rule = self._config.models
        await models.refresh()
        if rule.default and not models.has(rule.default):
            raise ConfigError(
                f"--default-model {printable(rule.default, 80)} is none of the models",
                hint="name one that GET /v1/models lists",
            )
        first = await models.find(rule.default) if models.all else None
        names = ", ".join(model.name for model in models.all)
        log.info("serving %d models on %s: %s", len(models.all), address, names or "none yet")
        if first is not None and (rule.default or rule.names):
            try:
                await models.load(first, self._config.pool.startup_s)
            except RequestError as error:
                raise DeviceError(error.text, hint="see its message above") from None
        log.info("ready on %s", address)
        return True

    async def _drain(self) -> None:
        limit_s = self._config.server.drain_timeout_s
        log.info("draining requests=%d limit_s=%g", self.state.admission.inside, limit_s)
        idle = asyncio.create_task(self.app.wait_idle())
        now = asyncio.create_task(self._now.wait())
        await asyncio.wait((idle, now), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        if not idle.done():
            log.warning("drain ended early requests=%d", self.state.admission.inside)
            self.app.end_all("The router is shutting down.")
            await asyncio.wait((idle,), timeout=CLOSING_S)
        idle.cancel()

    def _signalled(self, number: int) -> None:
        """Drain on the first SIGTERM or SIGHUP; stop now on SIGINT or any second signal."""
        log.info("received %s", signal.Signals(number).name)
        if self.state.draining or number == signal.SIGINT:
            self._now.set()
        self.state.draining = True
        self._drains.set()


def open_metrics(config: RouterConfig, pool: WorkerPool) -> RouterMetrics | None:
    """The metrics of a router; None if they are off. Imports the library only if they are on.

    Raises:
        ConfigError: the separate port cannot be listened on.
    """
    if not config.observe.metrics:
        return None
    from banyan.router.prometheus import PrometheusRouterMetrics

    metrics = PrometheusRouterMetrics(config.prometheus.buckets, lambda: pool.workers)
    if config.prometheus.port:
        metrics.show_at(config.prometheus.host or config.server.host, config.prometheus.port)
    return metrics
