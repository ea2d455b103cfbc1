"""Several models at one address. Each has a server of its own, which starts when a request
names the model, and stops when another model needs its place.

    unloaded ──request──► loading ──well──► loaded ──another one's turn, or idle──► unloading ─┐
        ▲                    └──ended──► failed, for a while                                   │
        └──────────────────────────────────────────────────────────────────────────────────────┘

One model is loaded at a time. A model whose place is needed finishes its requests first; requests
for it that come meanwhile wait until the other one has had it.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from banyan.base.child_process import Child
from banyan.base.errors import BanyanError, RequestError
from banyan.base.log import logger, printable
from banyan.router.config import ModelsConfig, RouterConfig, WorkerSpec
from banyan.router.worker import Worker
from banyan.router.worker_pool import WorkerPool
from banyan.server.errors import unavailable

log = logger(__name__)

GRACE_S = 40.0
"""Seconds in which a server that is stopped may end in order."""
_POLL_S = 0.05
_WATCH_S = 2.0
"""Seconds between two checks of idle models and of memory."""
_FAILED_S = 10.0
"""Seconds after a failed start in which requests get its error instead of another start."""
_REFRESH_S = 2.0
"""Least seconds between two searches for a model that is not known."""
_GIB = 1 << 30
_LATEST = ":latest"
"""Ollama's clients name a model without a tag like this."""


