"""The whole benchmark against a scripted server over real sockets."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from banyan.base.errors import BanyanError, ConfigError
from banyan.bench import report
from banyan.bench.options import ServingOptions, read_options
from banyan.bench.serving import run_serving
from tests.bench.scripted import Script, completion_stream, models, native_stream, scripted_server
from tests.bench.scripted import whole as whole_answer

RESULT_KEYS = {
    "tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len",
    "random_input_len", "random_output_len", "random_range_ratio", "server_info", "duration",
    "completed", "total_input_tokens", "total_input_text_tokens", "total_input_vision_tokens",
    "total_output_tokens", "total_output_tokens_retokenized", "request_throughput",
    "input_throughput", "output_throughput", "total_throughput", "concurrency", "accept_length",
    "max_output_tokens_per_s", "max_concurrent_requests",
    *(f"{part}_{name}_ms" for part in ("mean", "median", "std", "p90", "p95", "p99")
      for name in ("e2e_latency", "ttft", "tpot", "itl")),
}  # fmt: skip
"""What programs that read bench_serving's files look for."""

SMALL = "--random-input-len 6 --random-output-len 3 --random-range-ratio 1 --num-prompts 5"


def options(url: str, line: str = SMALL) -> ServingOptions:
    return read_options(ServingOptions, ["--base-url", url, *line.split()], "bench", "")


def banyan(route: str, body: dict) -> Script:
    """A healthy server that says one letter a token."""
    if route == "/v1/models":
        return models()
    if route == "/get_server_info":
        return whole_answer({"internal_states": [{"avg_spec_accept_length": 1.5}]})
    if route == "/generate":
        count = body["sampling_params"]["max_new_tokens"]
        return native_stream(len(body.get("input_ids") or body["text"].split()), ["a"] * count, 2)
    if route == "/v1/completions":
        return completion_stream(6, ["a"] * body["max_tokens"])
    return whole_answer({}, status=404 if route != "/flush_cache" else 200)


@pytest.mark.asyncio
async def test_every_key_of_the_result_file_is_there_and_the_counts_are_exact() -> None:
    async with scripted_server(banyan) as scripted:
        finished = await run_serving(options(scripted.url, SMALL + " --goodput ttft:60000"), None)
    keys = finished.keys
    assert keys.keys() >= RESULT_KEYS
    assert (keys["completed"], keys["failed"]) == (5, 0)
    assert (keys["total_input_tokens"], keys["total_output_tokens"]) == (30, 15)
    assert keys["total_cached_tokens"] == 10
    assert keys["accept_length"] == 1.5
    assert keys["goodput_share"] == 1.0
    assert keys["model"] == "tiny"
    assert orjson.loads(orjson.dumps(keys))["request_rate"] == "inf"
    assert len(scripted.bodies("/generate")) == 6, "five and one to warm up"


@pytest.mark.asyncio
async def test_any_openai_server_is_measured_by_its_usage() -> None:
    async with scripted_server(banyan) as scripted:
        given = options(scripted.url, SMALL + " --backend vllm --vocab-size 2000")
        keys = (await run_serving(given, None)).keys
    assert (keys["total_input_tokens"], keys["total_output_tokens"]) == (30, 15)
    for body in scripted.bodies("/v1/completions"):
        assert len(body["prompt"]) == 6 and all(isinstance(i, int) for i in body["prompt"])
        assert body["stream_options"] == {"include_usage": True}


