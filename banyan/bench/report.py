"""Results of a benchmark: a table, a line of JSON, and a plot over time (needs matplotlib).

Definitions: TTFT = request sent to first token; TPOT = first to last token / (tokens − 1), per
request; ITL = gap between two events, shared out evenly when an event brings several tokens;
E2E = request sent to last token. Tokens are those that the server counts, where it does.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from banyan.base.errors import BanyanError, ConfigError
from banyan.base.install import install_command
from banyan.bench.datasets import Prompt
from banyan.bench.dialects import Answer

_GOAL = re.compile(r"(ttft|tpot|itl|e2e|e2el):(\d+(?:\.\d+)?)")
_SPREADS = (90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the nearest ranks; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True)
class Timing:
    """One answered request, in seconds."""

    ttft: float
    e2e: float
    tpot: float | None
    """None for an answer of one token."""
    itls: list[float]


def timing(answer: Answer) -> Timing:
    """Times of an answer with at least one token."""
    first, last = answer.times[0][0], answer.times[-1][0]
    tokens = max(answer.output_tokens, answer.so_far)
    itls = []
    for (before, had), (at, has) in zip(answer.times, answer.times[1:], strict=False):
        itls += [(at - before) / (has - had)] * (has - had)
    later = tokens - 1
    return Timing(
        ttft=first - answer.started,
        e2e=last - answer.started,
        tpot=(last - first) / later if later > 0 else None,
        itls=itls,
    )


def read_goals(words: Iterable[str]) -> dict[str, float]:
    """["ttft:500", "tpot:50"] as seconds by name; e2el is e2e."""
    goals = {}
    for word in words:
        match = _GOAL.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"--goodput {word!r} is not NAME:MILLISECONDS",
                hint="names are ttft, tpot, itl, e2e",
            )
        goals[match[1].replace("e2el", "e2e")] = float(match[2]) / 1e3
    return goals


def meets(timing: Timing, goals: dict[str, float]) -> bool:
    """Whether one request kept every goal; itl means its mean gap."""
    seen = {
        "ttft": timing.ttft,
        "tpot": timing.tpot or 0.0,
        "itl": statistics.fmean(timing.itls) if timing.itls else 0.0,
        "e2e": timing.e2e,
    }
    return all(seen[name] <= limit for name, limit in goals.items())


def results(
    prompts: Sequence[Prompt],
    outcomes: Sequence[Answer | BanyanError],
    duration_s: float,
    goals: dict[str, float],
) -> dict[str, object]:
    """Every figure under the key that bench_serving gives it."""
    good = [(p, a) for p, a in zip(prompts, outcomes, strict=True) if isinstance(a, Answer)]
    timings = [timing(answer) for _, answer in good]
    inputs = [p.length if a.prompt_tokens is None else a.prompt_tokens for p, a in good]
    input_tokens = sum(inputs)
    output_tokens = sum(answer.output_tokens for _, answer in good)
    cached = [a.cached_tokens for _, a in good if a.cached_tokens is not None]
    keys: dict[str, object] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": input_tokens,
        "total_input_text_tokens": input_tokens,
        "total_input_vision_tokens": 0,
        "total_output_tokens": output_tokens,
        "total_cached_tokens": sum(cached) if cached else None,
        "cache_hit_rate": sum(cached) / input_tokens if cached and input_tokens else None,
        "request_throughput": len(good) / duration_s,
        "input_throughput": input_tokens / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_throughput": (input_tokens + output_tokens) / duration_s,
        "concurrency": sum(t.e2e for t in timings) / duration_s,
        "max_output_tokens_per_s": _busiest_second([a for _, a in good]),
        "max_concurrent_requests": _most_at_once([a for _, a in good]),
        "is_counted": all(a.is_counted for _, a in good),
    }
    if goals:
        kept = sum(meets(t, goals) for t in timings)
        keys["request_goodput"] = kept / duration_s
        keys["goodput_share"] = kept / len(outcomes)
    keys |= spread_keys("e2e_latency", [t.e2e for t in timings])
    keys |= spread_keys("ttft", [t.ttft for t in timings])
    keys |= spread_keys("tpot", [t.tpot for t in timings if t.tpot is not None])
    keys |= spread_keys("itl", [gap for t in timings for gap in t.itls])
    return keys


def spread_keys(name: str, seconds: Sequence[float]) -> dict[str, object]:
    """mean, median, std and percentiles, in milliseconds; zeros of nothing."""
    ms = [s * 1e3 for s in seconds]
    keys: dict[str, object] = {
        f"mean_{name}_ms": statistics.fmean(ms) if ms else 0.0,
        f"median_{name}_ms": statistics.median(ms) if ms else 0.0,
        f"std_{name}_ms": statistics.pstdev(ms) if ms else 0.0,
    }
    keys |= {f"p{percent}_{name}_ms": percentile(ms, percent) for percent in _SPREADS}
    keys[f"max_{name}_ms"] = max(ms, default=0.0)
    return keys


def failures(outcomes: Iterable[object]) -> list[tuple[str, int]]:
    """(what went wrong, how often), most frequent first."""
    return Counter(str(o) for o in outcomes if isinstance(o, BanyanError)).most_common()


def _busiest_second(answers: Sequence[Answer]) -> float:
    """Most tokens that came within one whole second of the run."""
    began = min((a.started for a in answers), default=0.0)
    seconds: Counter[int] = Counter()
    for answer in answers:
        had = 0
        for at, has in answer.times:
            seconds[int(at - began)] += has - had
            had = has
    return float(max(seconds.values(), default=0))


def _most_at_once(answers: Sequence[Answer]) -> int:
    """Most requests that were open at one moment."""
    changes = [(a.started, 1) for a in answers] + [(a.times[-1][0], -1) for a in answers]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


_WIDTH = 50
_SHOWN_ERRORS = 5

_HEAD = (
    ("Backend:", "backend"),
    ("Traffic request rate:", "request_rate"),
    ("Max request concurrency:", "max_concurrency"),
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Total generated tokens (retokenized):", "total_output_tokens_retokenized"),
    ("Total cached tokens:", "total_cached_tokens"),
    ("Cache hit rate:", "cache_hit_rate"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Goodput share:", "goodput_share"),
    ("Input token throughput (tok/s):", "input_throughput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_throughput"),
    ("Concurrency:", "concurrency"),
    ("Accept length:", "accept_length"),
)
_LATENCIES = (
    ("End-to-End Latency", "E2E Latency", "e2e_latency"),
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-Token Latency", "ITL", "itl"),
)
_OPTIONAL = ("total_output_tokens_retokenized", "total_cached_tokens", "cache_hit_rate",
             "request_goodput", "goodput_share", "accept_length")  # fmt: skip
"""Rows that are omitted if they have no value."""


def serving_table(keys: Mapping[str, object]) -> str:
    rows = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    for label, key in _HEAD:
        value = keys.get(key)
        if value is not None or key not in _OPTIONAL:
            rows.append(_row(label, "not set" if value is None else value))
    for title, label, name in _LATENCIES:
        rows.append(f"{title:-^{_WIDTH}}")
        for part in ("Mean", "Median", "P90", "P99"):
            rows.append(_row(f"{part} {label} (ms):", keys[f"{part.lower()}_{name}_ms"]))
    rows.append(f"{'Load generator':-^{_WIDTH}}")
    rows.append(_row("CPU share of one core:", keys["client_cpu_share"]))
    rows.append(_row("P99 loop lag (ms):", keys["client_loop_lag_p99_ms"]))
    rows.append(_row("P99 send lag (ms):", keys["client_send_lag_p99_ms"]))
    rows.append("=" * _WIDTH)
    return "\n".join(rows)


def throughput_table(keys: Mapping[str, object]) -> str:
    labels = (
        ("Backend:", "backend"),
        ("Successful requests:", "successful_requests"),
        ("Benchmark duration (s):", "total_latency"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Input token throughput (tok/s):", "input_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Total token throughput (tok/s):", "total_throughput"),
    )
    rows = [" Offline Throughput Benchmark Result ".center(_WIDTH, "=")]
    rows += [_row(label, keys[key]) for label, key in labels]
    return "\n".join([*rows, "=" * _WIDTH])


def error_lines(counts: Iterable[tuple[str, int]]) -> list[str]:
    """The most frequent errors with their counts."""
    found = list(counts)
    lines = [f"  {count} × {text}" for text, count in found[:_SHOWN_ERRORS]]
    if len(found) > _SHOWN_ERRORS:
        lines.append(f"  … and {len(found) - _SHOWN_ERRORS} other kinds (--output-details)")
    return lines


def append_line(path: str, keys: Mapping[str, object]) -> None:
    """Add one JSON line to a results file."""
    try:
        with Path(path).open("ab") as file:
            file.write(orjson.dumps(dict(keys), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    except OSError as error:
        raise ConfigError(f"the results cannot be written to {path}: {error}") from None


def _row(label: str, value: object) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"


_SIZE_INCHES = (10, 9)


def check_plotting() -> None:
    """Raise ConfigError before a long run if matplotlib is missing."""
    _figure()


def draw(path: str, answers: Sequence[Answer], title: str) -> None:
    """Plot TTFT, token gaps and throughput to `path`; its suffix selects the format.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    figure_class = _figure()
    if not answers:
        raise ConfigError("there is nothing to plot: no request completed")
    began = min(a.started for a in answers)
    timings = [timing(a) for a in answers]
    figure = figure_class(figsize=_SIZE_INCHES, layout="constrained")
    figure.suptitle(title)
    first, gaps, rate = figure.subplots(3, 1)
    sent = [a.started - began for a in answers]
    first.scatter(sent, [t.ttft * 1e3 for t in timings], s=8)
    first.set(ylabel="TTFT (ms)", xlabel="sent at (s)")
    ordered = sorted(gap * 1e3 for t in timings for gap in t.itls)
    gaps.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
    gaps.set(xlabel="inter-token latency (ms)", ylabel="share below", xscale="log")
    seconds, tokens = _tokens_by_second(answers, began)
    rate.step(seconds, tokens, where="post")
    rate.set(xlabel="time (s)", ylabel="output tokens / s")
    for axes in (first, gaps, rate):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from None


def _tokens_by_second(answers: Sequence[Answer], began: float) -> tuple[list[int], list[int]]:
    last = max(a.times[-1][0] for a in answers)
    tokens = [0] * (int(last - began) + 1)
    for answer in answers:
        had = 0
        for at, has in answer.times:
            tokens[int(at - began)] += has - had
            had = has
    return list(range(len(tokens))), tokens


def _figure() -> type[Any]:
    """matplotlib's Figure, without its state machine or a display."""
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib", hint=f"run: {install_command('plot')}"
        ) from None
