"""Every request that ends leaves one line, whatever ended it, and no word of its text."""

import json
import logging
from contextlib import aclosing
from dataclasses import replace

import pytest

from banyan.base.clock import VirtualClock
from banyan.base.errors import RequestError
from banyan.frontend.generation import collect
from banyan.frontend.request_log import RequestLog
from banyan.frontend.text_generator import TextGenerator, open_generator
from tests.flags import config_of
from tests.frontend.fake_engine import ids_of, serving
from tests.frontend.test_client import asynchronous
from tests.frontend.test_generation import LIMITS, TOKENIZER, request

ASKED = replace(request("secret"), route="chat")
COUNTS = "request ended id=r route=chat prompt_tokens=6 cached_tokens={} output_tokens={} "


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="banyan")
    return lambda: [m for m in caplog.messages if m.startswith("request ended")]


def logged(client):
    return RequestLog(TextGenerator(client, TOKENIZER, LIMITS), VirtualClock(5.0))


def test_an_answered_request_is_one_line_without_its_text(lines):
    async def scenario():
        async with serving(lambda message: ids_of("word") + [0]) as (client, _):
            await collect(logged(client), [ASKED])

    asynchronous(scenario)()
    assert lines() == [COUNTS.format(2, 5) + "reason=stop seconds=0.000"]


def test_a_failure_and_a_refusal_are_logged_by_their_code(lines):
    async def scenario():
        async with serving(lambda message: []) as (client, engine):
            engine.failure = (503, "The request queue is full.", "queue_full")
            with pytest.raises(RequestError):
                await collect(logged(client), [ASKED])
            with pytest.raises(RequestError):
                await collect(logged(client), [replace(ASKED, prompt=[-1] * 6)])

    asynchronous(scenario)()
    assert lines() == [
        COUNTS.format(0, 0) + "reason=queue_full seconds=0.000",
        COUNTS.format(0, 0) + f"reason={RequestError('').code} seconds=0.000",
    ]


def test_a_reader_who_leaves_closes_the_request(lines):
    async def scenario():
        async with (
            serving(lambda message: ids_of("word" * 20)) as (client, _),
            aclosing(logged(client).generate(ASKED)) as chunks,
        ):
            await anext(chunks)

    asynchronous(scenario)()
    [line] = lines()
    assert "reason=closed" in line


def test_nothing_is_logged_unless_asked_for(lines):
    async def scenario(*flags):
        observe = config_of(*flags).observe
        async with serving(lambda message: ids_of("word")) as (client, _):
            await collect(open_generator(client, TOKENIZER, LIMITS, observe), [ASKED])

    asynchronous(scenario)()
    assert lines() == []
    asynchronous(scenario)("--log-requests")
    assert len(lines()) == 1


def test_a_line_is_a_json_object_when_that_is_asked_for(caplog):
    caplog.set_level(logging.INFO, logger="banyan")
    observe = config_of("--log-requests", "--log-requests-format", "json").observe

    async def scenario():
        async with serving(lambda message: ids_of("word") + [0]) as (client, _):
            await collect(open_generator(client, TOKENIZER, LIMITS, observe), [ASKED])

    asynchronous(scenario)()
    facts = json.loads(caplog.messages[-1])
    assert facts.pop("seconds") >= 0
    assert facts == {
        "event": "request ended",
        "id": "r",
        "route": "chat",
        "prompt_tokens": 6,
        "cached_tokens": 2,
        "output_tokens": 5,
        "reason": "stop",
    }