@pytest.mark.asyncio
async def test_failed_requests_are_counted_and_listed_and_the_rest_is_measured() -> None:
    numbers = itertools.count()

    def answer(route: str, body: dict) -> Script:
        if route == "/generate":
            number = next(numbers)
            if number in (1, 3):
                return whole_answer({"error": {"message": "queue is full"}}, status=503)
            if number == 4:
                return Script(native_stream(6, ["a"]).pieces[:1], is_cut=True)
        return banyan(route, body)

    async with scripted_server(answer) as scripted:
        given = options(scripted.url, SMALL + " --max-concurrency 1 --output-details")
        finished = await run_serving(given, None)
    keys = finished.keys
    assert (keys["completed"], keys["failed"], keys["total_output_tokens"]) == (2, 3, 6)
    counts = keys["error_counts"]
    assert isinstance(counts, dict)
    assert counts["HTTP 503: queue is full"] == 2 and len(counts) == 2
    assert "3 of 5 requests failed" in finished.warnings
    assert keys["output_lens"] == [0, 3, 0, 0, 3]
    errors = keys["errors"]
    assert isinstance(errors, list) and [bool(e) for e in errors] == [
        True,
        False,
        True,
        True,
        False,
    ]
    lines = report.error_lines(counts.items())
    assert lines[0] == "  2 × HTTP 503: queue is full"


@pytest.mark.asyncio
async def test_it_waits_until_the_server_is_healthy() -> None:
    asked = itertools.count()

    def answer(route: str, body: dict) -> Script:
        if route == "/health":
            return whole_answer({}, status=503 if next(asked) < 2 else 200)
        return banyan(route, body)

    async with scripted_server(answer) as scripted:
        finished = await run_serving(options(scripted.url), None)
    assert finished.keys["completed"] == 5
    assert next(asked) == 3


@pytest.mark.asyncio
async def test_no_server_within_the_time_is_an_error_that_says_why() -> None:
    async with scripted_server(banyan) as scripted:
        url = scripted.url
    given = options(url, SMALL + " --ready-check-timeout-sec 0")
    with pytest.raises(BanyanError, match="no server within 0 s"):
        await run_serving(given, None)


@pytest.mark.asyncio
async def test_a_warm_up_that_fails_ends_the_benchmark_with_its_reason() -> None:
    def answer(route: str, body: dict) -> Script:
        refused = whole_answer({"error": {"message": "no such model"}}, status=404)
        return refused if route == "/generate" else banyan(route, body)

    async with scripted_server(answer) as scripted:
        with pytest.raises(BanyanError, match="warm-up request failed: HTTP 404: no such model"):
            await run_serving(options(scripted.url), None)


@pytest.mark.asyncio
async def test_requests_wait_for_a_place_when_concurrency_is_limited() -> None:
    hold = asyncio.Event()
    open_now = 0

    def answer(route: str, body: dict) -> Script:
        nonlocal open_now
        script = banyan(route, body)
        if route == "/generate":
            open_now += 1
            script.hold = hold
        return script

    async with scripted_server(answer) as scripted:
        given = options(scripted.url, SMALL + " --max-concurrency 2 --warmup-requests 0")
        task = asyncio.create_task(run_serving(given, None))
        while open_now < 2:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert open_now == 2
        hold.set()
        finished = await task
    assert finished.keys["max_concurrent_requests"] == 2


@pytest.mark.asyncio
async def test_settings_reach_the_server() -> None:
    line = (
        "--random-input-len 4 --random-output-len 2 --random-range-ratio 1 --num-prompts 2 "
        "--temperature 0.5 --top-p 0.9 --disable-ignore-eos --tokenize-prompt --vocab-size 9000 "
        "--return-logprob --top-logprobs-num 3 --header X-Tenant=blue --api-key secret "
        "--flush-cache --disable-keep-alive"
    )
    async with scripted_server(banyan) as scripted:
        given = options(scripted.url, line)
        given_body = ["--extra-request-body", '{"priority": 3}']
        given = read_options(
            ServingOptions, ["--base-url", scripted.url, *line.split(), *given_body], "bench", ""
        )
        await run_serving(given, None)
    body = scripted.bodies("/generate")[-1]
    assert body["sampling_params"] == {
        "temperature": 0.5, "top_p": 0.9, "max_new_tokens": 2, "ignore_eos": False,
    }  # fmt: skip
    assert (body["priority"], body["return_logprob"], body["top_logprobs_num"]) == (3, True, 3)
    assert len(body["input_ids"]) == 4
    assert scripted.headers[-1]["x-tenant"] == "blue"
    assert scripted.headers[-1]["authorization"] == "Bearer secret"
    assert scripted.bodies("/flush_cache") == [{}]
    assert scripted.connections == len(scripted.asked)


