"""Metrics: from answers to the figures of a serving benchmark.

Definitions: TTFT = request sent to first token; TPOT = first to last token / (tokens − 1), per
request; ITL = gap between two events, shared out evenly when an event brings several tokens;
E2E = request sent to last token. Tokens are those that the server counts, where it does.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from banyan.base.errors import BanyanError, ConfigError
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
