"""/metrics: figures for Prometheus that agree with what clients saw."""

import asyncio
from contextlib import aclosing

import httpx
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from banyan.base.errors import ConfigError, RequestError
from banyan.base.ids import RequestId
from banyan.config.cli import parse
from banyan.config.env import Environment
from banyan.config.observability import bounds_of
from banyan.engine_client.client import Replica
from banyan.engine_client.metrics_observer import ObservedGenerator
from banyan.messages.events import Stats
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.generation import Finish, TextChunk, Usage
from banyan.requests.request_spec import spec_of
from banyan.server.admin.metrics import open_metrics
from banyan.server.admin.prometheus import QuickHistogram
from tests.server.fakes import READY, Site
from tests.support.scripted import scripted

STATS = Stats(running=2, waiting=1, held_pages=4, cached_pages=3, free_pages=5, retractions=7)


def config_of(*words):
    return parse(list(words), Environment({}))


def metrics_of(*words, replicas=lambda: [Replica(0, True, READY, STATS)]):
    return open_metrics(config_of(*words), "tiny", replicas)


def read(metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, values of the labels that are not the same everywhere) -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.export().decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine_type"] == "unified"
            kept = {k: v for k, v in sample.labels.items() if k in ("le", "dp_rank")}
            kept |= {k: v for k, v in sample.labels.items() if k == "cache_source"}
            found[sample.name.removeprefix("sglang:"), tuple(kept.values())] = sample.value
    return found


class Scripted:
    """A generator whose chunks are given."""

    def __init__(self, *chunks: TextChunk, error: RequestError | None = None) -> None:
        self.chunks = chunks
        self.error = error

    def check(self, requests) -> None:
        pass

    @scripted
    async def generate(self, request):
        for chunk in self.chunks:
            yield chunk
        if self.error is not None:
            raise self.error


def chunk(count, finish=None, **usage):
    return TextChunk("x", [1], Usage(10, count, **usage), finish=finish)


def asked(route="chat", grammar="", key_name=""):
    return spec_of(
        RequestId("r"),
        [1] * 10,
        SamplingParams(max_new_tokens=4),
        route=route,
        key_name=key_name,
        grammar=grammar,
    )


def run(metrics, generator, request=None, take=99):
    async def all_of_it():
        async with aclosing(
            ObservedGenerator(generator, [metrics]).generate(request or asked())
        ) as chunks:
            async for _ in chunks:
                nonlocal take
                take -= 1
                if not take:
                    return

    asyncio.run(all_of_it())


STOP = Finish("stop")
ENDS = ("stop", "length", "abort", "error")


def test_metrics_are_there_when_they_are_asked_for() -> None:
    site = Site()
    site.state.metrics = metrics_of("--enable-metrics")
    with site.serving():
        answer = site.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE sglang:num_requests_total counter" in answer.text


def test_a_server_that_counts_nothing_says_how_it_would(http: httpx.Client) -> None:
    answer = http.get("/metrics")
    assert answer.status_code == 404 and "--enable-metrics" in answer.json()["message"]


def test_tokens_are_those_of_the_usage() -> None:
    metrics = metrics_of("--enable-metrics")
    last = chunk(5, STOP, cached_tokens=8, stored_tokens=3, queue_s=0.25)

    run(metrics, Scripted(chunk(1), chunk(3), last))
    run(metrics, Scripted(chunk(2, Finish("length"))), asked(grammar="json"))

    found = read(metrics)
    assert found["num_requests_total", ()] == 2
    assert found["num_aborted_requests_total", ()] == 0
    assert found["num_so_requests_total", ()] == 1
    assert found["prompt_tokens_total", ()] == 20
    assert found["generation_tokens_total", ()] == 7
    assert found["cached_tokens_total", ("device",)] == 5
    assert found["cached_tokens_total", ("storage",)] == 3
    assert found["time_to_first_token_seconds_count", ()] == 2
    assert found["inter_token_latency_seconds_count", ()] == 4  # one for each token that followed
    assert found["e2e_request_latency_seconds_count", ()] == 2
    assert found["queue_time_seconds_sum", ()] == 0.25


