"""Run a router process, from a bound socket to its exit code. `HealthMonitor` checks every worker
periodically and logs changes."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson
import uvloop

from banyan.base.errors import DeviceError, RequestError
from banyan.base.json_types import is_object
from banyan.base.log import logger, printable
from banyan.base.thread_pool import use_threads
from banyan.router.config import PREFILL, RouterConfig
from banyan.router.routes import create_app
from banyan.router.state import AdmissionLimiter, RouterMetrics, RouterState
from banyan.router.upstream import WorkerLost, WorkerUnreachable
from banyan.router.worker import Worker
from banyan.router.worker_pool import WorkerPool
from banyan.server.http.listen import bind, check_exposure, web_server
from banyan.server.http.tls import tls_context

log = logger(__name__)

CLOSING_S = 1.0
"""Seconds for the last events to reach clients and for connections to close."""
_LOOK_S = 0.1


def run_router(config: RouterConfig, lost: Callable[[], str]) -> int:
    """Route until stopped; the exit code: 0 after a signal, 5 if no worker became ready.

    Args:
        lost: returns which server started for this router has ended; "" if none.

    Raises:
        CapacityError: the port is taken.
        ConfigError: the address cannot be listened on or needs a key, or metrics are unavailable.
    """
    check_exposure(config.server)
    listener = bind(config.server)
    with contextlib.closing(listener):
        return uvloop.run(RouterServer(config, listener, lost).run())


class RouterServer:
    """One router process."""

    def __init__(
        self, config: RouterConfig, listener: socket.socket, lost: Callable[[], str]
    ) -> None:
        self._config = config
        self._lost = lost
        self._listener = listener
        pool = WorkerPool(config)
        self.state = RouterState(
            config, pool, AdmissionLimiter(config.limits), open_metrics(config, pool)
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
        watch = asyncio.create_task(HealthMonitor(self._config, self.state.pool).run())
        try:
            return await self._serve(watch)
        finally:
            watch.cancel()
            self.app.end_all("The router is shutting down.")
            self._web.should_exit = True
            self._web.force_exit = self._now.is_set()
            await asyncio.gather(web, watch, return_exceptions=True)

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


if TYPE_CHECKING:
    from banyan.router.cache_events import CacheEventSubscriber


_REASON_BYTES = 64 << 10
_REASON_CHARS = 200
_INFO_BYTES = 4 << 20
_PORT = "disaggregation_bootstrap_port"
_AFTER_DOUBT_S = 0.2
"""Least seconds between two checks of a worker that failed requests."""


class HealthMonitor:
    """Checks the workers of a pool until it is cancelled."""

    def __init__(self, config: RouterConfig, pool: WorkerPool) -> None:
        self._health = config.health
        self._key = config.server.api_key.partition(" ")[0]
        self._pool = pool
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._subscriber = _open_subscriber(config)

    async def run(self) -> None:
        """Start and stop a task per worker as workers are added and removed."""
        try:
            while True:
                self._pool.changed.clear()
                for worker in self._tasks.keys() - set(self._pool.workers):
                    self._tasks.pop(worker).cancel()
                    if self._subscriber is not None:
                        self._subscriber.drop(worker)
                for worker in self._pool.workers:
                    if worker not in self._tasks and not self._health.is_off:
                        self._tasks[worker] = asyncio.create_task(self._follow(worker))
                await self._pool.changed.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._subscriber is not None:
                self._subscriber.close()

    async def _follow(self, worker: Worker) -> None:
        while True:
            await self.check(worker)
            health = self._health
            pause_s = health.interval_s if worker.has_been_well else health.first_interval_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await worker.check_soon.wait()
                worker.check_soon.clear()
                await asyncio.sleep(min(pause_s, _AFTER_DOUBT_S))

    async def check(self, worker: Worker) -> None:
        """Check a worker once.

        The connections of a worker that does not answer are closed, so that its requests are
        retried elsewhere or end.
        """
        trouble, is_silent = await self._ask(worker)
        has_changed = worker.record_check(trouble)
        if self._subscriber is not None:
            self._subscriber.update(worker)
        if not has_changed:
            return
        if worker.is_well:
            log.info("worker well url=%s", worker.url)
            return
        log.warning("worker not well url=%s: %s", worker.url, worker.trouble)
        if is_silent:
            worker.upstream.cut()

    async def _ask(self, worker: Worker) -> tuple[str, bool]:
        """(what is wrong, "" if nothing; whether there was no answer at all)."""
        path = self._health.path.encode()
        try:
            async with asyncio.timeout(self._health.timeout_s):
                answer = await worker.upstream.send("GET", path, self._headers(worker))
                body = await answer.whole(_REASON_BYTES)
                if answer.status == 200 and not worker.is_well:
                    await self._learn_port(worker)
        except TimeoutError:
            return f"no answer to {self._health.path} in {self._health.timeout_s:g} s", True
        except (WorkerUnreachable, WorkerLost) as error:
            return str(error), True
        except RequestError as error:  # the path or the key is invalid
            return str(error), False
        if answer.status == 200:
            return "", False
        said = printable(body.decode("utf-8", "replace"), _REASON_CHARS)
        return f"{self._health.path} answered {answer.status} {said}".rstrip(), False

    def _headers(self, worker: Worker) -> list[tuple[bytes, bytes]]:
        key = worker.spec.api_key or self._key
        return [(b"authorization", b"Bearer " + key.encode())] if key else []

    async def _learn_port(self, worker: Worker) -> None:
        """Ask a prefill worker for its bootstrap port, unless the router was given it. Called when
        the worker has started, perhaps anew with another port."""
        if worker.spec.kind != PREFILL or worker.spec.bootstrap_port is not None:
            return
        answer = await worker.upstream.send("GET", b"/server_info", self._headers(worker))
        body, port = await answer.whole(_INFO_BYTES), None
        with contextlib.suppress(ValueError, RecursionError):
            info = orjson.loads(body)
            port = info.get(_PORT) if answer.status == 200 and is_object(info) else None
        if type(port) is int and 0 < port < 1 << 16:
            worker.bootstrap_port = port
            return
        log.warning(
            "worker url=%s does not report its %s (/server_info answered %d), so decode servers "
            "assume their own default; name it after --prefill URL",
            worker.url,
            _PORT,
            answer.status,
        )


def _open_subscriber(config: RouterConfig) -> "CacheEventSubscriber | None":
    if not config.policy.follows_events:
        return None
    from banyan.router.cache_events import CacheEventSubscriber  # the only module that needs ZeroMQ

    return CacheEventSubscriber(config)
