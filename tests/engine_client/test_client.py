"""Every stream ends exactly once, ids are never shared, and health tells what is wrong."""

import asyncio
import random

import pytest
from msgspec import structs

from banyan.base.clock import VirtualClock
from banyan.base.errors import BanyanError, RequestError
from banyan.base.ids import RequestId
from banyan.messages.events import Failed, Fatal, Finished, Stats, Tokens
from banyan.messages.requests import Abort, StopAt
from banyan.messages.spans import CONTENT_UNKNOWN, Content, ContentKind
from tests.support.clients import asynchronous, counting, events_of, generate
from tests.support.fake_engine import serving, until


@asynchronous
async def test_a_stream_brings_all_tokens_in_order_and_one_end():
    async with serving(counting) as (client, _):
        events = await events_of(client.submit(generate()))
        tokens = b"".join(e.tokens for e in events if isinstance(e, Tokens))
        assert tokens == b"".join(i.to_bytes(4, "little") for i in range(1, 9))
        assert [type(e) for e in events].count(Finished) == 1
        assert isinstance(events[-1], Finished) and len(client.streams) == 0


@asynchronous
async def test_what_comes_is_announced_in_the_call_that_brings_it_and_taken_without_waiting():
    async with serving(counting) as (client, engine):
        engine.hold = True
        stream = client.submit(generate())
        reported = []
        stream.on_more(lambda: reported.append(stream.take()))
        assert stream.take() is None and not stream.is_over
        engine.say(Tokens(RequestId("r"), 0, b"\1\0\0\0"), Tokens(RequestId("r"), 1, b"\2\0\0\0"))
        await until(lambda: reported)
        assert [event.first for event in reported] == [0, 1]
        stream.close()
        assert stream.take() is None and stream.is_over and reported[2:] == [None]


@asynchronous
async def test_two_live_requests_may_not_share_an_id():
    async with serving(counting) as (client, engine):
        engine.hold = True
        client.submit(generate("same"))
        with pytest.raises(RequestError, match="Duplicate request ID detected: same") as caught:
            client.submit(generate("same"))
        assert caught.value.status == 400


@asynchronous
async def test_an_id_is_free_again_once_its_abort_is_confirmed():
    async with serving(counting) as (client, engine):
        engine.hold = True
        client.submit(generate("same")).close()
        with pytest.raises(RequestError):
            client.submit(generate("same"))
        await until(lambda: len(client.streams) == 0)
        engine.hold = False
        events = await events_of(client.submit(generate("same")))
        assert events[-1].reason == "length" and len(events[-1:]) == 1


@pytest.mark.parametrize(
    "unsendable",
    [{"priority": 2**64}, {"score_top": -(2**63) - 1}, {"grammar": "\ud800"}],
    ids=["too large", "too small", "no Unicode"],
)
@asynchronous
async def test_a_request_that_no_frame_can_hold_is_refused_alone(unsendable):
    async with serving(counting) as (client, engine):
        engine.hold = True
        other = client.submit(generate("other"))
        with pytest.raises(RequestError, match="cannot be sent") as caught:
            client.submit(structs.replace(generate("bad"), **unsendable))
        assert caught.value.status == 400 and len(client.streams) == 1
        with pytest.raises(RequestError, match="cannot be sent"):
            await client.control("stats", number=2**64)
        engine.hold = False
        assert (await events_of(other))[-1].reason == "length" and client.health().alive
        assert [m.request for m in engine.received] == ["other"]


@asynchronous
async def test_more_requests_than_may_be_open_are_refused_with_429():
    async with serving(counting, max_open=2) as (client, engine):
        engine.hold = True
        first = client.submit(generate("a"))
        client.submit(generate("b"))
        with pytest.raises(RequestError, match="at most 2") as caught:
            client.submit(generate("c"))
        assert caught.value.status == 429
        first.close()
        await until(lambda: len(client.streams) == 1)
        client.submit(generate("c"))


