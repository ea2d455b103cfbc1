"""Several engines behind one face: each request has one engine, and one death ends only its own."""

from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from banyan.base.errors import RequestError
from banyan.base.ids import RequestId
from banyan.engine_client.data_parallel import DataParallelClient
from banyan.messages.events import Failed, Finished, Stats
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams
from banyan.scheduler.routing import ROUTES
from tests.support.clients import asynchronous, events_of
from tests.support.fake_engine import serving, until
from tests.support.flags import config_of


def least(requests, tokens, sent):
    return min(range(len(requests)), key=lambda i: (requests[i], i))


def generate(id, max_new_tokens=4):
    return Generate(
        request=RequestId(id),
        tokens=b"\1\0\0\0",
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
    )


async def open_fleet(stack, count=2, route=least, **options):
    pairs = [
        await stack.enter_async_context(serving(lambda _: [7] * 99, **options))
        for _ in range(count)
    ]
    clients, engines = zip(*pairs, strict=True)
    return DataParallelClient(clients, route), clients, engines


@asynchronous
async def test_requests_go_where_the_route_says_and_all_end():
    async with AsyncExitStack() as stack:
        fleet, clients, engines = await open_fleet(stack)
        for engine in engines:
            engine.hold = True
        streams = [fleet.submit(generate(str(i))) for i in range(6)]
        assert [len(client.streams) for client in clients] == [3, 3]
        assert [client.streams.tokens for client in clients] == [15, 15]
        for stream in streams:
            fleet.abort(stream.request)
        ends = [(await events_of(stream))[-1] for stream in streams]
        assert all(isinstance(end, Finished) for end in ends)
        assert [client.streams.tokens for client in clients] == [0, 0]


@asynchronous
async def test_a_fleet_is_full_when_all_of_it_is():
    async with AsyncExitStack() as stack:
        fleet, clients, engines = await open_fleet(stack, max_queued=1)  # and 8 run
        for engine in engines:
            engine.hold = True
        for i in range(17):
            fleet.refuse_if_full()
            fleet.submit(generate(str(i)))
        clients[0].refuse_if_full() if len(clients[0].streams) == 8 else clients[1].refuse_if_full()
        fleet.submit(generate("last"))
        with pytest.raises(RequestError, match="queue is full"):
            fleet.refuse_if_full()
        clients[0].engine_lost("it died")
        with pytest.raises(RequestError, match="queue is full"):
            fleet.refuse_if_full()
        clients[1].engine_lost("it died too")
        fleet.refuse_if_full()  # there are other words for that


@pytest.mark.parametrize(
    ("flags", "taken"),
    [
        ((), [2, 2]),
        (("--load-balance-method", "total_requests"), [2, 2]),
        (("--load-balance-method", "total_tokens"), [1, 3]),
    ],
)
def test_the_method_decides_which_engine_takes_a_request(flags, taken):
    route = ROUTES.load(config_of("--dp-size", "2", *flags).parallel.load_balance)

    async def scenario():
        async with AsyncExitStack() as stack:
            fleet, clients, engines = await open_fleet(stack, route=route)
            for engine in engines:
                engine.hold = True
            for i, length in enumerate((90, 4, 4, 4)):
                fleet.submit(generate(str(i), length))
            assert [len(client.streams) for client in clients] == taken

    asynchronous(scenario)()


@pytest.mark.parametrize("follows", [True, False])
def test_a_bootstrap_room_selects_the_engine_where_the_method_says_so(follows):
    async def scenario():
        async with AsyncExitStack() as stack:
            _, clients, engines = await open_fleet(stack)
            fleet = DataParallelClient(clients, least, follows_room=follows)
            for engine in engines:
                engine.hold = True
            for i in range(4):
                fleet.submit(replace(generate(str(i)), transfer_id=bytes(16)))
            taken = [len(client.streams) for client in clients]
            assert (sorted(taken) == [0, 4]) == follows

    asynchronous(scenario)()


@asynchronous
async def test_an_id_is_taken_once_whichever_engine_has_it():
    async with AsyncExitStack() as stack:
        fleet, _, engines = await open_fleet(stack)
        for engine in engines:
            engine.hold = True
        fleet.submit(generate("same"))
        with pytest.raises(RequestError, match="Duplicate request ID detected: same"):
            fleet.submit(generate("same"))


@asynchronous
async def test_a_death_ends_the_requests_of_one_engine_and_the_others_take_over():
    async with AsyncExitStack() as stack:
        fleet, clients, engines = await open_fleet(stack)
        for engine in engines:
            engine.hold = True
        first, second = fleet.submit(generate("a")), fleet.submit(generate("b"))
        clients[0].engine_lost("killed")
        lost = (await events_of(first))[-1]
        assert isinstance(lost, Failed) and lost.status == 503
        assert fleet.health().progressing
        engines[1].hold = False
        later = [await events_of(fleet.submit(generate(f"c{i}"))) for i in range(3)]
        assert all(isinstance(events[-1], Finished) for events in later)
        second.close()
        clients[1].engine_lost("killed too")
        assert not fleet.health().alive
        assert await fleet.lost() in ("killed", "killed too")
        with pytest.raises(RequestError, match="killed"):
            fleet.submit(generate("d"))


@asynchronous
async def test_an_engine_that_is_stuck_gets_no_requests_until_it_goes_on():
    async with AsyncExitStack() as stack:
        fleet, clients, engines = await open_fleet(stack)
        engines[0].say(Stats(step_age_s=1000.0))
        await until(lambda: not clients[0].health().progressing)
        assert fleet.health().progressing
        for number in range(3):
            await events_of(fleet.submit(generate(f"a{number}")))
        assert engines[0].received == [] and len(engines[1].received) == 3
        engines[0].say(Stats())
        await until(lambda: clients[0].health().progressing)
        for number in range(3):
            await events_of(fleet.submit(generate(f"b{number}")))
        assert engines[0].received


@asynchronous
async def test_counters_are_sums_and_a_verb_reaches_every_engine():
    async with AsyncExitStack() as stack:
        fleet, clients, engines = await open_fleet(stack, 3)
        for number, engine in enumerate(engines):
            engine.say(Stats(running=number, step_age_s=number / 2, silent_rank=2, silent_s=number))
        await until(lambda: fleet.stats.running == 3)
        assert (fleet.stats.silent_rank, fleet.stats.silent_s) == (2, 2.0)
        assert fleet.stats.step_age_s == 1.0
        assert [(r.rank, r.alive, r.stats.running) for r in fleet.replicas()] == [
            (0, True, 0),
            (1, True, 1),
            (2, True, 2),
        ]
        assert (await fleet.control("flush_cache")).ok
        assert [[m.verb for m in e.received] for e in engines] == [["flush_cache"]] * 3


@asynchronous
async def test_each_engine_is_asked_by_itself():
    async with AsyncExitStack() as stack:
        fleet, clients, _ = await open_fleet(stack)
        assert [(n, reply.text) for n, reply in await fleet.ask("stats")] == [
            (0, "stats"),
            (1, "stats"),
        ]
        clients[0].engine_lost("gone")
        assert [number for number, _ in await fleet.ask("stats")] == [1]
