"""Who keeps engines running: when it tries again, when it gives up, and what it keeps."""

import asyncio
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from banyan.config.schema import Config, ObserveConfig, ServerConfig
from banyan.messages.events import Fatal, Ready, Stats
from banyan.messages.transport import SocketEngineLink
from banyan.model_config.model_config import ModelConfig
from banyan.server.lifecycle.supervisor import Supervisor
from tests.server.fakes import MODEL_CONFIG
from tests.support.clients import asynchronous
from tests.support.flags import config_of

READY = Ready(max_total_tokens=64, max_request_tokens=64, max_running=1)
CONFIG = Config(server=ServerConfig(engine_restarts=3, heartbeat_timeout_s=60.0))


@dataclass
class Life:
    """One engine: says `word`, then beats until it is stopped, or asked to be silent."""

    address: str
    word: Ready | Fatal
    on_death: Callable[[str], None]
    is_silent: bool = False
    ended_by: str = ""
    _end: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._leave("stop")

    def put_down(self) -> None:
        self._leave("put_down")

    def recording(self) -> bytes:
        return b"recorded" if not self.ended_by else b""

    def _leave(self, how: str) -> None:
        self.ended_by = self.ended_by or how
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        link = SocketEngineLink(self.address)
        link.send([self.word])
        while not self._end.is_set():
            select.select([link.poll_fd()], [], [], 0.02)
            link.receive()
            if not self.is_silent:
                link.send([Stats()])
        link.close()


class Engines:
    """Lives in the order of their first words; the last word is said by all that follow."""

    def __init__(self, *words: Ready | Fatal) -> None:
        self.words = list(words)
        self.lives: list[Life] = []

    def start(
        self,
        config: Config,
        model_config: ModelConfig,
        address: str,
        on_death: Callable[[str], None],
    ) -> Life:
        word = self.words.pop(0) if len(self.words) > 1 else self.words[0]
        self.lives.append(Life(address, word, on_death))
        return self.lives[-1]


async def opened(engines: Engines, config: Config = CONFIG) -> Supervisor:
    """A supervisor whose engine serves."""
    supervisor = Supervisor(config, [0], engines.start)
    await supervisor.engines[0].start()
    supervisor.start(config, MODEL_CONFIG)
    await supervisor.engines[0].ready()
    supervisor.settled()
    return supervisor


async def serves(supervisor: Supervisor, engines: Engines, life: int) -> None:
    limit = time.monotonic() + 60
    while len(engines.lives) < life or not supervisor.engines[0].health().progressing:
        assert time.monotonic() < limit, supervisor.engines[0].health()
        await asyncio.sleep(0.01)


async def closed(supervisor: Supervisor, keeping: "asyncio.Task[str]") -> None:
    keeping.cancel()
    await supervisor.stop()
    await supervisor.engines[0].close()


@asynchronous
async def test_a_dead_engine_is_replaced_and_late_news_of_it_is_nothing():
    engines = Engines(READY)
    supervisor = await opened(engines)
    keeping = asyncio.create_task(supervisor.keep())
    engines.lives[0].on_death("the first was killed")
    await serves(supervisor, engines, 2)
    engines.lives[0].on_death("the first was killed, reported once more")
    await asyncio.sleep(0.05)
    assert supervisor.engines[0].health().progressing and len(engines.lives) == 2
    await closed(supervisor, keeping)


@asynchronous
async def test_an_engine_that_says_nothing_more_is_put_down_and_replaced():
    impatient = replace(CONFIG, server=replace(CONFIG.server, heartbeat_timeout_s=0.4))
    engines = Engines(READY)
    supervisor = await opened(engines, impatient)
    keeping = asyncio.create_task(supervisor.keep())
    engines.lives[0].is_silent = True
    await serves(supervisor, engines, 2)
    assert engines.lives[0].ended_by == "put_down"
    await closed(supervisor, keeping)


