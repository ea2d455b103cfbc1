"""StepLog: log lines about the load while requests run (--decode-log-interval).

SGLang's form, which dashboards and scripts read: one line for each step that computes prompts, and
one every so many decode steps. `--step-log-format plain` has one line of key=value pairs instead.
"""

from collections.abc import Sequence

from banyan.base.log import logger
from banyan.base.trace import Marks
from banyan.messages.events import Stats, accept_length
from banyan.messages.plan import SAMPLE, StepPlan

log = logger(__name__)


class StepLog:
    """Counts steps and busy time; the other numbers come from Stats.

    Args:
        interval: decode steps between two lines; 0 = no lines.
        is_plain: one line of key=value pairs instead of SGLang's.
        costs: sections of these threads whose mean times follow each line (--show-time-cost).
    """

    def __init__(self, interval: int, is_plain: bool = False, costs: Sequence[Marks] = ()) -> None:
        self.capacity = 0
        """Tokens that the KV cache holds."""
        self._interval = interval
        self._is_plain = is_plain
        self._costs = costs
        for marks in costs:
            marks.totals = {}
        self._steps = 0
        self._prompts: set[int] = set()
        """Slots whose prompts are not computed yet."""
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
        """Count a committed step; returns whether a line of `write` is due."""
        if self._interval and any(row.want & SAMPLE for row in plan.rows):
            self._steps += 1
        return 0 < self._interval <= self._steps

    def prompts_of(self, plan: StepPlan) -> tuple[int, int, int]:
        """How many prompts a committed step has computed, whole or in part, how many of their
        tokens, and how many tokens came from the cache; zeros if no line is wanted."""
        if not self._interval or self._is_plain:
            return 0, 0, 0
        entered = {join.slot for join in plan.joins}
        self._prompts = (self._prompts - set(plan.leaves)) | entered
        if not self._prompts:
            return 0, 0, 0
        rows = [row for row in plan.rows if row.slot in self._prompts]
        cached = sum(row.start for row in rows if row.slot in entered)
        self._prompts -= {row.slot for row in rows if row.want & SAMPLE}
        return len(rows), sum(row.count for row in rows), cached

    def write_prompts(self, prompts: tuple[int, int, int], stats: Stats) -> None:
        """Write the line of a step that has computed prompts."""
        count, tokens, cached = prompts
        log.info(
            "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d",
            count,
            tokens,
            cached,
            _usage(stats),
            max(0, stats.running - count),
            stats.waiting,
        )

    def write(self, stats: Stats, now: float) -> None:
        """Write the line and reset the counts."""
        was_busy = self._since_s is not None
        self.end_work(now)
        tokens = stats.output_tokens - self._output_tokens
        tokens_per_s = tokens / self._busy_s if self._busy_s else 0.0
        if self._is_plain:
            log.info(
                "decode steps=%d running=%d waiting=%d tokens_per_s=%.1f pages=%d/%d hit_rate=%.2f",
                self._steps,
                stats.running,
                stats.waiting,
                tokens_per_s,
                stats.held_pages + stats.in_flight_pages,
                stats.total_pages,
                stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
            )
        else:
            accepted = accept_length(stats)
            log.info(
                "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, %s"
                "gen throughput (token/s): %.2f, #queue-req: %d",
                stats.running,
                round(_usage(stats) * self.capacity),
                _usage(stats),
                "" if accepted is None else f"accept len: {accepted:.2f}, ",
                tokens_per_s,
                stats.waiting,
            )
        self._write_costs()
        self._steps, self._output_tokens, self._busy_s = 0, stats.output_tokens, 0.0
        if was_busy:
            self.begin_work(now)

    def _write_costs(self) -> None:
        for marks in self._costs:
            spent, marks.totals = marks.totals or {}, {}
            each = ", ".join(f"{n}: {1e3 * s / self._steps:.3f} ms" for n, s in spent.items())
            log.info("time cost of the %s for each decode step: %s", marks.lane, each or "nothing")


def _usage(stats: Stats) -> float:
    """The part of the KV cache that running requests hold."""
    held = stats.held_pages + stats.in_flight_pages
    return held / stats.total_pages if stats.total_pages else 0.0
