"""StepLog: one log line about load every few decode steps (--decode-log-interval)."""

from banyan.base.log import logger
from banyan.messages.events import Stats
from banyan.messages.plan import SAMPLE, StepPlan

log = logger(__name__)


class StepLog:
    """Counts decode steps and busy time; other numbers come from Stats.

    Args:
        interval: steps between lines; 0 = no lines.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._steps = 0
        self._output_tokens = 0
        """Output tokens at the last line."""
        self._busy_s = 0.0
        """Busy seconds since the last line, without the current busy period."""
        self._since_s: float | None = None
        """When the current busy period began; None while idle."""

    def begin_work(self, now: float) -> None:
        """A busy period begins, if none has."""
        if self._since_s is None:
            self._since_s = now

    def end_work(self, now: float) -> None:
        """The busy period ends."""
        if self._since_s is not None:
            self._busy_s += now - self._since_s
            self._since_s = None

    def count(self, plan: StepPlan) -> bool:
        """Count a committed step; returns whether a line is due."""
        if self._interval and any(row.want & SAMPLE for row in plan.rows):
            self._steps += 1
        return 0 < self._interval <= self._steps

    def write(self, stats: Stats, now: float) -> None:
        """Write the line and reset the counts."""
        was_busy = self._since_s is not None
        self.end_work(now)
        tokens = stats.output_tokens - self._output_tokens
        log.info(
            "decode steps=%d running=%d waiting=%d tokens_per_s=%.1f pages=%d/%d hit_rate=%.2f",
            self._steps,
            stats.running,
            stats.waiting,
            tokens / self._busy_s if self._busy_s else 0.0,
            stats.held_pages + stats.in_flight_pages,
            stats.total_pages,
            stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
        )
        self._steps, self._output_tokens, self._busy_s = 0, stats.output_tokens, 0.0
        if was_busy:
            self.begin_work(now)
