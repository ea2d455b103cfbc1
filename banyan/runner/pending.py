"""A plan on its way through the runner: what has been begun of it, and what gives the result."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from banyan.base.log import logger
from banyan.messages.plan import CopyResult, StepPlan, StepResult
from banyan.runner.batch import Batch
from banyan.runner.multi_step import MultiStep

log = logger(__name__)


class PendingStep:
    """A launched step. `seconds` counts launching and waiting, not what lies between.

    Args:
        copies: what is told of its copies when it has run.
        is_broken: the launch failed, so that nobody knows which of its copies were made.
    """

    def __init__(
        self,
        plan: StepPlan,
        copies: CopyResult,
        finish: Callable[[], StepResult],
        launch_s: float,
        is_broken: bool = False,
    ) -> None:
        self._plan = plan
        self._copies = copies
        self._finish = finish
        self._launch_s = launch_s
        self._is_broken = is_broken

    def result(self) -> StepResult:
        """The outcome; waits for the device."""
        began = time.perf_counter()
        try:
            result = self._finish()
        except Exception as error:
            log.exception("step=%d failed", self._plan.step)
            result = failed(self._plan, error)
        seconds = self._launch_s + time.perf_counter() - began
        return StepResult(
            step=self._plan.step,
            tokens=result.tokens,
            scores=result.scores,
            failed=result.failed,
            error=result.error,
            seconds=seconds,
            drafts=result.drafts,
            vectors=result.vectors,
            hidden=result.hidden,
            draft_seconds=result.draft_seconds,
            parents=result.parents,
        )

    def copies(self) -> CopyResult | None:
        """The plan's page copies that ended with the step. None when it had none."""
        ids, failed = self._copies.ids, self._copies.failed
        if not ids and not failed:
            return None
        return CopyResult(ids=[], failed=[*ids, *failed]) if self._is_broken else self._copies


@dataclass(frozen=True)
class BegunStep:
    """A plan whose rows have been through this rank's layers, and may have others before them.

    Attributes:
        failed: index in the plan -> why this row could not run.
    """

    plan: StepPlan
    batch: Batch
    failed: dict[int, str]
    multi_step: MultiStep | None = None
    chosen: np.ndarray | None = None
    """The experts that its tokens chose in these layers; None where nobody asks."""

    @property
    def has_run(self) -> bool:
        return bool(self.batch.rows or self.plan.replica_loads)


def failed(plan: StepPlan, error: Exception) -> StepResult:
    return StepResult(step=plan.step, error=f"{type(error).__name__}: {error}")


def after(met: Callable[[], object], finish: Callable[[], StepResult]) -> Callable[[], StepResult]:
    """A result that waits for something else too."""

    def wait() -> StepResult:
        met()
        return finish()

    return wait