@asynchronous
async def test_a_queue_that_is_full_is_known_before_the_engine_is_asked():
    async with serving(counting, max_queued=2) as (client, engine):  # and 8 run
        engine.hold = True
        open_ = [client.submit(generate(f"r{i}")) for i in range(10)]
        for ask in (client.refuse_if_full, lambda: client.submit(generate("more"))):
            with pytest.raises(RequestError, match="queue is full") as caught:
                ask()
            assert (caught.value.status, caught.value.code) == (503, "queue_full")
        open_[3].close()  # what is sent to the engine from here on comes after that
        client.submit(generate("next"))
        with pytest.raises(RequestError, match="queue is full"):
            client.submit(generate("more"))
        await until(lambda: len(engine.received) == 12)
        assert "more" not in [message.request for message in engine.received]
        engine.hold = False
        await events_of(open_[0])
        client.refuse_if_full()


@asynchronous
async def test_what_may_wait_for_its_constraint_fills_no_queue():
    async with serving(counting, max_queued=2) as (client, engine):
        engine.hold = True
        for i in range(20):
            client.submit(structs.replace(generate(f"c{i}"), grammar="root ::= 'a'"))
        for i in range(10):
            client.submit(generate(f"r{i}"))
        with pytest.raises(RequestError, match="queue is full"):
            client.refuse_if_full()


@asynchronous
async def test_a_request_larger_than_a_frame_is_refused(monkeypatch):
    monkeypatch.setattr("banyan.messages.frames.MAX_FRAME_BYTES", 1000)
    large = Content(bytes(32), ContentKind.FEATURES, bytes(1000), (1, 1, 1), 1)
    async with serving(counting) as (client, _):
        with pytest.raises(RequestError, match="1000 are legal"):
            client.submit(structs.replace(generate(), contents=(large,)))


@asynchronous
async def test_the_data_of_a_content_is_sent_once_and_again_if_the_engine_has_dropped_it():
    content = Content(bytes(32), ContentKind.PATCHES, b"data", (1, 1, 1), 1)
    async with serving(counting) as (client, engine):
        engine.hold = True
        for name in ("first", "second"):
            client.submit(structs.replace(generate(name), contents=(content,)))
        await until(lambda: len(engine.received) == 2)
        assert [m.contents[0].data for m in engine.received] == [b"data", b""]

        engine.say(Failed(RequestId("second"), 409, "dropped", CONTENT_UNKNOWN))

        await until(lambda: len(engine.received) == 3)
        assert engine.received[2].contents == (content,) and len(client.streams) == 2


@asynchronous
async def test_closing_a_stream_early_aborts_its_request():
    async with serving(counting) as (client, engine):
        engine.hold = True
        stream = client.submit(generate())
        await stream.aclose()
        await until(lambda: Abort(RequestId("r")) in engine.received)
        assert await events_of(stream) == []


@asynchronous
async def test_closing_a_stream_after_its_end_aborts_nothing():
    async with serving(counting) as (client, engine):
        stream = client.submit(generate())
        await events_of(stream)
        stream.close()
        assert (await client.control("stats")).ok
        assert not any(isinstance(m, Abort) for m in engine.received)


@asynchronous
async def test_aborting_an_unknown_request_sends_nothing():
    async with serving(counting) as (client, engine):
        client.abort(RequestId("nobody"))
        client.stop_at(RequestId("nobody"), 3)
        assert (await client.control("stats")).ok
        assert not any(isinstance(m, Abort | StopAt) for m in engine.received)


@asynchronous
async def test_an_abort_from_elsewhere_ends_the_stream_with_finished_abort():
    async with serving(counting) as (client, engine):
        engine.hold = True
        stream = client.submit(generate())
        client.abort(RequestId("r"))
        assert [e.reason for e in await events_of(stream)] == ["abort"]