class State(Enum):
    """Whether a model can answer; the value is the one of `/v1/models`."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


@dataclass(frozen=True)
class NamedModel:
    """A model that can be served.

    Attributes:
        words: command line of its server: the model and its own flags.
        size_bytes: of its weights on disk; 0 = not known.
    """

    name: str
    words: tuple[str, ...]
    size_bytes: int = 0


class ModelHost(Protocol):
    """What a machine offers: the models on it, and servers for them."""

    def find(self) -> Sequence[NamedModel]:
        """All models that can be served now, as files come and go. Called in a thread."""
        ...

    def start(self, source: NamedModel, limit_bytes: int) -> tuple[Child, WorkerSpec]:
        """Start a server and return at once.

        Args:
            limit_bytes: what its weights and its cache may take; 0 = as it likes.
        """
        ...

    async def change_hub(self, verb: str, name: str) -> str:
        """Download ("pull") or delete ("rm") a model of the hub; what went wrong, or ""."""
        ...


@dataclass
class _Load:
    """One start of a server. The model stays loaded until all that waited for it were served."""

    task: asyncio.Task[None]
    waiting: int = 0


class ModelServer:
    """One model and its server. Times are seconds of a monotonic clock."""

    def __init__(self, source: NamedModel) -> None:
        self.source = source
        self.state = State.UNLOADED
        self.child: Child | None = None
        self.worker: Worker | None = None
        self.used_s = 0.0
        self.expires_s: float | None = None
        """When it is unloaded although no other model needs its place; None = not."""
        self.size_bytes = source.size_bytes
        """Memory of its processes, measured while it is loaded."""
        self.trouble = ""
        self.failed_s = 0.0
        self.load: _Load | None = None
        """The latest start."""
        self.due: _Load | None = None
        """The start of the server that runs now."""

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def open(self) -> int:
        """Requests in progress, and those that waited for the start and are about to be sent."""
        due = 0 if self.due is None else self.due.waiting
        return due + (0 if self.worker is None else self.worker.open)

    @property
    def is_running(self) -> bool:
        return self.child is not None and self.child.is_alive()


class ModelServers:
    """The models of a router.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        config: RouterConfig,
        pool: WorkerPool,
        host: ModelHost,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rule: ModelsConfig = config.models
        self._startup_s = config.pool.startup_s
        self._waiting_s = config.limits.waiting_s
        self._pool = pool
        self.host = host
        self._now = now
        self._models: dict[str, ModelServer] = {}
        self._looked_s = -math.inf
        self._looking = asyncio.Lock()
        self._turn = asyncio.Lock()
        """Held by the one load that is in progress; further ones wait in their order."""

    # -- the table ----------------------------------------------------------------------------

    @property
    def all(self) -> list[ModelServer]:
        return list(self._models.values())

    async def refresh(self) -> None:
        """Look which models there are. A loaded one stays until it is unloaded."""
        try:
            found = {source.name: source for source in await asyncio.to_thread(self.host.find)}
        except (BanyanError, OSError) as error:
            log.warning("the list of models stays as it was: %s", error)
            return
        for name, source in found.items():
            if name not in self._models:
                self._models[name] = ModelServer(source)
        for name in self._models.keys() - found.keys():
            if self._models[name].state in (State.UNLOADED, State.FAILED):
                del self._models[name]
        self._looked_s = self._now()

    async def refresh_sometimes(self) -> None:
        """`refresh`, if that was some time ago."""
        async with self._looking:
            if self._now() - self._looked_s > _REFRESH_S:
                await self.refresh()

    async def find(self, name: str) -> ModelServer:
        """The model that a request names; the default one for no name.

        Raises:
            RequestError: 404 `model_not_found`.
        """
        found = self._look(name)
        if found is None:
            await self.refresh_sometimes()
            found = self._look(name)
        if found is None and (not name or self._rule.default):
            default = self._rule.default
            found = self._look(default) if default else next(iter(self._models.values()), None)
        if found is None:
            raise model_not_found(name, list(self._models))
        return found

    def has(self, name: str) -> bool:
        return self._look(name) is not None

    def is_name_of(self, model: ModelServer, name: str) -> bool:
        """Whether `name` names this model, not as the default one."""
        return self._look(name) is model

    def _look(self, name: str) -> ModelServer | None:
        plain = name.removesuffix(_LATEST)
        loaded = (m for m in self._models.values() if m.worker and plain in m.worker.models)
        return self._models.get(name) or self._models.get(plain) or next(loaded, None)

    # -- loading ------------------------------------------------------------------------------

    async def load(self, model: ModelServer, limit_s: float | None = None) -> None:
        """Start the server of a model if it does not run. It runs when this returns, and at least
        until the caller next waits for something.

        Args:
            limit_s: seconds to wait; None = as requests wait for a place.

        Raises:
            RequestError: 503; it did not start, or not in time.
        """
        limit_s = limit_s or self._waiting_s
        while True:
            self._note_end(model)
            if model.state is State.LOADED:
                model.used_s = self._now()
                return
            if model.state is State.FAILED and self._now() - model.failed_s < _FAILED_S:
                raise unavailable(model.trouble, "model_failed")
            if model.load is None or model.load.task.done():
                model.load = _Load(
                    asyncio.create_task(self._load(model), name=f"load-{model.name}")
                )
            load = model.load
            load.waiting += 1
            try:
                async with asyncio.timeout(limit_s):
                    await asyncio.shield(load.task)
                if model.due is load:  # although others may want its place already
                    return
            except TimeoutError:
                raise unavailable(
                    f"the model {model.name} was not loaded within {limit_s:g} s "
                    f"(it is {model.state.value})",
                    "model_loading",
                ) from None
            finally:
                load.waiting -= 1

    def _note_end(self, model: ModelServer) -> None:
        """A server that has ended by itself is started again by the next request."""
        if model.state is State.LOADED and not model.is_running:
            log.warning("the server of model=%s has ended", model.name)
            self._forget(model, State.UNLOADED)

    async def _load(self, model: ModelServer) -> None:
        """Make room, start the server and wait until it is well."""
        async with self._turn:
            await self._make_room(model)
            model.state, began_s = State.LOADING, self._now()
            why = await self._started(model)
            if why:
                await self._stop(model, State.FAILED)
                model.failed_s = self._now()
                model.trouble = f"the server of the model {model.name} {why}"
                log.error("%s", model.trouble)
                return
            model.state, model.due = State.LOADED, model.load
            self.keep_for(model, None)
            log.info("loaded model=%s seconds=%.1f", model.name, model.used_s - began_s)

    async def _started(self, model: ModelServer) -> str:
        """Start the server; why it is not well, "" if it is."""
        try:
            model.child, spec = self.host.start(model.source, self._limit_of(model))
            worker = model.worker = self._pool.add(spec)
            async with asyncio.timeout(self._startup_s):
                while not worker.is_well and model.is_running:
                    worker.check_soon.set()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            return f"was not ready after {self._startup_s:g} s"
        except (BanyanError, OSError) as error:
            return f"could not be started: {error}"
        return "" if model.is_running else "ended at its start; its log says why"

    async def _make_room(self, model: ModelServer) -> None:
        """Unload others, the least recently used first, until this one has a place."""
        while True:
            loaded = [m for m in self._loaded if m is not model]
            if not loaded or self._fits(model, loaded):
                if self._bound and model.size_bytes > self._bound:
                    log.warning("model=%s alone is larger than --models-memory", model.name)
                return
            await self._unload(min(loaded, key=lambda m: (m.open > 0, m.used_s)))

    @property
    def _loaded(self) -> list[ModelServer]:
        return [m for m in self._models.values() if m.worker is not None]

    def _fits(self, model: ModelServer, loaded: Sequence[ModelServer]) -> bool:
        if len(loaded) >= self._rule.most:
            return False
        wanted = model.size_bytes + sum(other.size_bytes for other in loaded)
        return not self._rule.memory_gib or wanted <= self._bound

    @property
    def _bound(self) -> int:
        """Memory of all loaded models, in bytes; 0 = no bound."""
        return int(self._rule.memory_gib * _GIB)

    def _limit_of(self, model: ModelServer) -> int:
        """Bytes that a model may take in addition to the loaded ones; 0 = no bound."""
        left = self._bound - sum(m.size_bytes for m in self._loaded)
        return max(left, model.size_bytes) if self._bound else 0

    # -- unloading ----------------------------------------------------------------------------

    async def unload(self, model: ModelServer, is_if_idle: bool = False) -> None:
        """Stop the server of a model when its requests have ended.

        Args:
            is_if_idle: only if it has no requests when its turn comes.
        """
        async with self._turn:
            if model.worker is not None and not (is_if_idle and model.open):
                await self._unload(model)

    async def _unload(self, model: ModelServer) -> None:
        model.state = State.UNLOADING
        while model.open and model.is_running:
            await asyncio.sleep(_POLL_S)
        log.info("unloading model=%s", model.name)
        await self._stop(model, State.UNLOADED)

    async def _stop(self, model: ModelServer, state: State) -> None:
        if model.child is not None:
            await asyncio.to_thread(model.child.stop, GRACE_S)
        self._forget(model, state)

    def _forget(self, model: ModelServer, state: State) -> None:
        """Record that its server has ended."""
        if model.worker is not None and model.worker in self._pool.workers:
            self._pool.remove(model.worker)
        model.child = model.worker = model.due = model.expires_s = None
        model.state = state

    def keep_for(self, model: ModelServer, seconds: float | None) -> None:
        """A request has ended: keep the model loaded for so long.

        Args:
            seconds: negative = until its place is needed; None = as the configuration says.
        """
        if seconds is None:
            seconds = self._rule.idle_s or -1.0
        model.used_s = self._now()
        model.expires_s = None if seconds < 0 else model.used_s + seconds

    async def run(self) -> None:
        """Unload models that are idle for too long or take too much memory; ends all servers when
        it is cancelled."""
        try:
            while True:
                await asyncio.sleep(_WATCH_S)
                for model in self._loaded:
                    self._note_end(model)
                    if model.child is not None and model.state is State.LOADED:
                        size = await asyncio.to_thread(memory_of, model.child.pid)
                        model.size_bytes = max(size, model.source.size_bytes)
                for model in self._surplus():
                    await self.unload(model, is_if_idle=True)
        finally:
            await self._close()

    def _surplus(self) -> list[ModelServer]:
        """Idle models whose time is over, and those above the bound on memory."""
        loaded, now = self._loaded, self._now()
        total, found = sum(m.size_bytes for m in loaded), list[ModelServer]()
        for model in sorted(loaded, key=lambda m: m.used_s):
            if model.open or model.state is not State.LOADED:
                continue
            is_over = model.expires_s is not None and now >= model.expires_s
            is_too_much = 0 < self._bound < total and len(found) < len(loaded) - 1
            if is_over or is_too_much:
                total -= model.size_bytes
                found.append(model)
        return found

    async def _close(self) -> None:
        loads = [m.load.task for m in self._models.values() if m.load is not None]
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        running = [m for m in self._models.values() if m.child is not None]
        await asyncio.gather(*(self._stop(model, State.UNLOADED) for model in running))


def model_not_found(name: str, names: Sequence[str]) -> RequestError:
    known = ", ".join(names[:10]) or "none"
    return RequestError(
        f"the model {printable(name, 80)!r} is not here",
        status=404,
        code="model_not_found",
        param="model",
        hint=f"Models here: {known}",
    )


def memory_of(pid: int) -> int:
    """Memory of a process and its descendants; pages that several share count once."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                todo += map(int, (task / "children").read_text(encoding="ascii").split())
    return total
