"""Traces of a real server, as a collector in a process of its own gets them."""

import json
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from banyan.base.errors import ConfigError
from banyan.server.admin.traces import Endpoint, check_traces, endpoint_of, open_traces
from tests.support.flags import config_of
from tests.system.conftest import StartServer
from tests.system.serving import ROOT

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = {"prompt": list(range(5, 45)), "max_tokens": 6, "ignore_eos": True, "temperature": 0}


class Collector:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        assert process.stdout is not None
        self.port = int(process.stdout.readline())
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, lines: Iterator[str]) -> None:
        for line in lines:
            self._lines.put(line)

    def spans(self, count: int) -> list[dict]:
        """The next spans; fails when they do not come."""
        return [json.loads(self._lines.get(timeout=60)) for _ in range(count)]

    def is_empty(self) -> bool:
        return self._lines.empty()


@pytest.fixture
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    """Takes HTTP, or what a test asks for."""
    command = [sys.executable, "-m", "tests.system.collector", *getattr(request, "param", ())]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Collector(process)
        finally:
            process.kill()


def traced(*words: str) -> tuple[str, ...]:
    """The flags of a server, as config_of takes them and gives them to it."""
    observe = config_of(*words).observe
    flags = ("--enable-trace",) if observe.traces else ()
    return (
        *flags,
        *("--otlp-traces-endpoint", observe.traces_endpoint),
        *("--otlp-service-name", observe.traces_service),
    )


@pytest.fixture(autouse=True)
def quick_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def test_a_request_is_a_trace_with_its_phases(server: StartServer, collector: Collector) -> None:
    address = f"http://127.0.0.1:{collector.port}"
    service = ("--otlp-service-name", "answers")
    flags = traced("--enable-trace", "--otlp-traces-endpoint", address, *service)
    assert flags == traced("--enable-trace", "--oltp-traces-endpoint", address, *service)
    with server(*flags) as it:
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "a=b"}
        answer = it.http.post("/v1/completions", json=PROMPT, headers=headers)
        assert answer.status_code == 200
        assert it.http.get("/v1/models").status_code == 200  # only looks: has no span
        spans = {span["name"]: span for span in collector.spans(5)}
    root, whole = spans.pop("POST /v1/completions"), spans.pop("generate")
    assert root["path"] == "/v1/traces" and root["resource"]["service.name"] == "answers"
    assert root["trace"] == TRACE and root["parent"] == CALLER
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{root['id']}-01"
    assert root["attributes"]["http.response.status_code"] == 200
    assert whole["parent"] == root["id"] and whole["trace"] == TRACE
    reported = whole["attributes"]
    assert (
        reported["gen_ai.usage.input_tokens"] == 40 and reported["gen_ai.usage.output_tokens"] == 6
    )
    assert reported["gen_ai.response.finish_reasons"] == ["length"]
    assert list(sorted(spans)) == ["decode", "prefill", "queue"]
    assert {span["parent"] for span in spans.values()} == {whole["id"]}
    moments = [(spans[name]["begin_ns"], spans[name]["end_ns"]) for name in PHASES]
    assert root["begin_ns"] <= whole["begin_ns"] == moments[0][0]
    assert moments[0][1] == moments[1][0] <= moments[1][1] == moments[2][0] < moments[2][1]
    assert moments[2][1] == whole["end_ns"] <= root["end_ns"]


PHASES = ("queue", "prefill", "decode")


@pytest.mark.parametrize("collector", [("grpc",)], indirect=True)
def test_spans_go_over_grpc_to_an_address_without_a_scheme(
    server: StartServer, collector: Collector
) -> None:
    address = f"127.0.0.1:{collector.port}"
    with server(*traced("--enable-trace", "--otlp-traces-endpoint", address)) as it:
        assert it.http.post("/v1/completions", json=PROMPT).status_code == 200
        spans = collector.spans(5)
    assert {span["path"] for span in spans} == {"grpc"}
    assert {"POST /v1/completions", "generate", *PHASES} == {span["name"] for span in spans}


