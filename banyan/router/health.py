"""Check the health of every worker periodically and log changes."""

import asyncio
import contextlib
from typing import TYPE_CHECKING

import orjson

from banyan.base.errors import RequestError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import logger, printable
from banyan.router.config import PREFILL, RouterConfig
from banyan.router.upstream import WorkerLost, WorkerUnreachable
from banyan.router.worker import Worker
from banyan.router.worker_pool import WorkerPool

if TYPE_CHECKING:
    from banyan.router.cache_events import CacheEventSubscriber

log = logger(__name__)

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
        self._by_model = config.pool.by_model
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
                    await self._learn_models(worker)
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

    async def _learn_models(self, worker: Worker) -> None:
        """Ask a worker which models and adapters it serves, if requests are routed by that."""
        if not self._by_model:
            return
        answer = await worker.upstream.send("GET", b"/v1/models", self._headers(worker))
        body, entries = await answer.whole(_INFO_BYTES), None
        with contextlib.suppress(ValueError, RecursionError):
            listing = orjson.loads(body)
            entries = listing.get("data") if answer.status == 200 and is_object(listing) else None
        found = [e.get("id") for e in entries if is_object(e)] if is_list(entries) else []
        worker.models = tuple(name for name in found if isinstance(name, str))
        if not worker.models:
            raise RequestError(f"/v1/models answered {answer.status} and names no model")


def _open_subscriber(config: RouterConfig) -> "CacheEventSubscriber | None":
    if not config.policy.follows_events:
        return None
    from banyan.router.cache_events import CacheEventSubscriber  # the only module that needs ZeroMQ

    return CacheEventSubscriber(config)
