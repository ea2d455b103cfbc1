"""`banyan bench serving`: build prompts, send them at their times, compute the figures.

Open loop: a request is sent at its time, whatever the server does. With a concurrency limit a due
request waits for a free slot; its clock starts when it is sent. The load generator measures itself.
"""

import asyncio
import gc
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar

import orjson

from banyan.base.errors import BanyanError, ConfigError
from banyan.bench import datasets, report
from banyan.bench.datasets import BareIds, Lexicon, PlainWords, Prompt, TokenWords
from banyan.bench.dialects import (
    CHAT,
    Answer,
    BenchAPI,
    RequestOptions,
    backend,
    read_reply,
    request_body,
)
from banyan.bench.http import ExchangeError, HttpClient
from banyan.bench.options import DataOptions, ServingOptions
from banyan.bench.report import percentile
from banyan.tokenizer.tokenizer import Tokenizer

_POLL_S = 0.2
_CALL_S = 30.0
_WARM_OUTPUT_LEN = 32
_TICK_S = 0.02
BUSY_SHARE = 0.7

LATE_S = 0.01
"""Above these the load generator itself may have distorted the figures."""

A = TypeVar("A")

Progress = Callable[[int, int], None]
"""Called with (finished requests, all requests)."""

Say = Callable[[str], None]
"""Called with a message when something takes long."""


@dataclass
class SelfWatch:
    """CPU use and delays of the load generator.

    Attributes:
        cpu_share: share of one core.
        loop_lag_s: delay of the event loop, sampled every 20 ms.
        send_lag_s: delay of each request that did not wait for a slot.
    """

    cpu_share: float = 0.0
    loop_lag_s: list[float] = field(default_factory=list)
    send_lag_s: list[float] = field(default_factory=list)

    def keys(self) -> dict[str, object]:
        lag, sent = self.loop_lag_s, self.send_lag_s
        return {
            "client_cpu_share": self.cpu_share,
            "client_loop_lag_p99_ms": percentile(lag, 99) * 1e3,
            "client_loop_lag_max_ms": max(lag, default=0.0) * 1e3,
            "client_send_lag_p99_ms": percentile(sent, 99) * 1e3,
            "client_send_lag_max_ms": max(sent, default=0.0) * 1e3,
        }

    def warnings(self) -> list[str]:
        found = []
        if self.cpu_share > BUSY_SHARE:
            found.append(
                f"the load generator used {self.cpu_share:.0%} of a core: it may have been the "
                "bottleneck. Give it a core of its own, or lower the load."
            )
        for name, lag in (("event loop", self.loop_lag_s), ("sending", self.send_lag_s)):
            late_s = percentile(lag, 99)
            if late_s > LATE_S:
                found.append(
                    f"the load generator's {name} was {late_s * 1e3:.1f} ms late (p99): latencies "
                    "are too high by up to that much. Give it a core of its own."
                )
        return found


@dataclass
class Run(Generic[A]):
    """Results of a run; outcomes are in the order of the requests.

    Attributes:
        over: numbers of the requests that finished, each with an outcome.
        is_cut: the run was cancelled before all requests finished.
    """

    outcomes: list[A | BanyanError]
    duration_s: float
    watch: SelfWatch
    over: list[int]
    is_cut: bool = False


@dataclass(frozen=True)
class Report:
    """A finished run.

    Attributes:
        keys: the line for the results file.
        warnings: reasons why the figures may be misleading.
    """

    keys: dict[str, object]
    prompts: list[Prompt]
    run: Run[Answer]
    warnings: list[str]

    @property
    def answers(self) -> list[Answer]:
        return [o for o in self.run.outcomes if isinstance(o, Answer)]

    @property
    def is_cut(self) -> bool:
        return self.run.is_cut


def lexicon_of(options: DataOptions, tokenizer: Tokenizer | None) -> Lexicon:
    """The source of prompt tokens: a tokenizer, a vocabulary size, or plain English."""
    if options.vocab_size:
        return BareIds(options.vocab_size)
    if tokenizer is not None:
        return TokenWords(tokenizer, any_id=options.dataset_name == "random-ids")
    if options.dataset_name == "random-ids":
        raise ConfigError(
            "--dataset-name random-ids needs the vocabulary",
            hint="give --tokenizer, or --vocab-size for bare ids",
        )
    return PlainWords()


