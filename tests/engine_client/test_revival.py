"""An engine in the place of a lost one: what it gets sent, and which requests it gets."""

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from banyan.base.errors import BanyanError, RequestError
from banyan.base.ids import RequestId
from banyan.engine_client.client import DesiredState, EngineClient
from banyan.engine_client.data_parallel import DataParallelClient
from banyan.messages.events import Failed, Fatal, Finished, Ready, Reply, Tokens
from banyan.messages.requests import Abort, Control, Generate
from banyan.messages.transport import local_pair
from tests.support.clients import asynchronous, counting, events_of, generate
from tests.support.fake_engine import FakeEngine, serving, until

READY = Ready(max_total_tokens=4096, max_request_tokens=1024, max_running=8)


@asynccontextmanager
async def successor(client: EngineClient, *, hold: bool = False):
    """Another engine behind the client; it has not said that it is ready."""
    front, link = local_pair()
    engine = FakeEngine(link, counting, random.Random(1), hold=hold)
    task = asyncio.create_task(engine.run())
    await client.listen(front)
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def asked(engine: FakeEngine) -> list[str]:
    return [message.request for message in engine.received if isinstance(message, Generate)]


@asynchronous
async def test_what_was_not_answered_runs_on_the_next_engine_and_the_rest_ends_with_one_error():
    async with serving(counting, kept=True) as (client, engine):
        engine.hold = True
        begun, waits = client.submit(generate("begun")), client.submit(generate("waits"))
        engine.say(Tokens(RequestId("begun"), 0, b"\1\0\0\0"))
        await until(lambda: begun.unanswered is None)
        client.engine_lost("killed by signal 9")
        ends = await events_of(begun)
        assert [type(e) for e in ends] == [Tokens, Failed]
        assert (ends[-1].status, ends[-1].text) == (503, "killed by signal 9")
        client.remedy = "it is being started again"
        assert client.health().reason == "it is being started again"
        with pytest.raises(RequestError, match="started again"):
            client.submit(generate("late"))
        async with successor(client) as other:
            other.say(READY)
            await client.revive(5.0)
            assert client.health().progressing
            assert isinstance((await events_of(waits))[-1], Finished)
            assert asked(other) == ["waits"]
            assert isinstance((await events_of(client.submit(generate("new"))))[-1], Finished)
        assert len(client.streams) == 0 and client.streams.tokens == 0


@asynchronous
async def test_a_request_is_run_again_once():
    async with serving(counting, kept=True) as (client, engine):
        engine.hold = True
        stream = client.submit(generate())
        client.engine_lost("first")
        async with successor(client, hold=True) as other:
            other.say(READY)
            await client.revive(5.0)
            client.engine_lost("second")
            assert [(e.status, e.text) for e in await events_of(stream)] == [(503, "second")]


@asynchronous
async def test_a_request_that_waits_for_an_engine_can_be_aborted():
    async with serving(counting, kept=True) as (client, engine):
        engine.hold = True
        state_after, left = client.submit(generate("state_after")), client.submit(generate("left"))
        client.engine_lost("gone")
        client.abort(state_after.request)
        assert [e.reason for e in await events_of(state_after)] == ["abort"]
        async with successor(client) as other:
            left.close()
            other.say(READY)
            await client.revive(5.0)
            assert len(client.streams) == 0
            assert (await client.control("stats")).ok
            assert not any(isinstance(m, Generate | Abort) for m in other.received)


@asynchronous
async def test_when_no_engine_comes_what_waits_ends_with_the_reason():
    async with serving(counting, kept=True) as (client, engine):
        engine.hold = True
        stream = client.submit(generate())
        client.engine_lost("gone")
        client.remedy = "it is being started again"
        client.give_up("gone for good")
        assert [e.text for e in await events_of(stream)] == ["gone for good"]
        assert client.health().reason == "gone for good"


