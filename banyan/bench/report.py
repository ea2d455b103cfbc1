"""Results of a benchmark: a table, a line of JSON, and a plot over time (needs matplotlib)."""

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.bench.dialects import Answer
from banyan.bench.metrics import timing

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