@pytest.mark.asyncio
async def test_an_unstreamed_run_has_a_first_token_at_its_end() -> None:
    def answer(route: str, body: dict) -> Script:
        if route != "/generate":
            return banyan(route, body)
        assert body["stream"] is False
        meta = {"prompt_tokens": 6, "completion_tokens": 3, "finish_reason": {"type": "length"}}
        return whole_answer({"text": "abc", "meta_info": meta})

    async with scripted_server(answer) as scripted:
        keys = (await run_serving(options(scripted.url, SMALL + " --disable-stream"), None)).keys
    assert keys["total_output_tokens"] == 15
    assert keys["mean_ttft_ms"] == keys["mean_e2e_latency_ms"]


@pytest.mark.asyncio
async def test_traces_are_sent_at_their_own_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    rows = [(5000, 512, 2, [1]), (5010, 600, 2, [1, 2]), (5030, 512, 2, [1])]
    path.write_text("\n".join(json.dumps(dict(zip(names, r, strict=True))) for r in rows))
    line = (
        f"--dataset-name mooncake --dataset-path {path} --use-trace-timestamps "
        "--trace-block-len 8 --vocab-size 4000 --output-details"
    )
    async with scripted_server(banyan) as scripted:
        keys = (await run_serving(options(scripted.url, line), None)).keys
    assert keys["request_rate"] == "trace"
    starts = keys["start_times"]
    assert isinstance(starts, list)
    assert starts[1] - starts[0] >= 0.0099 and starts[2] - starts[0] >= 0.0299
    sent = [body["input_ids"] for body in scripted.bodies("/generate")[1:]]
    assert sent[0] == sent[1][:8] == sent[2]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--backend trt", "--backend 'trt'"),
        ("--request-rate 0", "--request-rate 0"),
        ("--use-trace-timestamps", "needs a trace"),
        ("--goodput fast", "--goodput 'fast'"),
        ("--header x", "--header 'x'"),
        ("--dataset-name random-ids", "--vocab-size"),
        ("--dataset-name mooncake --mooncake-num-rounds 2", "--mooncake-num-rounds"),
    ],
)
@pytest.mark.asyncio
async def test_options_that_cannot_work_are_refused_by_name(line: str, text: str) -> None:
    async with scripted_server(banyan) as scripted:
        with pytest.raises(ConfigError, match=text):
            await run_serving(options(scripted.url, line), None)


@pytest.mark.asyncio
async def test_a_chat_server_cannot_be_asked_in_bare_ids() -> None:
    line = SMALL + " --backend openai-chat --vocab-size 4000"
    async with scripted_server(banyan) as scripted:
        with pytest.raises(ConfigError, match="takes text"):
            await run_serving(options(scripted.url, line), None)


@pytest.mark.asyncio
async def test_the_table_has_the_rows_that_people_know() -> None:
    async with scripted_server(banyan) as scripted:
        table = report.serving_table((await run_serving(options(scripted.url), None)).keys)
    for row in _rows_of(
        "Successful requests", "Benchmark duration (s)", "Total input tokens",
        "Total generated tokens", "Request throughput (req/s)", "Output token throughput (tok/s)",
        "Mean TTFT (ms)", "Median TPOT (ms)", "P99 ITL (ms)", "P90 E2E Latency (ms)",
    ):  # fmt: skip
        assert row in table


def _rows_of(*labels: str) -> Sequence[str]:
    return [f"\n{label}:" for label in labels]


def test_results_are_added_to_the_file_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    report.append_line(str(path), {"a": 1})
    report.append_line(str(path), {"a": 2})
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2]
    with pytest.raises(ConfigError, match="cannot be written"):
        report.append_line(str(tmp_path / "no" / "file"), {})