async def run_serving(
    options: ServingOptions,
    tokenizer: Tokenizer | None,
    progress: Progress = lambda done, count: None,
    say: Say = lambda text: None,
) -> Report:
    """Run the benchmark against a server, which may still be starting.

    If cancelled while requests run, it reports the finished ones.

    Raises:
        ConfigError: options that cannot work together, or a data set that cannot be read.
        BanyanError: no server, or its warm-up requests fail.
    """
    dialect, default_port = backend(options.backend)
    goals = report.read_goals(options.goodput)
    prompts = prompts_of(options, tokenizer)
    due_s = _due_times(options, prompts)
    port = options.port or default_port
    url = options.base_url or f"http://{options.host}:{port}"
    keep_alive = not options.disable_keep_alive
    server = HttpClient(url, _headers(options), keep_alive, options.cacert)
    try:
        model = await _ready_model(server, options, say)
        request_options = _wish(options, dialect, model)
        if not request_options.send_ids and not prompts[0].text:
            raise ConfigError(
                f"--backend {options.backend} takes text, and the prompts are token ids only",
                hint="give --tokenizer instead of --vocab-size",
            )
        run = await _measure(server, dialect, request_options, options, prompts, due_s, progress)
        described = await _described(server, dialect)
    finally:
        server.close()
    prompts = [prompts[number] for number in run.over]
    keys = _settings(options, url, model)
    keys |= report.results(prompts, run.outcomes, run.duration_s, goals)
    keys |= {"server_info": described, "accept_length": _accept_length(described)}
    keys["total_output_tokens_retokenized"] = _retokenized(run, tokenizer)
    keys |= run.watch.keys()
    keys["error_counts"] = dict(report.failures(run.outcomes))
    if options.output_details:
        keys |= _details(prompts, run)
    return Report(keys, prompts, run, _warnings(keys, run))


def prompts_of(options: ServingOptions, tokenizer: Tokenizer | None) -> list[Prompt]:
    if options.mooncake_num_rounds != 1:
        raise ConfigError("--mooncake-num-rounds must be 1: a line of the trace is one request")
    return datasets.load_prompts(options, lexicon_of(options, tokenizer))


async def post_prompt(
    server: HttpClient,
    dialect: BenchAPI,
    body: bytes,
    stream: bool = True,
    timeout_s: float = _CALL_S,
) -> Answer:
    """Send a prompt and read the whole answer."""
    reply = await server.request("POST", dialect.route, body, timeout_s)
    return read_reply(dialect, reply, stream)


async def _measure(
    server: HttpClient,
    dialect: BenchAPI,
    request_options: RequestOptions,
    options: ServingOptions,
    prompts: list[Prompt],
    due_s: list[float],
    progress: Progress,
) -> Run[Answer]:
    """Warm up, then run the load; bodies are built before the clock starts."""
    limit_s = options.request_timeout_s
    bodies = [request_body(dialect, prompt, request_options) for prompt in prompts]
    await _warm_up(server, dialect, request_options, options, prompts)
    if options.flush_cache:
        reply = await server.request("POST", "/flush_cache", timeout_s=_CALL_S)
        if reply.status != 200:
            raise BanyanError(f"--flush-cache: the server answered {reply.status}")

    def send(index: int) -> Awaitable[Answer]:
        return post_prompt(server, dialect, bodies[index], request_options.stream, limit_s)

    def count(done: int) -> None:
        progress(done, len(prompts))

    return await run_load(len(prompts), send, due_s, options.max_concurrency, count)


async def _warm_up(
    server: HttpClient,
    dialect: BenchAPI,
    request_options: RequestOptions,
    options: ServingOptions,
    prompts: list[Prompt],
) -> None:
    """Send a prompt with a short answer, --warmup-requests times.

    The prompt is the first one reversed: same length, but no shared prefix in the cache.
    """
    if options.warmup_requests < 1:
        return
    first = prompts[0]
    text = " ".join(reversed(first.text.split(" ")))
    ids = None if first.ids is None else first.ids[::-1]
    short = Prompt(text, ids, first.length, min(first.output_len, _WARM_OUTPUT_LEN))
    body = request_body(dialect, short, request_options)
    work = (
        post_prompt(server, dialect, body, request_options.stream, options.request_timeout_s)
        for _ in range(options.warmup_requests)
    )
    try:
        await asyncio.gather(*work)
    except ExchangeError as error:
        raise BanyanError(f"the warm-up request failed: {error}") from None


