"""Watch: looks at the health of every worker, again and again, and tells the log what changes."""

import asyncio
import contextlib
from typing import TYPE_CHECKING

from banyan.base.errors import RequestError
from banyan.base.log import logger, printable
from banyan.router.config import RouterConfig
from banyan.router.upstream import Lost, NotReached
from banyan.router.worker import Worker
from banyan.router.worker_pool import Fleet

if TYPE_CHECKING:
    from banyan.router.cache_events import Hearing

log = logger(__name__)

_REASON_BYTES = 64 << 10
_REASON_CHARS = 200
_AFTER_DOUBT_S = 0.2
"""Least time between two looks at a worker that requests found wanting."""


class Watch:
    """Watches the workers of a fleet until it is cancelled."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._health = config.health
        self._key = config.server.api_key.partition(" ")[0]
        self._fleet = fleet
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._hearing = _open_hearing(config)

    async def run(self) -> None:
        """Follow the fleet as workers come and go."""
        try:
            while True:
                self._fleet.came.clear()
                for worker in self._tasks.keys() - set(self._fleet.workers):
                    self._tasks.pop(worker).cancel()
                    if self._hearing is not None:
                        self._hearing.drop(worker)
                for worker in self._fleet.workers:
                    if worker not in self._tasks and not self._health.is_off:
                        self._tasks[worker] = asyncio.create_task(self._follow(worker))
                await self._fleet.came.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._hearing is not None:
                self._hearing.close()

    async def _follow(self, worker: Worker) -> None:
        while True:
            await self.look(worker)
            health = self._health
            pause_s = health.interval_s if worker.has_been_well else health.first_interval_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await worker.doubted.wait()
                worker.doubted.clear()
                await asyncio.sleep(min(pause_s, _AFTER_DOUBT_S))

    async def look(self, worker: Worker) -> None:
        """Ask a worker once how it is. One that does not answer loses what it has open, so that its
        requests go elsewhere or end."""
        trouble, is_silent = await self._ask(worker)
        has_changed = worker.checked(trouble)
        if self._hearing is not None:
            self._hearing.tend(worker)
        if not has_changed:
            return
        if worker.is_well:
            log.info("worker well url=%s", worker.url)
            return
        log.warning("worker not well url=%s: %s", worker.url, worker.trouble)
        if is_silent:
            worker.upstream.cut()

    async def _ask(self, worker: Worker) -> tuple[str, bool]:
        """(what is wrong, "" = nothing; whether there was no answer at all)."""
        key = worker.spec.api_key or self._key
        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        path = self._health.path.encode()
        try:
            async with asyncio.timeout(self._health.timeout_s):
                answer = await worker.upstream.send("GET", path, headers)
                body = await answer.whole(_REASON_BYTES)
        except TimeoutError:
            return f"no answer to {self._health.path} in {self._health.timeout_s:g} s", True
        except (NotReached, Lost) as error:
            return str(error), True
        except RequestError as error:  # of the path or the key
            return str(error), False
        if answer.status == 200:
            return "", False
        said = printable(body.decode("utf-8", "replace"), _REASON_CHARS)
        return f"{self._health.path} answered {answer.status} {said}".rstrip(), False


def _open_hearing(config: RouterConfig) -> "Hearing | None":
    if not config.policy.follows_events:
        return None
    from banyan.router.cache_events import Hearing  # nobody else needs ZeroMQ

    return Hearing(config)