@asynchronous
async def test_the_engines_death_gives_every_open_stream_one_503_and_refuses_the_next():
    async with serving(counting) as (client, engine):
        engine.hold = True
        streams = [client.submit(generate(f"r{i}")) for i in range(5)]
        client.engine_lost("killed by signal 9")
        client.engine_lost("again")
        for stream in streams:
            events = await events_of(stream)
            assert [(type(e), e.status, e.text) for e in events] == [
                (Failed, 503, "killed by signal 9")
            ]
        with pytest.raises(RequestError, match="killed by signal 9") as caught:
            client.submit(generate("next"))
        assert caught.value.status == 503 and len(client.streams) == 0
        assert not client.health().alive


@asynchronous
async def test_the_engines_last_word_ends_streams_and_calls():
    async with serving(counting) as (client, engine):
        engine.hold, engine.replies = True, False
        stream = client.submit(generate())
        call = asyncio.create_task(client.control("flush_cache"))
        await until(lambda: len(engine.received) == 2)
        engine.say(Fatal("out of memory"))
        assert [e.status for e in await events_of(stream)] == [503]
        with pytest.raises(RequestError, match="out of memory"):
            await call


@asynchronous
async def test_a_request_that_finished_before_the_engine_died_keeps_its_end():
    async with serving(counting) as (client, _):
        stream = client.submit(generate())
        await until(lambda: len(client.streams) == 0)
        client.engine_lost("gone")
        events = await events_of(stream)
        assert isinstance(events[-1], Finished)
        assert not any(isinstance(e, Failed) for e in events)


@asynchronous
async def test_a_reader_who_does_not_read_is_cut_off_at_a_bound():
    async with serving(counting, max_waiting_events=10) as (client, engine):
        engine.hold = True
        stream = client.submit(generate())
        for i in range(50):
            engine.say(Tokens(RequestId("r"), i, b"\1\0\0\0"))
        await until(lambda: len(client.streams) == 0)
        assert Abort(RequestId("r")) in engine.received
        events = await events_of(stream)
        assert len(events) == 11 and events[-1].code == "slow_reader"


@asynchronous
async def test_a_control_call_is_answered_by_its_own_reply():
    async with serving(counting) as (client, _):
        replies = await asyncio.gather(*(client.control(f"verb{i}") for i in range(20)))
        assert [r.text for r in replies] == [f"verb{i}" for i in range(20)]


@asynchronous
async def test_a_control_call_without_answer_ends_in_504_and_leaves_nothing():
    async with serving(counting) as (client, engine):
        engine.replies = False
        with pytest.raises(RequestError, match="'slow' within 0.01 s") as caught:
            await client.control("slow", timeout_s=0.01)
        assert caught.value.status == 504 and client._calls == {}


@asynchronous
async def test_before_ready_requests_are_refused_with_503():
    async with serving(counting, ready=False) as (client, _):
        with pytest.raises(RequestError) as caught:
            client.submit(generate())
        assert caught.value.status == 503
        health = client.health()
        assert health.alive and not health.ready


@asynchronous
async def test_waiting_for_ready_ends_with_the_reason_when_the_engine_dies_first():
    async with serving(counting, ready=False) as (client, engine):
        engine.say(Fatal("no such file", exit_code=3))
        with pytest.raises(BanyanError, match="no such file") as caught:
            await client.ready()
        assert caught.value.exit_code == 3


@asynchronous
async def test_health_follows_heartbeats_and_the_age_of_the_step():
    clock = VirtualClock(100.0)
    async with serving(counting, clock=clock, heartbeat_timeout_s=5, watchdog_s=60) as (c, engine):
        assert c.health().progressing
        clock.advance_to(104.0)
        engine.say(Stats(steps=1))
        await until(lambda: c.stats.steps == 1)
        assert c.stats_at_s == 104.0
        clock.advance_to(108.9)
        assert c.health().progressing
        clock.advance_to(110.0)
        assert c.health().alive and not c.health().progressing
        assert c.health().reason == "No heartbeat for 6.0 s."
        engine.say(Stats(steps=2, step_age_s=61.0))
        await until(lambda: c.stats.steps == 2)
        assert c.health().reason == "A step has been running for 61.0 s."
        engine.say(Stats(steps=3, step_age_s=0.1))
        await until(lambda: c.stats.steps == 3)
        assert c.health() == type(c.health())(True, True, True)


