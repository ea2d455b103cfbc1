"""MicroBatches: which requests a step takes where steps follow each other through stages.

Every stage shall have work, so one step takes its share of the requests and leaves the others to
the steps behind it: those that decode are dealt out evenly, those that have waited longest first.
Few rows stay together: a step of them takes as long as its weights take to be read, which two steps
read twice. Pieces of prompts follow one another as fast as the step's budget allows.
"""

from collections.abc import Iterator

from banyan.scheduler.budget import Limits
from banyan.scheduler.request import RUNNING, Request
from banyan.scheduler.step_plan_builder import StepPlanBuilder

FEW = 8
"""Rows that take about as long as one."""


class MicroBatches:
    def __init__(self, limits: Limits) -> None:
        self._stages = limits.token_gap + 1
        self._most = limits.micro_batch

    def of(self, running: list[Request], builder: StepPlanBuilder) -> Iterator[Request]:
        """Those to plan, in their order; asked while rows are added to the sheet."""
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
        """The step has as many requests as one may have."""
        return 0 < self._most <= len(builder.rows)
