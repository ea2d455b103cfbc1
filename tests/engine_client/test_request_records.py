"""What is kept of requests that have ended: lines of times, records in files, and dumps."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

from banyan.base.clock import VirtualClock
from banyan.base.errors import ConfigError
from banyan.config.schema import ObserveConfig
from banyan.engine_client.metrics_observer import RequestOutcome
from banyan.engine_client.request_log import (
    KEPT_S,
    Recent,
    RecordFiles,
    metrics_observers_of,
    times,
)
from banyan.engine_client.text_generator import open_generator
from banyan.requests.generation import Usage, collect
from tests.support.clients import asynchronous
from tests.support.fake_engine import ids_of, serving
from tests.support.flags import config_of
from tests.support.text_requests import LIMITS, TOKENIZER, request

ASKED = replace(request("secret"), route="chat")
DONE = RequestOutcome(ASKED, Usage(6, 5, cached_tokens=2, queue_s=0.25), "stop", 2.0, first_s=0.75)


def answered(observe: ObserveConfig) -> None:
    async def scenario():
        async with serving(lambda message: ids_of("word") + [0]) as (client, _):
            await collect(open_generator(client, TOKENIZER, LIMITS, observe), [ASKED])

    asynchronous(scenario)()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_tells_where_the_time_of_a_request_went(caplog, form):
    caplog.set_level(logging.INFO, logger="banyan")
    flags = ("--enable-request-time-stats-logging", "--log-requests", "--log-requests-format", form)
    answered(config_of(*flags).observe)
    (line,) = [m for m in caplog.messages if "request times" in m]
    names = ("queue_s", "prefill_s", "decode_s", "seconds")
    if form == "text":
        assert re.fullmatch(
            "request times id=r " + " ".join(rf"{n}=[0-9.e-]+" for n in names), line
        )
    else:
        assert all(json.loads(line)[name] >= 0 for name in names)


def test_the_parts_of_a_request_s_time_are_its_whole():
    parts = times(DONE)
    assert parts == {"queue_s": 0.25, "prefill_s": 0.5, "decode_s": 1.25, "seconds": 2.0}
    refused = times(RequestOutcome(ASKED, None, "queue_full", 0.125))
    assert refused == {"queue_s": 0.0, "prefill_s": None, "decode_s": None, "seconds": 0.125}


def test_each_request_leaves_a_record_in_the_folder(tmp_path):
    folder = tmp_path / "new" / "records"
    flags = ("--export-metrics-to-file", "--export-metrics-to-file-dir", str(folder))
    observe = config_of(*flags).observe
    metrics_observers_of(observe)
    assert not folder.exists(), "whoever only looks at the flags makes nothing"
    answered(observe)
    answered(observe)
    lines = [line for path in folder.iterdir() for line in path.read_text().splitlines()]
    assert len(lines) == 2
    found = json.loads(lines[0])
    assert (found["id"], found["route"], found["reason"]) == ("r", "chat", "stop")
    assert (found["prompt_tokens"], found["completion_tokens"]) == (6, 5)
    assert found["sampling_params"]["max_new_tokens"] == 100
    assert "secret" not in lines[0] and str(ids_of("secret")) not in lines[0]


def test_a_folder_for_records_must_be_named_and_usable(tmp_path):
    with pytest.raises(ConfigError, match="Give --export-metrics-to-file-dir"):
        metrics_observers_of(config_of("--export-metrics-to-file").observe)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--export-metrics-to-file-dir"):
        RecordFiles(tmp_path / "file")


def test_records_that_cannot_be_written_are_reported_once_and_hold_up_nobody(tmp_path, caplog):
    files = RecordFiles(tmp_path / "records")
    (tmp_path / "records").write_text("")
    files.ended(DONE)
    files.ended(DONE)
    assert [m for m in caplog.messages if "records of requests are lost" in m].__len__() == 1


def test_a_dump_holds_the_last_minutes_with_their_prompts(tmp_path):
    clock = VirtualClock()
    recent = Recent(tmp_path / "dumps", clock)
    recent.ended(replace(DONE, request=ASKED.with_message(request="old")))
    clock.advance_to(KEPT_S - 10)
    recent.ended(DONE)
    clock.advance_to(KEPT_S + 1)
    path = recent.dump("the engine was killed")
    head, *found = map(json.loads, path.read_text().splitlines())
    assert head["why"] == "the engine was killed"
    assert [(one["id"], one["prompt_ids"]) for one in found] == [("r", ids_of("secret"))]
    assert found[0]["ended_s_ago"] == 11.0
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_kept_for_a_dump_is_bounded(tmp_path):
    recent = Recent(tmp_path, VirtualClock(), kept_tokens=1000)
    long = replace(DONE, request=replace(ASKED, prompt=[5] * 300))
    for _ in range(10):
        recent.ended(long)
    assert len(recent.dump("full").read_text().splitlines()) == 1 + 1000 // 364


def test_a_dump_that_cannot_be_written_is_reported(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert Recent(tmp_path / "file").dump("why") is None
    assert "no dump of the last requests" in caplog.text


def test_nothing_is_kept_unless_asked_for():
    observe = config_of().observe
    assert not (observe.times or observe.writes_records or observe.dumps)
    assert Path(observe.records) == Path()
