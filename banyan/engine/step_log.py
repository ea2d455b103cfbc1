"""StepLog: one line about the load every so many steps that generate (--decode-log-interval).

Knows what is counted elsewhere; counts nothing but steps and the time in which there was work.
"""

from banyan.base.log import logger
from banyan.messages.events import Stats
from banyan.messages.plan import SAMPLE, StepPlan

log = logger(__name__)


class StepLog:
    """
    Args:
        interval: steps from line to line; 0 = no lines.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._steps = 0
        self._output_tokens = 0
        """That had been generated at the last line."""
        self._busy_s = 0.0
        """In which requests were there since the last line, the present stretch aside."""
        self._since_s: float | None = None
        """When the present stretch of work began; None while there is none."""

    def wakes(self, now: float) -> None:
        """There is work."""
        if self._since_s is None:
            self._since_s = now

    def rests(self, now: float) -> None:
        """There is no more work."""
        if self._since_s is not None:
            self._busy_s += now - self._since_s
            self._since_s = None

    def counts(self, plan: StepPlan) -> bool:
        """Take in a step that is complete; whether a line is due."""
        if self._interval and any(row.want & SAMPLE for row in plan.rows):
            self._steps += 1
        return 0 < self._interval <= self._steps

    def tell(self, stats: Stats, now: float) -> None:
        """Write the line, and begin anew."""
        was_busy = self._since_s is not None
        self.rests(now)
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
            self.wakes(now)
