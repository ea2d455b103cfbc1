"""Supervisor: keeps engines running. It starts an engine, and restarts it when it has died or is
stuck, up to --engine-restarts times in a row.

Replicas with DP attention work on one batch and end together, so they share one supervisor.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from banyan.base.errors import BanyanError, ConfigError, ModelError
from banyan.base.log import logger
from banyan.config.schema import Config
from banyan.dp_attention.rules import of_replica
from banyan.engine_client.client import ClientLimits, EngineClient
from banyan.messages.transport import PrivateFolder, SocketFrontLink
from banyan.model_config.model_config import ModelConfig

log = logger(__name__)

T = TypeVar("T")

MAX_OPEN = 16_384
"""Running and queued sequences of one engine. More are refused with 429, whatever
--max-queued-requests says, because each one takes memory of the API process."""

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0
"""The pause before the second restart in a row, and the longest pause; each one doubles."""

LOAD_S = 1800.0
"""Longest wait for the control ops that a new engine gets first: it may have to load weights."""

_PATIENCE = 4
"""A restart may take this many times as long as the first start."""

_HOPELESS = (ConfigError.exit_code, ModelError.exit_code)
"""Exit codes of a start that would fail again."""


class EngineHandle(Protocol):
    """A running engine process."""

    @property
    def stop(self) -> Callable[[], None]:
        """End the engine and wait for it. May take seconds; called from a thread."""
        ...

    @property
    def put_down(self) -> Callable[[], None]:
        """End an engine that does not respond; its stacks are logged first."""
        ...

    @property
    def recording(self) -> Callable[[], bytes]:
        """Contents of its flight recorder, as a journal; b"" without one. Not after `stop`."""
        ...


StartEngine = Callable[[Config, ModelConfig, str, Callable[[str], None]], EngineHandle]
"""(resolved config, model config, link address, on_death) -> handle. Called in the main thread for
each engine; returns at once. Any thread calls `on_death(reason)` when the engine ends by itself."""


def open_client(config: Config, address: str) -> EngineClient:
    """The API process's end of the link to the engine that will connect to `address`."""
    schedule = config.schedule
    return EngineClient(
        SocketFrontLink(address),
        ClientLimits(
            heartbeat_timeout_s=config.server.heartbeat_timeout_s,
            watchdog_s=schedule.watchdog_s,
            max_open=MAX_OPEN,
            # With priorities a full queue evicts a lower one instead of refusing.
            max_queued=0 if schedule.priorities else schedule.max_queued,
        ),
        is_kept_up=config.server.engine_restarts > 0,
    )