def test_what_did_not_end_in_order_is_counted_as_that() -> None:
    metrics = metrics_of("--enable-metrics")

    run(metrics, Scripted(chunk(1), chunk(2)), take=1)  # the client leaves
    run(metrics, Scripted(chunk(1), chunk(2, Finish("abort", None, 500, "no", "engine_error"))))
    with pytest.raises(RequestError):
        run(metrics, Scripted(error=RequestError("no", code="too_long")))

    found = read(metrics)
    assert found["num_requests_total", ()] == found["num_aborted_requests_total", ()] == 3
    assert found["generation_tokens_total", ()] == 3
    assert found["prompt_tokens_total", ()] == 20
    assert found["e2e_request_latency_seconds_count", ()] == 2


@pytest.mark.parametrize("names", ["sglang", "vllm"])
def test_figures_have_the_names_that_are_asked_for(names: str) -> None:
    words = ("--metrics-compat", names, "--collect-tokens-histogram", "--page-size", "16")
    replicas = [Replica(0, True, READY, STATS), Replica(1, True, READY, STATS)]
    metrics = metrics_of("--enable-metrics", *words, replicas=lambda: replicas)
    run(
        metrics,
        Scripted(
            chunk(1, cached_tokens=8, stored_tokens=3),
            chunk(4, Finish("length"), cached_tokens=8, stored_tokens=3),
        ),
    )
    with pytest.raises(RequestError):
        run(metrics, Scripted(error=RequestError("no", code="queue_full")))
    run(metrics, Scripted(chunk(1), chunk(2)), take=1)
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.export().decode())
        for sample in family.samples
    }
    assert {name.partition(":")[0] for name, *_ in found} == {names}
    if names == "sglang":
        return
    model = ("model_name", "tiny")
    first, second = (("engine", "0"), model), (("engine", "1"), model)
    assert found["vllm:num_requests_running", *first] == STATS.running
    assert found["vllm:num_requests_waiting", *second] == STATS.waiting
    assert found["vllm:num_preemptions_total", *first] == STATS.retractions
    assert 0 < found["vllm:kv_cache_usage_perc", *first] < 1
    assert found["vllm:prompt_tokens_total", model] == 20
    assert found["vllm:prefix_cache_queries_total", model] == 20
    assert found["vllm:prefix_cache_hits_total", model] == 8, "from the store too"
    assert found["vllm:generation_tokens_total", model] == 5
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert found[f"vllm:{name}_seconds_count", model] >= 2
    assert found["vllm:inter_token_latency_seconds_count", model] == 3
    assert found["vllm:request_prompt_tokens_count", model] == 2
    assert found["vllm:request_generation_tokens_sum", model] == 5
    ends = {
        end: found["vllm:request_success_total", ("finished_reason", end), model] for end in ENDS
    }
    assert ends == {"stop": 0, "length": 1, "abort": 1, "error": 1}


@pytest.mark.parametrize("route", ["probe", "warm-up"])
def test_what_the_server_asks_itself_is_not_counted(route) -> None:
    metrics = metrics_of("--enable-metrics")
    run(metrics, Scripted(chunk(1, STOP)), asked(route))
    assert read(metrics)["num_requests_total", ()] == 0


def test_gauges_are_what_each_replica_said_last() -> None:
    second = replace_stats(running=9)
    replicas = [Replica(0, True, READY, STATS), Replica(3, True, READY, second)]
    replicas.append(Replica(4, False, None, Stats()))
    metrics = metrics_of("--enable-metrics", "--page-size", "16", replicas=lambda: replicas)

    found = read(metrics)

    assert found["num_running_reqs", ("0",)] == 2 and found["num_running_reqs", ("3",)] == 9
    assert ("num_running_reqs", ("4",)) not in found
    assert found["num_queue_reqs", ("0",)] == 1
    assert found["num_used_tokens", ("0",)] == 64
    assert found["token_usage", ("0",)] == 64 / READY.max_total_tokens
    assert found["kv_evictable_tokens", ("0",)] == 48
    assert found["kv_available_tokens", ("0",)] == 80
    assert found["num_retracted_requests_total", ("0",)] == 7


def test_gauges_have_the_labels_of_every_rank_on_demand() -> None:
    words = ("--enable-metrics", "--tp", "2", "--pp", "2")
    for more, expected in (
        ((), {("0", "0")}),
        (
            ("--enable-metrics-for-all-schedulers",),
            {("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")},
        ),
    ):
        text = metrics_of(*words, *more).export().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        for name, value in (("num_running_reqs", 2), ("num_retracted_requests", 7)):
            samples = families[f"sglang:{name}"].samples
            ranks = [(each.labels["tp_rank"], each.labels["pp_rank"]) for each in samples]
            assert set(ranks) == expected and len(ranks) == len(expected)
            assert {each.value for each in samples} == {value}


