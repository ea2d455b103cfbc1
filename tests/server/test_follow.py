"""Events go out in the call that brings what they tell, and wait where the client makes them."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine

import pytest

from banyan.base.errors import RequestError
from banyan.requests.generation import Chunks
from banyan.server.http.exchange import WRITE, HttpExchange, Later, follow


class _Source(Chunks[str]):
    """What a test says, when it says it.

    Args:
        knows: it says when nobody has to ask.
    """

    def __init__(self, knows: bool) -> None:
        self.knows = knows
        self.num_asked = 0
        self.there: deque[str] = deque()
        self.error: RequestError | None = None
        self.has_ended = False
        self.more: Callable[[], None] | None = None

    @property
    def is_over(self) -> bool:
        return self.has_ended and not self.there

    @property
    def is_quiet(self) -> bool:
        return self.knows and not (self.there or self.has_ended)

    def take(self) -> str | None:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return self.there.popleft() if self.there else None

    def on_more(self, more: Callable[[], None] | None) -> None:
        self.more = more

    def close(self) -> None:
        self.has_ended = True

    def say(self, *texts: str) -> None:
        self.there.extend(texts)
        if self.more is not None:
            self.more()

    def end(self) -> None:
        self.has_ended = True
        self.say()


class _Client:
    """One end of an exchange: what it got, and whether its buffer has room."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.has_room = True
        self.drained = asyncio.Event()
        scope = {"method": "POST", "path": "/", "headers": [], WRITE: self._write}
        self.exchange = HttpExchange(scope, self._send)

    def _write(self, piece: bytes) -> bool:
        if self.has_room:
            self.got.append(piece)
        return self.has_room

    async def _send(self, message: dict[str, object]) -> None:
        body = message.get("body")
        if isinstance(body, bytes):
            if not self.has_room:
                await self.drained.wait()
            self.got.append(body)


def _play(scenario: Callable[[_Source, _Client], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        for knows in (False, True):
            await scenario(_Source(knows), _Client())

    asyncio.run(main())


async def _begun(source: _Source, client: _Client, frames: Callable[[str], bytes | Later]):
    """A stream whose first chunk has gone out."""
    task = asyncio.create_task(follow(client.exchange, source, frames))
    await asyncio.sleep(0)
    source.say("first")
    while not client.got:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


def test_a_chunk_is_written_in_the_call_that_brings_it() -> None:
    async def scenario(source: _Source, client: _Client) -> None:
        task = await _begun(source, client, str.encode)
        source.say("a", "b")
        source.say("c")
        assert client.got == [b"first", b"a", b"b", b"c"], "no turn of the loop was needed"
        source.end()
        await task
        assert client.exchange.num_sent == len(b"firstabc") and source.more is None

    _play(scenario)


def test_who_knows_that_nothing_is_there_is_not_asked_again() -> None:
    async def scenario(source: _Source, client: _Client) -> None:
        task = await _begun(source, client, str.encode)
        source.num_asked = 0
        source.say("a", "b")
        assert source.num_asked == (2 if source.knows else 3)
        source.end()
        await task
        assert client.got == [b"first", b"a", b"b"]

    _play(scenario)


def test_a_full_buffer_makes_chunks_wait_and_loses_none() -> None:
    async def scenario(source: _Source, client: _Client) -> None:
        task = await _begun(source, client, str.encode)
        client.has_room = False
        source.say("a")
        source.say("b")
        await asyncio.sleep(0)
        source.say("c")
        assert client.got == [b"first"] and list(source.there) == ["b", "c"]
        client.has_room = True
        client.drained.set()
        source.end()
        await task
        assert b"".join(client.got) == b"firstabc"
        assert client.exchange.num_sent == len(b"firstabc")

    _play(scenario)


def test_what_takes_time_to_make_is_waited_for_in_order() -> None:
    async def scenario(source: _Source, client: _Client) -> None:
        async def slowly() -> bytes:
            await asyncio.sleep(0)
            return b"slow"

        task = await _begun(source, client, lambda t: slowly if t == "slow" else t.encode())
        source.say("a", "slow", "b", "slow")
        source.end()
        await task
        assert client.got == [b"first", b"a", b"slow", b"b", b"slow"]

    _play(scenario)


def test_a_failure_ends_the_task_that_follows() -> None:
    async def scenario(source: _Source, client: _Client) -> None:
        task = await _begun(source, client, str.encode)
        source.error = RequestError("it failed", status=503)
        source.say("never")
        source.say("nor this")
        with pytest.raises(RequestError, match="it failed"):
            await task
        assert client.got == [b"first"] and source.more is None

    _play(scenario)


def test_a_task_that_is_ended_hears_no_more() -> None:
    async def scenario(source: _Source, client: _Client) -> None:
        task = await _begun(source, client, str.encode)
        task.cancel()
        source.say("too late")
        await asyncio.gather(task, return_exceptions=True)
        assert client.got == [b"first"] and source.more is None and task.cancelled()

    _play(scenario)