@asynchronous
async def test_an_engine_that_ends_because_of_the_model_is_not_tried_again():
    engines = Engines(READY, Fatal("the model is gone", exit_code=3))
    supervisor = await opened(engines)
    keeping = asyncio.create_task(supervisor.keep())
    engines.lives[0].on_death("killed")
    reason = await asyncio.wait_for(keeping, 60)
    assert "the model is gone" in reason and len(engines.lives) == 2
    assert supervisor.engines[0].health().reason == reason
    await closed(supervisor, keeping)


@asynchronous
async def test_engines_that_fail_in_their_start_for_another_reason_are_tried_as_often_as_allowed():
    config = replace(CONFIG, server=replace(CONFIG.server, engine_restarts=2))
    engines = Engines(READY, Fatal("no memory", exit_code=4))
    supervisor = await opened(engines, config)
    keeping = asyncio.create_task(supervisor.keep())
    engines.lives[0].on_death("killed")
    reason = await asyncio.wait_for(keeping, 60)
    assert "no memory" in reason and "after 2 restarts" in reason and len(engines.lives) == 3
    await closed(supervisor, keeping)


@pytest.mark.parametrize("is_settled", [False, True])
def test_no_engine_is_replaced_before_the_server_serves_or_when_that_is_not_wanted(is_settled):
    async def scenario():
        config = replace(CONFIG, server=replace(CONFIG.server, engine_restarts=0))
        engines = Engines(READY)
        supervisor = Supervisor(config if is_settled else CONFIG, [0], engines.start)
        await supervisor.engines[0].start()
        supervisor.start(CONFIG, MODEL_CONFIG)
        await supervisor.engines[0].ready()
        if is_settled:
            supervisor.settled()
        keeping = asyncio.create_task(supervisor.keep())
        engines.lives[0].on_death("killed")
        assert await asyncio.wait_for(keeping, 60) == "killed"
        assert len(engines.lives) == 1
        await closed(supervisor, keeping)

    asynchronous(scenario)()


def test_the_journal_of_a_lost_engine_is_kept(tmp_path: Path):
    journal = tmp_path / "journal"
    (tmp_path / "journal.1").write_text("of an earlier day")
    config = replace(CONFIG, observe=ObserveConfig(journal=str(journal)))

    async def scenario():
        engines = Engines(READY)
        supervisor = await opened(engines, config)
        journal.write_text("what led to the end")
        keeping = asyncio.create_task(supervisor.keep())
        engines.lives[0].on_death("killed")
        await serves(supervisor, engines, 2)
        await closed(supervisor, keeping)

    asynchronous(scenario)()
    assert (tmp_path / "journal.2").read_text() == "what led to the end" and not journal.exists()


async def deaths_borne(config: Config, most: int) -> int:
    """How many deaths in a row are followed by an engine that serves."""
    engines = Engines(READY)
    supervisor = await opened(engines, config)
    keeping = asyncio.create_task(supervisor.keep())
    for death in range(most):
        num_lives = len(engines.lives)
        engines.lives[-1].on_death("killed")
        # Not by its health alone: it may be back before that is looked at.
        while not keeping.done() and (
            len(engines.lives) == num_lives or not supervisor.engines[0].health().progressing
        ):
            await asyncio.sleep(0.01)
        if keeping.done():
            await closed(supervisor, keeping)
            return death
    await closed(supervisor, keeping)
    return most


@asynchronous
async def test_a_dead_engine_is_replaced_as_often_in_a_row_as_the_flag_says():
    assert await deaths_borne(config_of("--engine-restarts", "0"), 1) == 0
    assert await deaths_borne(config_of("--engine-restarts", "2"), 3) == 2


@asynchronous
async def test_an_engine_that_has_served_for_the_time_given_begins_the_count_anew():
    flags = ("--engine-restarts", "1", "--engine-restart-window", "0")
    assert await deaths_borne(config_of(*flags), 3) == 3
