"""Every request that ends leaves one line, whatever ended it; a level says what the line tells."""

import json
import logging
from contextlib import aclosing
from dataclasses import replace

import pytest

from banyan.base.clock import VirtualClock
from banyan.base.errors import RequestError
from banyan.base.log import start_logging
from banyan.config.schema import ObserveConfig
from banyan.engine_client.request_log import BEGINNING, RequestLog
from banyan.engine_client.text_generator import TextGenerator, open_generator
from banyan.requests.generation import TextChunk, Usage, collect
from tests.support.clients import asynchronous
from tests.support.fake_engine import ids_of, serving
from tests.support.flags import config_of
from tests.support.scripted import scripted
from tests.support.text_requests import LIMITS, TOKENIZER, request

ASKED = replace(request("secret"), route="chat")
COUNTS = "request ended id=r route=chat prompt_tokens=6 cached_tokens={} output_tokens={} "


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="banyan")
    return lambda: [m for m in caplog.messages if m.startswith("request ended")]


def logged(client):
    observe = ObserveConfig(log_requests=True, log_detail=0)
    return RequestLog(TextGenerator(client, TOKENIZER, LIMITS), observe, None, VirtualClock(5.0))


def test_an_answered_request_is_one_line_without_its_text(lines):
    async def scenario():
        async with serving(lambda message: ids_of("word") + [0]) as (client, _):
            await collect(logged(client), [ASKED])

    asynchronous(scenario)()
    assert lines() == [COUNTS.format(2, 5) + "reason=stop seconds=0.0 ttft=0.0"]


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
        COUNTS.format(0, 0) + "reason=queue_full seconds=0.0",
        COUNTS.format(0, 0) + f"reason={RequestError('').code} seconds=0.0",
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


def ended(caplog, *flags):
    """The facts of one answered request under these flags."""
    caplog.clear()
    caplog.set_level(logging.INFO, logger="banyan")
    observe = config_of("--log-requests", "--log-requests-format", "json", *flags).observe

    async def scenario():
        async with serving(lambda message: ids_of("word") + [0]) as (client, _):
            await collect(open_generator(client, TOKENIZER, LIMITS, observe), [ASKED])

    asynchronous(scenario)()
    return json.loads(caplog.messages[-1])


def test_a_line_is_a_json_object_when_that_is_asked_for(caplog):
    facts = ended(caplog, "--log-requests-level", "0")
    assert facts.pop("time") and facts.pop("seconds") >= facts.pop("ttft") >= 0
    facts.pop("tokens_per_s")
    assert facts == {
        "event": "request ended",
        "id": "r",
        "route": "chat",
        "prompt_tokens": 6,
        "cached_tokens": 2,
        "output_tokens": 5,
        "reason": "stop",
    }


def test_a_json_line_has_nothing_before_it_and_others_have_time_and_role(capsys):
    start_logging("server")
    try:
        for form in ("text", "json"):
            observe = ObserveConfig(log_requests=True, log_detail=0, log_format=form)

            async def scenario(observe=observe):
                async with serving(lambda message: ids_of("word") + [0]) as (client, _):
                    await collect(open_generator(client, TOKENIZER, LIMITS, observe), [ASKED])

            asynchronous(scenario)()
        text, record = capsys.readouterr().err.splitlines()
    finally:
        root = logging.getLogger("banyan")
        root.handlers.clear()
        root.propagate = True
    assert " server] request ended id=r " in text
    assert json.loads(record)["id"] == "r"


def test_a_level_decides_what_a_line_tells(caplog):
    reported = [ended(caplog, "--log-requests-level", level) for level in "0123"]
    more = [facts.keys() - reported[0].keys() for facts in reported]
    texts = {"sampling", "prompt", "output"}
    assert more == [set(), {"sampling"}, texts, texts]
    assert all(facts["sampling"]["max_new_tokens"] == 100 for facts in reported[1:])
    assert all((f["prompt"], f["output"]) == ("secret", "word") for f in reported[2:])
    assert ended(caplog).keys() == reported[2].keys()


class Long:
    """Answers with much text, a second a chunk."""

    def __init__(self, clock):
        self._clock = clock

    @scripted
    async def generate(self, request):
        for number in range(1, 5):
            self._clock.advance_to(self._clock.now() + 1)
            yield TextChunk("x" * BEGINNING, [1] * 10, Usage(len(request.prompt), 10 * number))


@pytest.mark.parametrize("level", [2, 3])
def test_texts_are_cut_unless_all_is_asked_for(lines, level):
    clock = VirtualClock()
    observe = ObserveConfig(log_requests=True, log_detail=level)
    text_of = "p".__mul__

    async def scenario():
        log = RequestLog(Long(clock), observe, lambda ids: text_of(len(ids)), clock)
        async with aclosing(log.generate(replace(ASKED, prompt=[1] * 5000))) as chunks:
            assert len([chunk async for chunk in chunks]) == 4

    asynchronous(scenario)()
    [line] = lines()
    assert line.count("x") == {2: BEGINNING, 3: 4 * BEGINNING}[level] + line.count("max_")
    assert line.count("p" * 5000) == (level == 3)
    assert " seconds=4.0 ttft=1.0 tokens_per_s=10.0 " in line


def test_what_a_client_sent_cannot_break_the_line(lines):
    observe = ObserveConfig(log_requests=True, log_detail=2)
    text_of = "\n[2026 server] forged reason=stop \x1b[31m".__add__

    async def scenario():
        async with serving(lambda message: ids_of("word") + [0]) as (client, _):
            inner = TextGenerator(client, TOKENIZER, LIMITS)
            await collect(RequestLog(inner, observe, lambda ids: text_of("")), [ASKED])

    asynchronous(scenario)()
    [line] = lines()
    assert line.isprintable() and "\\n[2026 server] forged" in line
