"""The system's clock is set by hours, forward and back, while requests run: nobody waits, ends or
is forgotten for it.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from banyan.config.schema import ServerConfig
from banyan.server.admin.spans import Spans
from tests.server.fakes import Site, steps
from tests.support.batches import answers, begin, ended, line

HOURS = (0.0, 5e5, -5e5, 1e9, -1e9)


@pytest.fixture(autouse=True)
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock finds it set anew."""
    jumps, real, real_ns = itertools.cycle(HOURS), time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + int(next(jumps)) * 10**9)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(ServerConfig(storage_path=str(tmp_path))).serving() as served:
        yield served
        served.call(served.state.storage.close)


def test_requests_with_deadlines_end_well_and_take_no_negative_time(site: Site) -> None:
    site.generator.script = lambda _: steps(*"abcdefgh")
    with httpx.Client(base_url=site.url, headers={"x-request-timeout": "60"}) as http:
        for _ in range(6):
            answer = http.post("/generate", json={"text": "a"})
            assert answer.json()["text"] == "abcdefgh"
            assert 0 <= answer.json()["meta_info"]["e2e_latency"] < 60
            stream = http.post("/generate", json={"text": "a", "stream": True})
            assert stream.text.endswith("data: [DONE]\n\n") and "error" not in stream.text


def test_what_is_kept_stays(site: Site) -> None:
    with httpx.Client(base_url=site.url) as http:
        made = [http.post("/v1/responses", json={"input": "a"}).json()["id"] for _ in range(6)]
        session = http.post("/open_session", json={"capacity_of_str_len": 1000, "timeout": 60})
        for name in made:
            assert http.get(f"/v1/responses/{name}").status_code == 200
        turn = {"text": "a", "session_params": {"id": session.json()}}
        for _ in range(3):
            assert http.post("/generate", json=turn).status_code == 200


def test_a_batch_is_done(site: Site) -> None:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as client:
        batch = ended(client, begin(client, [line(f"l{i}") for i in range(5)]))
        assert batch.status == "completed"
        assert len(answers(client, batch.output_file_id)) == 5


def test_no_span_ends_before_it_began(site: Site) -> None:
    exporter = InMemorySpanExporter()
    site.state.traces = spans = Spans(exporter, "banyan", "tiny", "1")
    watched = spans.watch(site.generator)
    site.service = site.state.service = replace(site.service, generator=watched)
    for _ in range(6):
        assert httpx.post(f"{site.url}/generate", json={"text": "a"}).status_code == 200
    spans.close()
    found = exporter.get_finished_spans()
    assert len(found) > 12
    for span in found:
        assert span.start_time is not None and span.end_time is not None
        assert 0 <= span.end_time - span.start_time < 60 * 10**9, span.name