def _due_times(options: ServingOptions, prompts: list[Prompt]) -> list[float]:
    if options.use_trace_timestamps:
        if options.dataset_name not in datasets.TRACES:
            raise ConfigError(
                f"--use-trace-timestamps needs a trace, not {options.dataset_name}",
                hint=f"traces: {', '.join(datasets.TRACES)}",
            )
        return trace_times(prompts, options.mooncake_slowdown_factor)
    if options.request_rate <= 0:
        raise ConfigError(
            f"--request-rate {options.request_rate:g} must be above 0 (inf = at once)"
        )
    return poisson_times(len(prompts), options.request_rate, options.seed)


def _headers(options: ServingOptions) -> dict[str, str]:
    headers = {}
    if options.api_key:
        headers["authorization"] = f"Bearer {options.api_key}"
    for word in options.header:
        name, equals, text = word.partition("=")
        if not (name and equals):
            raise ConfigError(f"--header {word!r} is not NAME=VALUE")
        headers[name] = text
    return headers


def _wish(options: ServingOptions, dialect: BenchAPI, model: str) -> RequestOptions:
    try:
        extra = orjson.loads(options.extra_request_body or "{}")
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--extra-request-body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError("--extra-request-body is not a JSON object")
    if options.dataset_name == "image" and dialect is not CHAT:
        raise ConfigError(
            f"--backend {options.backend} sends no pictures",
            hint="--dataset-name image needs a chat backend, such as banyan-oai-chat",
        )
    wants_ids = options.tokenize_prompt or options.dataset_name in datasets.SENT_AS_IDS
    return RequestOptions(
        model=model,
        stream=not options.disable_stream,
        temperature=options.temperature,
        top_p=options.top_p,
        ignore_eos=not options.disable_ignore_eos,
        send_ids=dialect.takes_ids and (wants_ids or bool(options.vocab_size)),
        return_logprob=options.return_logprob,
        top_logprobs=options.top_logprobs_num,
        logprob_start=options.logprob_start_len,
        extra=extra,
    )


async def _ready_model(server: HttpClient, options: ServingOptions, say: Say) -> str:
    """Wait for the server; the model name for requests."""
    limit_s = options.ready_check_timeout_sec
    deadline = time.monotonic() + limit_s
    has_reported = False
    named = options.served_model_name or options.model
    while True:
        try:
            health = await server.request("GET", "/health", timeout_s=_CALL_S)
            if health.status != 503:
                return named or await _first_model(server)
            problem = "/health answers 503"
        except ExchangeError as error:
            problem = str(error)
        if time.monotonic() >= deadline:
            raise BanyanError(
                f"no server within {limit_s:g} s: {problem}",
                hint="start it, or check --base-url, --host and --port",
            )
        if not has_reported:
            say(f"waiting up to {limit_s:g} s for {server.url}: {problem}")
        has_reported = True
        await asyncio.sleep(_POLL_S)


