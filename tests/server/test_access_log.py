"""Lines about exchanges, and about requests that are refused before they begin."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from banyan.frontend.request_log import RequestLog
from tests.flags import config_of
from tests.server.fakes import Site, refusal, steps

LINES = ("banyan.server.access_log", "banyan.frontend.request_log")


@pytest.fixture
def lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    logging.getLogger(LINES[0]).setLevel(logging.NOTSET)
    for name in LINES:
        told = logging.getLogger(name)
        monkeypatch.setattr(told, "handlers", [caplog.handler])
        monkeypatch.setattr(told, "propagate", False)
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
        assert len(lines()) == expected
    assert re.fullmatch(
        r"http method=GET path=/livez status=200 seconds=\d+\.\d{3} peer=127\.0\.0\.1 id=\w{32}",
        lines()[0],
    )
    assert "method=POST path=/generate status=200" in lines()[1]
    assert "path=/no\\nwhere status=404" in lines()[2] and "secret" not in lines()[2]


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


def test_nothing_is_told_of_refusals_unless_asked_for(lines: Callable[[], list[str]]) -> None:
    with site_with().serving() as site:
        assert site.http.get("/nowhere").status_code == 404
        site.call(int)
    assert lines() == []