@asynchronous
async def test_a_lost_engine_that_goes_on_is_not_heard():
    async with serving(counting, kept=True) as (client, engine):
        engine.hold = True
        stream = client.submit(generate())
        await until(lambda: engine.received)
        client.engine_lost("stuck")
        engine.say(Tokens(stream.request, 0, b"\1\0\0\0"), Fatal("too late"))
        async with successor(client) as other:
            other.say(READY)
            await client.revive(5.0)
            events = await events_of(stream)
            assert isinstance(events[-1], Finished) and asked(other) == ["r"]


@asynchronous
async def test_the_next_engine_is_what_the_lost_one_was_before_it_gets_requests():
    async with serving(counting, kept=True) as (client, engine):
        engine.hold = True
        await client.control("update_weights", path="first", flush_cache=True)
        await client.control("update_weights", path="second", flush_cache=True)
        await client.control("pause", retract=True)
        stream = client.submit(generate())
        client.engine_lost("gone")
        async with successor(client) as other:
            other.say(READY)
            await client.revive(5.0)
            await events_of(stream)
            verbs = [m.verb if isinstance(m, Control) else m.request for m in other.received]
            assert verbs == ["update_weights", "pause", "r"]
            assert other.received[0].args["path"] == "second"


@asynchronous
async def test_an_engine_that_cannot_be_what_the_lost_one_was_is_no_successor():
    async with serving(counting, kept=True) as (client, _):
        await client.control("update_weights", path="gone meanwhile")
        client.engine_lost("gone")
        async with successor(client) as other:
            other.replies = False
            other.say(READY)
            revival = asyncio.create_task(client.revive(5.0))
            await until(lambda: other.received)
            assert not client.health().ready
            other.say(Reply(other.received[0].call, False, "no such folder"))
            with pytest.raises(BanyanError, match="could not update_weights: no such folder"):
                await revival
            assert not client.health().ready


@asynchronous
async def test_a_fleet_gives_what_waits_to_the_others_and_tells_who_comes_back_what_it_missed():
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(serving(counting, kept=True)) for _ in range(2)]
        (first, engine), (second, heir) = opened
        fleet = DataParallelClient([first, second], lambda requests, tokens, sent: 0)
        engine.hold = True
        waits = fleet.submit(generate("waits"))
        first.engine_lost("gone")
        fleet.share_out(first)
        assert isinstance((await events_of(waits))[-1], Finished) and asked(heir) == ["waits"]
        assert (len(first.streams), len(second.streams)) == (0, 0)
        assert (await fleet.control("pause")).ok and fleet.health().progressing
        async with successor(first) as other:
            other.say(READY)
            await first.revive(5.0)
            assert [m.verb for m in other.received] == ["pause"]


def state_after(*orders: tuple[str, dict]) -> DesiredState:
    desired_state = DesiredState()
    for verb, args in orders:
        desired_state.record(verb, args)
    return desired_state


def test_desired_state_leads_from_any_state_to_any_other():
    orders = [
        *(("pause", {}), ("resume", {}), ("update_weights", {"path": "a"})),
        *(("update_weights", {"path": "b"}), ("release_memory", {"tags": "kv_cache"})),
        *(("release_memory", {}), ("resume_memory", {"tags": "weights"}), ("resume_memory", {})),
    ]
    rng = random.Random(0)
    for _ in range(200):
        wanted = state_after(*(rng.choice(orders) for _ in range(6)))
        desired_state = state_after(("pause", {})) if rng.random() < 0.5 else state_after()
        steps = 0
        while (order := wanted.lacking(desired_state)) is not None:
            desired_state.record(*order)
            steps += 1
        assert steps <= 4 and vars(desired_state) == vars(wanted)


@asynchronous
async def test_an_engine_that_cannot_have_the_store_again_serves_without_it():
    async with serving(counting, kept=True) as (client, _):
        await client.control("attach_store", store="file")
        client.engine_lost("gone")
        async with successor(client) as other:
            other.replies = False
            other.say(READY)
            revival = asyncio.create_task(client.revive(5.0))
            for count in (1, 2):
                await until(lambda count=count: len(other.received) == count)
                ok = other.received[-1].verb == "detach_store"
                other.say(Reply(other.received[-1].call, ok, "no such folder"))
            await revival
            assert [m.verb for m in other.received] == ["detach_store", "attach_store"]
            assert client.health().ready
