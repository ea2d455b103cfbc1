"""SimulationReport: what clients of a simulated replica would have seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class RequestTimes:
    """One request: when its tokens came. `end_s` below 0 = it failed."""

    submitted_s: float
    prompt_len: int
    token_s: list[float] = field(default_factory=list[float])
    """Arrival time of each output token."""
    cached_tokens: int = 0
    end_s: float = -1.0


@dataclass(frozen=True)
class Spread:
    """Percentiles, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    def __str__(self) -> str:
        parts = (("mean", self.mean), ("p50", self.p50), ("p90", self.p90), ("p99", self.p99))
        return "  ".join(f"{name} {value * 1e3:9.2f} ms" for name, value in parts)


def spread(values: Sequence[float]) -> Spread:
    """Percentiles by the nearest rank; zeros of nothing."""
    if not values:
        return Spread(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    ranks = [
        ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)
    ]
    return Spread(sum(ordered) / len(ordered), *ranks)


@dataclass(frozen=True)
class SimulationReport:
    """Figures of one run."""

    finished: int
    failed: int
    seconds: float
    steps: int
    retractions: int
    output_tokens: int
    hit_rate: float
    """Share of the prompt tokens that came from the cache."""
    ttft: Spread
    itl: Spread
    e2e: Spread

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return "\n".join(
            (
                f"requests  {self.finished} finished, {self.failed} failed in {self.seconds:.3f} s",
                f"output    {self.output_tokens} tokens, {self.tokens_per_s:.1f} per second",
                f"cache     {self.hit_rate:.1%} of prompt tokens hit",
                f"engine    {self.steps} steps, {self.retractions} retractions",
                f"ttft      {self.ttft}",
                f"itl       {self.itl}",
                f"e2e       {self.e2e}",
            )
        )


def report(
    visits: Sequence[RequestTimes], seconds: float, steps: int, retractions: int
) -> SimulationReport:
    done = [visit for visit in visits if visit.end_s >= 0]
    prompt_tokens = sum(visit.prompt_len for visit in done)
    gaps = [
        later - earlier
        for visit in done
        for earlier, later in zip(visit.token_s, visit.token_s[1:], strict=False)
    ]
    return SimulationReport(
        finished=len(done),
        failed=len(visits) - len(done),
        seconds=seconds,
        steps=steps,
        retractions=retractions,
        output_tokens=sum(len(visit.token_s) for visit in done),
        hit_rate=sum(visit.cached_tokens for visit in done) / max(1, prompt_tokens),
        ttft=spread([visit.token_s[0] - visit.submitted_s for visit in done if visit.token_s]),
        itl=spread(gaps),
        e2e=spread([visit.end_s - visit.submitted_s for visit in done]),
    )
