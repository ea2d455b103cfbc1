"""Lines about exchanges, and about requests that are refused before they begin."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from banyan.engine_client.request_log import RequestLog
from banyan.server.http import app as access_log
from tests.server.fakes import Site, refusal, steps
from tests.support.flags import config_of

USER = [{"role": "user", "content": "Hi"}]
LINES = ("banyan.server.http.app", "banyan.engine_client.request_log")


@pytest.fixture
def lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    logging.getLogger(LINES[0]).setLevel(logging.NOTSET)
    for name in LINES:
        log = logging.getLogger(name)
        monkeypatch.setattr(log, "handlers", [caplog.handler])
        monkeypatch.setattr(log, "propagate", False)
    logging.getLogger(LINES[1]).setLevel(logging.INFO)
    return lambda: caplog.messages


def site_with(*flags: str) -> Site:
    return Site(config_of(*flags).server, observe=config_of(*flags).observe)


def test_each_request_leaves_a_line_when_asked_for(lines: Callable[[], list[str]]) -> None:
    for flags, expected in (((), 0), (("--log-level-http", "info"), 3)):
        with site_with(*flags).serving() as site:
            site.http.get("/livez")
            site.http.post("/generate", json={"text": "a"})
            site.http.get("/no%0Awhere?key=secret")
            site.call(int)
        logged = [line for line in lines() if line.startswith("http ")]
        assert len(logged) == expected
    assert re.fullmatch(
        r"http method=GET path=/livez status=200 seconds=\d+\.\d{3} peer=127\.0\.0\.1 id=\w{32}",
        logged[0],
    )
    assert "method=POST path=/generate status=200" in logged[1]
    assert "path=/no\\nwhere status=404" in logged[2] and "secret" not in logged[2]


def test_a_request_that_is_refused_leaves_one_line(lines: Callable[[], list[str]]) -> None:
    flags = ("--log-requests", "--log-requests-format", "json", "--api-key", "k")
    with site_with(*flags).serving() as site:
        key = {"authorization": "Bearer k"}
        site.http.post("/generate", json={"text": "a", "sampling_params": {"n": 0}}, headers=key)
        site.http.post("/generate", json={"text": "a"})
        site.http.get("/nowhere", headers=key)
        site.http.get("/livez")
        site.call(int)
    records = [json.loads(line) for line in lines()]
    assert {record["event"] for record in records} == {"request refused"}
    assert [(r["route"], r["status"]) for r in records] == [
        ("/generate", 400),
        ("/generate", 401),
        ("/nowhere", 404),
    ]
    assert records[0]["reason"] == "invalid_request" and records[2]["reason"] == "not_found"


def test_a_request_that_the_engine_fails_leaves_the_line_of_its_end_alone(
    lines: Callable[[], list[str]],
) -> None:
    site = site_with("--log-requests", "--log-requests-level", "0")
    service = site.service
    site.generator.script = lambda _: steps("a", finish=refusal(503))
    observe = site.state.config.observe
    site.state.service = replace(service, generator=RequestLog(site.generator, observe))
    with site.serving():
        assert site.http.post("/generate", json={"text": "a"}).status_code == 503
        site.call(int)
    [line] = lines()
    assert line.startswith("request ended ") and "reason=engine_error" in line


def test_the_first_refusal_of_each_kind_is_reported_unasked(lines: Callable[[], list[str]]) -> None:
    chat = "/v1/chat/completions"
    with site_with().serving() as site:
        for _ in range(3):
            assert site.http.get("/no%0Awhere").status_code == 404
            assert site.http.post(chat, json={"messages": []}).status_code == 400
            assert site.http.get("/v1/models/other").status_code == 404
            assert site.http.post(chat, json={"messages": USER}).status_code == 200
        site.http.post(chat, json={"messages": USER, "temperature": "secret"})
        site.call(int)
    logged = [re.sub(r"id=\w+ ", "", line.partition(" peer=")[0]) for line in lines()]
    assert logged == [
        'request refused route="/no\\\\nwhere" status=404 reason=not_found',
        f"request refused route={chat} status=400 reason=invalid_request field=messages",
        "request refused route=/v1/models/other status=404 reason=model_not_found field=model",
        f"request refused route={chat} status=400 reason=invalid_request field=temperature",
    ]
    assert all(line.endswith('told="the first of its kind"') for line in lines())
    assert "secret" not in "".join(lines())


def test_the_first_warning_of_each_kind_is_reported_unasked(lines: Callable[[], list[str]]) -> None:
    chat = "/v1/chat/completions"
    with site_with().serving() as site:
        for model in ("gpt-4", "gpt-5"):
            body = {"messages": USER, "model": model, "temprature": 0}
            assert site.http.post(chat, json=body).status_code == 200
        site.call(int)
    reported = ' told="the first of its kind"'
    assert lines() == [
        f'not honoured in full route={chat} what="temprature: unknown field, ignored"' + reported,
        f"not honoured in full route={chat} what=\"model: 'gpt-4' is not served; 'tiny' answers\""
        + reported,
    ]


def test_clients_that_make_up_kinds_do_not_fill_the_log(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "MAX_KINDS", 5)
    with site_with().serving() as site:
        for i in range(20):
            site.http.get(f"/no/{i}")
        site.call(int)
    assert len(lines()) == 6 and lines()[-1].startswith("too many kinds")


def test_what_health_answers_is_no_refusal(lines: Callable[[], list[str]]) -> None:
    with site_with().serving() as site:
        site.state.service = None
        assert site.http.get("/readyz").status_code == 503
        site.call(int)
    assert lines() == []
