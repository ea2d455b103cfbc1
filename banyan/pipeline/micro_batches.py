"""MicroBatches: which requests each step runs with pipeline stages.

Every stage needs work, so a step takes only its share of the decoding requests and leaves the rest
to the next steps. Requests that have waited longest go first. Up to FEW rows stay together: a step
of a few rows takes as long as reading the weights, which two steps would read twice. Prompt chunks
follow each other as fast as the step's token budget allows.
"""

from collections.abc import Iterator

from banyan.scheduler.budget import SchedulerLimits
from banyan.scheduler.request import RUNNING, Request
from banyan.scheduler.step_plan_builder import StepPlanBuilder

FEW = 8
"""Rows that take about as long as one."""


class MicroBatches:
    def __init__(self, limits: SchedulerLimits) -> None:
        self._stages = limits.token_gap + 1
        self._most = limits.micro_batch

    def select(self, running: list[Request], builder: StepPlanBuilder) -> Iterator[Request]:
        """The requests to plan, in order. Lazy: the caller adds their rows to `builder` meanwhile,
        and may retract requests.
        """
        if self._stages == 1:
            yield from list(running)
            return
        decoding = sum(request.is_decoding for request in running)
        share = max(FEW, -(-decoding // self._stages))
        taken = 0
        for request in sorted(running, key=lambda r: (r.latest_step, r.rank)):
            is_decode = request.state == RUNNING and request.is_decoding
            if self.is_full(builder):
                return
            if is_decode and taken == share:
                continue
            rows = len(builder.rows)
            yield request
            taken += is_decode and len(builder.rows) > rows

    def is_full(self, builder: StepPlanBuilder) -> bool:
        """The step has reached the micro-batch size."""
        return 0 < self._most <= len(builder.rows)