async def _first_model(server: HttpClient) -> str:
    reply = await server.request("GET", "/v1/models", timeout_s=_CALL_S)
    try:
        return orjson.loads(reply.body)["data"][0]["id"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        raise BanyanError(
            f"{server.url}/v1/models (HTTP {reply.status}) lists no model",
            hint="name it with --model",
        ) from None


async def _described(server: HttpClient, dialect: BenchAPI) -> object:
    """The server's description of itself; None if it has no such route."""
    if dialect.route != "/generate":
        return None
    try:
        reply = await server.request("GET", "/get_server_info", timeout_s=_CALL_S)
        return orjson.loads(reply.body) if reply.status == 200 else None
    except (ExchangeError, orjson.JSONDecodeError):
        return None


def _accept_length(described: object) -> object:
    if not isinstance(described, dict):
        return None
    states = described.get("internal_states")
    first = states[0] if isinstance(states, list) and states else {}
    return first.get("avg_spec_accept_length") if isinstance(first, dict) else None


def _settings(options: ServingOptions, url: str, model: str) -> dict[str, object]:
    rate = options.request_rate
    return {
        "tag": options.tag or None,
        "backend": options.backend,
        "base_url": url,
        "model": model,
        "dataset_name": options.dataset_name,
        "num_prompts": options.num_prompts,
        "request_rate": "trace" if options.use_trace_timestamps else _finite(rate),
        "max_concurrency": options.max_concurrency,
        "sharegpt_output_len": options.sharegpt_output_len,
        "random_input_len": options.random_input_len,
        "random_output_len": options.random_output_len,
        "random_range_ratio": options.random_range_ratio,
        "seed": options.seed,
    }


def _finite(rate: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(rate) else rate


def _retokenized(run: Run[Answer], tokenizer: Tokenizer | None) -> int | None:
    """Number of tokens when the tokenizer encodes the answers; None without a tokenizer."""
    if tokenizer is None:
        return None
    texts = ["".join(o.text) for o in run.outcomes if isinstance(o, Answer)]
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


def _details(prompts: list[Prompt], run: Run[Answer]) -> dict[str, object]:
    keys: dict[str, list[object]] = {
        "input_lens": [], "output_lens": [], "ttfts": [], "itls": [], "start_times": [],
        "generated_texts": [], "errors": [],
    }  # fmt: skip
    for prompt, outcome in zip(prompts, run.outcomes, strict=True):
        is_good = isinstance(outcome, Answer)
        times = report.timing(outcome) if is_good else None
        given = outcome.prompt_tokens if is_good else None
        keys["input_lens"].append(prompt.length if given is None else given)
        keys["output_lens"].append(outcome.output_tokens if is_good else 0)
        keys["ttfts"].append(times.ttft if times else 0.0)
        keys["itls"].append(times.itls if times else [])
        keys["start_times"].append(outcome.started if is_good else None)
        keys["generated_texts"].append("".join(outcome.text) if is_good else "")
        keys["errors"].append("" if is_good else str(outcome))
    return dict(keys)


def _warnings(keys: dict[str, object], run: Run[Answer]) -> list[str]:
    found = run.watch.warnings()
    if run.is_cut:
        found.append(f"stopped after {len(run.over)} requests; the figures are theirs alone")
    if keys["failed"]:
        found.append(f"{keys['failed']} of {len(run.outcomes)} requests failed")
    if keys["completed"] and not keys["is_counted"]:
        found.append("the server reported no usage: output tokens are streamed events, counted")
    return found


def poisson_times(count: int, rate_rps: float, seed: int) -> list[float]:
    """Seconds from the start at which each request is due; all at once for an infinite rate."""
    if math.isinf(rate_rps):
        return [0.0] * count
    random = Random(seed)
    at_s, times = 0.0, []
    for _ in range(count):
        times.append(at_s)
        at_s += random.expovariate(rate_rps)
    return times


def trace_times(prompts: Sequence[Prompt], slowdown: float) -> list[float]:
    """The times of the trace relative to its first request, multiplied by `slowdown`."""
    return [(p.arrival_s - prompts[0].arrival_s) * slowdown for p in prompts]


async def run_load(
    count: int,
    send: Callable[[int], Awaitable[A]],
    due_s: Sequence[float],
    max_concurrency: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Run[A]:
    """Send requests 0 … count−1. A cancelled run keeps the finished requests, if any.

    Args:
        send: sends one request; a BanyanError is that request's failure.
        due_s: when each is due, seconds from the start, ascending.
        progress: called with the number of finished requests.
    """
    watch = SelfWatch()
    outcomes: list[A | BanyanError | None] = [None] * count
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    done = 0

    async def one(index: int) -> None:
        nonlocal done
        try:
            outcomes[index] = await send(index)
        except BanyanError as error:
            outcomes[index] = error
        finally:
            if slots is not None:
                slots.release()
            done += 1
            progress(done)

    gc.collect()
    gc.disable()  # a garbage collection pause would look like server latency
    ticking = asyncio.create_task(_tick(watch.loop_lag_s))
    is_cut = False
    cpu_began, began = time.process_time(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(count):
                wait_s = began + due_s[index] - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                if slots is not None:
                    await slots.acquire()
                else:
                    watch.send_lag_s.append(time.perf_counter() - began - due_s[index])
                group.create_task(one(index))
    except asyncio.CancelledError:
        is_cut = True
        if all(outcome is None for outcome in outcomes):
            raise
    finally:
        ticking.cancel()
        gc.enable()
    duration_s = time.perf_counter() - began
    watch.cpu_share = (time.process_time() - cpu_began) / duration_s
    finished = {i: outcome for i, outcome in enumerate(outcomes) if outcome is not None}
    assert is_cut or len(finished) == count
    return Run(list(finished.values()), duration_s, watch, list(finished), is_cut)


async def _tick(lag_s: list[float]) -> None:
    while True:
        due = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lag_s.append(max(0.0, time.perf_counter() - due))
