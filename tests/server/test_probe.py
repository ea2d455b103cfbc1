"""A probe that strangers may ask for costs no more than one at a time."""

import asyncio

import pytest

from banyan.base.clock import VirtualClock
from banyan.base.errors import RequestError
from banyan.server.state import PROBE_HOLDS_S, SharedProbe


def test_all_who_ask_at_a_time_share_one_question_and_its_answer():
    asked = []

    async def scenario():
        clock, gate = VirtualClock(), asyncio.Event()
        probe = SharedProbe(clock)

        async def question():
            asked.append(clock.now())
            await gate.wait()

        waiting = [asyncio.create_task(probe.ask(question)) for _ in range(32)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # the first to ask leaves; the others still wait
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting[1:])
        gate.set()
        await asyncio.gather(*waiting[1:])
        await probe.ask(question)
        assert asked == [0.0], "a good answer holds"
        clock.advance_to(PROBE_HOLDS_S)
        await probe.ask(question)

    asyncio.run(scenario())
    assert asked == [0.0, PROBE_HOLDS_S]


def test_a_bad_answer_is_reported_to_all_and_does_not_hold():
    asked = []

    async def scenario():
        probe = SharedProbe(VirtualClock())

        async def question():
            asked.append(1)
            raise RequestError("no token", status=503)

        for _ in range(2):
            reported = await asyncio.gather(
                *(probe.ask(question) for _ in range(3)), return_exceptions=True
            )
            assert [str(error) for error in reported] == ["no token"] * 3
        with pytest.raises(RequestError):
            await probe.ask(question)

    asyncio.run(scenario())
    assert len(asked) == 3