def test_drafts_are_reported_where_there_are_any() -> None:
    drafted = replace_stats(verify_rows=10, correct_drafts=5)
    for stats, reported in ((STATS, None), (drafted, 1.5)):
        metrics = metrics_of(
            "--enable-metrics", replicas=lambda stats=stats: [Replica(0, True, READY, stats)]
        )
        assert read(metrics).get(("spec_accept_length", ("0",))) == reported


def replace_stats(**changes):
    fields = {name: getattr(STATS, name) for name in STATS.__struct_fields__}
    return Stats(**{**fields, **changes})


def test_a_server_without_replicas_has_counters_all_the_same() -> None:
    assert read(metrics_of("--enable-metrics", replicas=list))["num_requests_total", ()] == 0


def test_bounds_are_those_of_the_flags() -> None:
    flags = {
        "time-to-first-token": "time_to_first_token_seconds",
        "inter-token-latency": "inter_token_latency_seconds",
        "e2e-request-latency": "e2e_request_latency_seconds",
    }
    words = [word for flag in flags for word in (f"--bucket-{flag}", "0.5", "3")]
    found = read(metrics_of("--enable-metrics", *words))
    for name in flags.values():
        assert {le for key, le in found if key == f"{name}_bucket"} == {
            ("0.5",),
            ("3.0",),
            ("+Inf",),
        }


def test_lengths_are_counted_when_that_is_asked_for() -> None:
    plain = metrics_of("--enable-metrics")
    metrics = metrics_of("--enable-metrics", "--collect-tokens-histogram")
    for each in (plain, metrics):
        run(each, Scripted(chunk(40, STOP)))

    assert ("prompt_tokens_histogram_count", ()) not in read(plain)
    found = read(metrics)
    assert found["prompt_tokens_histogram_bucket", ("16.0",)] == 1
    assert found["generation_tokens_histogram_bucket", ("32.0",)] == 0
    assert found["generation_tokens_histogram_bucket", ("64.0",)] == 1


def test_lengths_have_the_bounds_of_their_rule() -> None:
    found = read(
        metrics_of(
            *("--enable-metrics", "--collect-tokens-histogram"),
            *("--prompt-tokens-buckets", "custom", "7", "9"),
            *("--generation-tokens-buckets", "tse", "100", "2", "4"),
        )
    )
    prompts = {le for key, (le, *_) in sized(found) if key == "prompt_tokens_histogram_bucket"}
    outputs = {le for key, (le, *_) in sized(found) if key == "generation_tokens_histogram_bucket"}
    assert prompts == {"7.0", "9.0", "+Inf"}
    assert outputs == {"96.0", "98.0", "100.0", "102.0", "104.0", "+Inf"}


def sized(found):
    return [key for key in found if key[1]]


@pytest.mark.parametrize(
    "rule",
    ["custom", "custom 0", "custom nan", "tse 1 2", "tse 9 1 4", "tse 9 2 65", "other 1"],
)
def test_a_rule_that_is_none_is_refused(rule) -> None:
    with pytest.raises(ConfigError, match="no rule"):
        bounds_of(rule.split())


def test_times_between_tokens_are_counted_as_the_library_counts() -> None:
    bounds, reported = (0.5, 3.0, float("inf")), [(0.5, 1), (0.25, 2), (3.5, 1), (0.75, 3)]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    quick = QuickHistogram("gaps", "about", ("who",), bounds)
    ours.register(quick)
    whole = Histogram("gaps", "about", ("who",), registry=theirs, buckets=bounds)
    for value, count in reported:
        quick.labels("me").observe(value, count)
        for _ in range(count):
            whole.labels("me").observe(value)
    shown = [
        line for line in generate_latest(theirs).decode().splitlines() if "created" not in line
    ]
    assert generate_latest(ours).decode().splitlines() == shown


def test_names_of_keys_beyond_a_bound_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banyan.server.admin.prometheus._MOST_KEYS", 2)
    metrics = metrics_of("--enable-metrics", "--metrics-compat", "vllm")
    for name in ("a", "b", "c", "d", "a", ""):
        run(metrics, Scripted(chunk(3, Finish("stop"))), asked(key_name=name))
    found = {
        sample.labels["key_name"]: sample.value
        for family in text_string_to_metric_families(metrics.export().decode())
        for sample in family.samples
        if sample.name == "banyan:key_requests_total"
    }
    assert found == {"a": 2, "b": 1, "other": 2}