class Supervisor:
    """Keeps the engine of one replica running, or the engines of all replicas with DP attention.

    Args:
        numbers: the replicas.
        on_loss: called with an engine that is lost and will be restarted.
    """

    def __init__(
        self,
        config: Config,
        numbers: Sequence[int],
        start_engine: StartEngine,
        on_loss: Callable[[EngineClient], None] = lambda _: None,
    ) -> None:
        self._numbers = tuple(numbers)
        self._start_engine = start_engine
        self._on_loss = on_loss
        self._most = config.server.engine_restarts
        self._proof_s = config.server.engine_proof_s
        self._folder = PrivateFolder()
        self.engines = [open_client(config, address) for address in self._addresses()]
        self._handles: list[EngineHandle] = []
        self._process_spec: tuple[Config, ModelConfig] | None = None
        self._attempts = 0
        """Restarts since an engine last served for `_proof_s` seconds."""
        self._served_s = 0.0
        """When the current engines began to serve."""
        self._start_s = 0.0
        """Duration of the first start."""
        self._is_settled = False

    def start(self, config: Config, model_config: ModelConfig) -> None:
        """Start the engines for the first time; raises the errors of `StartEngine`."""
        self._process_spec = config, model_config
        self._start_s = time.monotonic()
        self._launch()

    def settled(self) -> None:
        """The server is ready: from now on, lost engines are restarted."""
        self._is_settled = True
        self._served_s = time.monotonic()
        self._start_s = self._served_s - self._start_s
        self._folder.close()  # both ends are connected: even a SIGKILL leaves no file

    def recordings(self) -> dict[int, Callable[[], bytes]]:
        """Replica -> reads the flight recorder of its engine."""
        return dict(zip(self._numbers, (h.recording for h in self._handles), strict=False))

    async def keep(self) -> str:
        """Restart lost engines until that fails for good; returns the reason."""
        while True:
            lost = await self._first_lost()
            reason = await lost.lost()
            objection = self._objection(lost)
            if objection is not None:
                reason += objection
                for engine in self.engines:
                    engine.give_up(reason)
                return reason
            await self._replace(reason)

    async def stop(self) -> None:
        """End the engines, and wait for them."""
        stops = [in_daemon_thread(handle.stop) for handle in self._handles]
        await asyncio.gather(*stops, return_exceptions=True)
        self._folder.close()

    def _addresses(self) -> list[str]:
        return [self._folder.address(f"front{number}") for number in self._numbers]

    def _launch(self) -> None:
        assert self._process_spec is not None
        config, model_config = self._process_spec
        loop = asyncio.get_running_loop()
        self._handles = []
        folder = self._folder
        for number, address, engine in zip(
            self._numbers, self._addresses(), self.engines, strict=True
        ):

            def report_loss(text: str, engine: EngineClient = engine) -> None:
                if self._folder is folder:  # else this engine has been replaced already
                    engine.engine_lost(text)

            def on_death(text: str, report_loss: Callable[[str], None] = report_loss) -> None:
                with contextlib.suppress(RuntimeError):  # the server has ended
                    loop.call_soon_threadsafe(report_loss, text)

            mine = of_replica(config, number, f"{folder.path}/joined")
            self._handles.append(self._start_engine(mine, model_config, address, on_death))

    async def _first_lost(self) -> EngineClient:
        waits = {asyncio.create_task(engine.lost()): engine for engine in self.engines}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return waits[next(iter(done))]

    def _objection(self, lost: EngineClient) -> str | None:
        """An addition to the reason if the loss is final; None = restart."""
        if not self._is_settled or not self._most:
            return ""
        if lost.exit_code in _HOPELESS:
            return " (another engine would end like this one)"
        if self._served_s and time.monotonic() - self._served_s > self._proof_s:
            self._attempts = 0
        self._served_s = 0.0
        if self._attempts < self._most:
            return None
        return f" (after {self._attempts} restarts, and --engine-restarts allows no more)"

    async def _replace(self, reason: str) -> None:
        """Restart all engines. If that fails they are lost once more."""
        self._attempts += 1
        remedy = f"the engine is being started again ({self._attempts} of {self._most}): {reason}"
        log.error("%s", remedy)
        for engine in self.engines:
            engine.engine_lost(reason)
            engine.remedy = remedy
            self._on_loss(engine)
        began_s = time.monotonic()
        await self._clear_away()
        if self._attempts > 1:
            await asyncio.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._attempts - 2)))
        self._folder = PrivateFolder()
        for engine, address in zip(self.engines, self._addresses(), strict=True):
            await engine.listen(SocketFrontLink(address))
        try:
            self._launch()
            await self._meet()
        except (BanyanError, TimeoutError) as error:
            for engine in self.engines:
                engine.engine_lost(str(error) or "The engine did not start in time.")
        else:
            self._served_s = time.monotonic()
            log.info("the engine serves again after %.2f s", self._served_s - began_s)
        finally:
            self._folder.close()

    async def _meet(self) -> None:
        """Wait until all engines serve; the first error ends the wait."""
        meetings = [asyncio.create_task(engine.revive(LOAD_S)) for engine in self.engines]
        try:
            async with asyncio.timeout(_PATIENCE * self._start_s + self._allowance_s()):
                for meeting in asyncio.as_completed(meetings):
                    await meeting
        finally:
            for meeting in meetings:
                meeting.cancel()
            await asyncio.gather(*meetings, return_exceptions=True)

    def _allowance_s(self) -> float:
        """Seconds that a start may take in addition to _PATIENCE times the first one."""
        assert self._process_spec is not None
        config = self._process_spec[0]
        nodes_s = config.parallel.meet_timeout_s if config.parallel.nodes > 1 else 0.0
        return config.schedule.watchdog_s + nodes_s

    async def _clear_away(self) -> None:
        """End the remaining engines, and keep their journal."""
        pairs = zip(self.engines, self._handles, strict=False)
        ends = [in_daemon_thread(h.put_down if e.is_stuck else h.stop) for e, h in pairs]
        await asyncio.gather(*ends, return_exceptions=True)
        assert self._process_spec is not None
        if journal := self._process_spec[0].observe.journal:
            await asyncio.to_thread(_keep_journal, Path(journal))


def _keep_journal(path: Path) -> None:
    """Rename the journal of a lost engine, so that the next engine does not overwrite it."""
    kept = next(p for n in range(1, 1 << 16) if not (p := Path(f"{path}.{n}")).exists())
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, kept)
        log.info("the journal of the lost engine is kept as %s", kept)


def in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a thread that, unlike asyncio's own, does not delay the exit of the process."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="server", daemon=True).start()
    return asyncio.wrap_future(outcome)