def test_what_is_refused_or_left_is_reported_as_that_and_no_text_is(
    server: StartServer, collector: Collector
) -> None:
    address = f"http://127.0.0.1:{collector.port}/v1/traces"
    with server(*traced("--enable-trace", "--otlp-traces-endpoint", address)) as it:
        refused = it.http.post("/v1/completions", json={**PROMPT, "max_tokens": -1})
        assert refused.status_code == 400
        (span,) = collector.spans(1)
        assert span["attributes"]["http.response.status_code"] == 400 and not span["is_error"]
        assert span["attributes"]["error.type"] and not span["parent"]
        body = {**PROMPT, "max_tokens": 1900, "stream": True, "n": 2}
        with it.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        spans = collector.spans(7)
        assert sorted(span["name"] for span in spans if span["name"] in PHASES) == [
            *("decode", "decode"),
            *("prefill", "prefill"),
        ]
        ends = [span for span in spans if span["name"] == "generate"]
        assert [e["attributes"]["gen_ai.response.finish_reasons"] for e in ends] == [["closed"]] * 2
        assert not re.search("prompt\\W|w5", json.dumps(spans))
        it.signal(signal.SIGTERM)
        assert it.exit_code(60) == 0


def test_the_sampler_of_the_environment_decides(
    server: StartServer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    address = f"http://127.0.0.1:{collector.port}"
    with server(*traced("--enable-trace", "--otlp-traces-endpoint", address)) as it:
        answer = it.http.post("/v1/completions", json=PROMPT)
        assert not int(answer.headers["traceresponse"][-2:], 16) & 1
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        assert it.http.post("/v1/completions", json=PROMPT, headers=headers).status_code == 200
        assert {span["trace"] for span in collector.spans(5)} == {TRACE}
        assert collector.is_empty()


def test_a_collector_that_is_gone_holds_up_nothing(server: StartServer) -> None:
    with server(*traced("--enable-trace", "--otlp-traces-endpoint", "http://127.0.0.1:9")) as it:
        assert it.http.post("/v1/completions", json=PROMPT).status_code == 200
        it.signal(signal.SIGTERM)
        assert it.exit_code(60) == 0


def test_a_server_without_traces_loads_no_library_for_them() -> None:
    assert open_traces(config_of().observe, "m", "0") is None
    code = (
        "import sys, banyan.server.lifecycle.serve; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "given", ["grpc://x", "grpc://x:1/y", "ftp://x:1", "http://", "http://[x", "x"]
)
def test_an_endpoint_that_spans_cannot_be_sent_to_is_refused(given: str) -> None:
    observe = config_of("--enable-trace", "--otlp-traces-endpoint", given).observe
    with pytest.raises(ConfigError, match="no address that spans can be sent to"):
        check_traces(observe)


def test_an_endpoint_says_how_spans_are_sent() -> None:
    usual = Endpoint("http", "http://h:4318/v1/traces")
    assert endpoint_of("http://h:4318") == endpoint_of("http://h:4318/") == usual
    assert endpoint_of("https://h/otlp/in") == Endpoint("http", "https://h/otlp/in")
    assert endpoint_of("h:4317") == endpoint_of("grpc://h:4317") == Endpoint("grpc", "h:4317")
    assert endpoint_of("grpcs://h:4317") == Endpoint("grpc", "h:4317", is_secure=True)


@pytest.mark.parametrize(
    ("endpoint", "extra"), [("http://h:1", r"\[traces\]"), ("h:1", r"\[traces-grpc\]")]
)
def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, extra: str
) -> None:
    monkeypatch.setattr("banyan.server.admin.traces.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=extra):
        check_traces(config_of("--enable-trace", "--otlp-traces-endpoint", endpoint).observe)
