"""Servers and engines that tests share: one for each command line, until all tests have run.

A test borrows one. When it gives it back, what it left running is aborted, every page must be
free or cached, and the cache is flushed. Tests that end a server or change its weights start their
own.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from banyan.llm import Engine
from tests.system.serving import CALL_S, Server, launch, wait_ready, wait_until

T = TypeVar("T")
OF_A_TEST = ("PYTEST_CURRENT_TEST",)
"""Variables that differ from test to test and change no server."""


@dataclass
class _Idle(Generic[T]):
    key: Hashable
    thing: T


class Pool(Generic[T]):
    """Keeps what tests gave back, the latest few, for the next one that asks with the same key.

    Args:
        reset: makes it as new and checks it; raises AssertionError if that fails.
        end: ends it for good.
        most: how many are kept while nobody uses them.
    """

    def __init__(self, reset: Callable[[T], None], end: Callable[[T], None], most: int) -> None:
        self._reset = reset
        self._end = end
        self._most = most
        self._idle: list[_Idle[T]] = []
        self.num_starts = 0

    @contextmanager
    def borrow(self, key: Hashable, start: Callable[[], T]) -> Iterator[T]:
        """One with this key, started unless an idle one is here. One whose test failed is ended."""
        key = (key, _environment())
        found = next((idle for idle in reversed(self._idle) if idle.key == key), None)
        if found is not None:
            self._idle.remove(found)
            thing = found.thing
        else:
            thing = start()
            self.num_starts += 1
        try:
            yield thing
            self._reset(thing)
        except BaseException:
            self._end(thing)
            raise
        self._idle.append(_Idle(key, thing))
        while len(self._idle) > self._most:
            self._end(self._idle.pop(0).thing)

    def close(self) -> None:
        while self._idle:
            self._end(self._idle.pop().thing)


class ServerPool:
    """Running servers by their flags."""

    def __init__(self, folder: Path, most: int = 4) -> None:
        self._folder = folder
        self._pool = Pool[Server](_reset_server, Server.kill, most)
        self.close = self._pool.close

    @contextmanager
    def borrow(self, *flags: str) -> Iterator[Server]:
        """A ready server with these flags; the end of its log is shown if the test fails."""
        with self._pool.borrow(flags, lambda: self._start(flags)) as server:
            try:
                yield server
            except BaseException:
                print(f"--- {server.log.name}\n{server.tail()}")
                raise

    def _start(self, flags: tuple[str, ...]) -> Server:
        server = launch(self._folder / f"{self._pool.num_starts}.log", *flags)
        try:
            wait_ready(server)
        except BaseException:
            server.kill()
            raise
        return server


class EnginePool:
    """Engines by their model and arguments."""

    def __init__(self, most: int = 6) -> None:
        self._pool = Pool[Engine](_reset_engine, Engine.shutdown, most)
        self.close = self._pool.close

    @contextmanager
    def borrow(self, model: Path | str, **arguments: object) -> Iterator[Engine]:
        key = (str(model), repr(sorted(arguments.items())))
        with self._pool.borrow(key, lambda: Engine(str(model), **arguments)) as engine:
            yield engine


def _environment() -> Hashable:
    return frozenset((name, value) for name, value in os.environ.items() if name not in OF_A_TEST)


def _reset_server(server: Server) -> None:
    assert server.process.poll() is None, f"the server ended:\n{server.tail()}"
    for request in server.http.get("/requests").json()["requests"]:
        server.http.post("/abort_request", json={"rid": request["rid"]})
    wait_until(lambda: _is_whole(server.stats()), CALL_S, "the pages of a test to come back")
    answer = server.http.post("/flush_cache")
    assert answer.status_code == 200, answer.text


def _reset_engine(engine: Engine) -> None:
    def is_whole() -> bool:
        return _is_whole(msgspec.structs.asdict(engine.stats()))

    wait_until(is_whole, CALL_S, "the pages of a test to come back")
    assert engine.flush_cache()


def _is_whole(stats: Mapping[str, int]) -> bool:
    """No request is left, and every page is free or cached."""
    assert not stats["leaked"], stats
    is_idle = not any(stats[name] for name in ("running", "waiting", "held_pages", "open_rooms"))
    return is_idle and stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]