@asynchronous
async def test_a_stuck_engine_s_streams_end_with_one_503_and_their_requests_are_aborted():
    clock = VirtualClock(100.0)
    async with serving(counting, clock=clock, heartbeat_timeout_s=0.05) as (client, engine):
        engine.hold = True
        stream = client.submit(generate())
        await until(lambda: engine.received)
        clock.advance_to(101.0)
        events = await events_of(stream)
        assert [(e.status, e.code) for e in events] == [(503, "engine_stuck")]
        assert "No heartbeat for 1.0 s" in events[0].text
        await until(lambda: len(client.streams) == 0)
        assert engine.received.count(Abort(RequestId("r"))) == 1
        engine.hold = False
        engine.say(Stats())
        await until(lambda: client.health().progressing)
        assert isinstance((await events_of(client.submit(generate())))[-1], Finished)


class _ClockThatFailsOnce(VirtualClock):
    to_fail = 0

    def now(self):
        self.to_fail -= 1
        if self.to_fail == 0:
            raise OSError("no clock")
        return super().now()


@asynchronous
async def test_a_failed_health_check_is_logged_and_repeated(caplog):
    clock = _ClockThatFailsOnce(100.0)
    async with serving(counting, clock=clock, heartbeat_timeout_s=0.05) as (client, engine):
        engine.hold = True
        stream = client.submit(generate())
        await until(lambda: engine.received)
        clock.to_fail = 1
        await until(lambda: "a health check of the engine failed" in caplog.text)
        clock.advance_to(101.0)
        assert [e.code for e in await events_of(stream)] == ["engine_stuck"]


@asynchronous
async def test_the_id_of_a_stuck_request_stays_taken_until_the_engine_lets_go():
    clock = VirtualClock(100.0)
    async with serving(counting, clock=clock, heartbeat_timeout_s=0.05) as (client, engine):
        engine.hold = True
        engine.receive = lambda message: None
        stream = client.submit(generate())
        clock.advance_to(101.0)
        assert len(await events_of(stream)) == 1
        with pytest.raises(RequestError, match="Duplicate request ID"):
            client.submit(generate())
        engine.say(Finished(RequestId("r"), "abort", 1, 0, 0))
        await until(lambda: len(client.streams) == 0)


@asynchronous
async def test_a_silent_rank_is_named():
    async with serving(counting, heartbeat_timeout_s=5) as (client, engine):
        engine.say(Stats(steps=1, silent_rank=3, silent_s=5.5))
        await until(lambda: client.stats.steps == 1)
        health = client.health()
        assert not health.progressing and health.reason == "Rank 3 has not run for 5.5 s."


@asynchronous
async def test_a_link_that_fails_counts_as_the_engines_death():
    async with serving(counting) as (client, engine):
        engine.hold = True
        stream = client.submit(generate())

        def broken(messages):
            raise OSError("no buffer space")

        client._connection.link.send = broken
        client.abort(RequestId("r"))
        assert "no buffer space" in (await events_of(stream))[-1].text


@asynchronous
async def test_five_hundred_random_aborts_leave_no_task_and_no_entry():
    rng = random.Random(7)
    async with serving(counting, seed=7) as (client, engine):
        tasks_before = len(asyncio.all_tasks())

        async def one(i):
            stream = client.submit(generate(f"r{i}", max_new_tokens=rng.randint(1, 30)))
            for _ in range(rng.randint(0, 6)):
                if await anext(stream, None) is None:
                    break
            if rng.random() < 0.3:
                client.abort(stream.request)
                await events_of(stream)
            stream.close()

        await asyncio.gather(*(one(i) for i in range(500)))
        await until(lambda: len(client.streams) == 0)
        assert engine.live == {} and client._calls == {} and client._connection._outbox == []
        assert len(asyncio.all_tasks()) == tasks_before
