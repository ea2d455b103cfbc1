"""StepPlanBuilder: a step plan under construction."""

from banyan.base.ids import SlotId, StepId
from banyan.messages.control_ops import ControlOp
from banyan.messages.plan import (
    SAMPLE,
    SCORE,
    Join,
    Mask,
    NewContent,
    PageCopy,
    PageGrant,
    Piece,
    Row,
    StepLoad,
    StepPlan,
)
from banyan.scheduler.request import Flight


class StepPlanBuilder:
    """Collects the parts of one StepPlan, and the flights that expect its results.

    Args:
        leaves: slots that were released since the last plan.
        chunk_tokens: prompt tokens that the step may run.
        max_prompts: prompts that the step may run, whole or in part; 0 = unlimited.
        running: requests that run at the start of the step.
        draft_budget: drafts that the step may verify.
    """

    def __init__(
        self,
        step: StepId,
        leaves: list[SlotId],
        chunk_tokens: int,
        max_prompts: int = 0,
        running: int = 0,
        draft_budget: int = 0,
    ) -> None:
        self.step = step
        self.leaves = leaves
        self.joins: list[Join] = []
        self.grants: list[PageGrant] = []
        self.copies: list[PageCopy] = []
        self.rows: list[Row] = []
        self.masks: list[Mask] = []
        self.control_ops: list[ControlOp] = []
        self.forget: list[int] = []
        self.contents: list[NewContent] = []
        self.pieces: list[Piece] = []
        self.flights: list[Flight] = []
        self.budget = chunk_tokens
        """Prompt tokens left."""
        self.running = max(1, running)
        self.draft_budget = draft_budget
        """Drafts left."""
        self._max_prompts = max_prompts
        self._prompts = 0
        self.is_starved = False
        """A running request lacks pages, so no new request is admitted."""
        self.missing_pages: list[int] = []
        """Pages per group that the last starved request lacks."""
        self.has_decode = False
        self.steps = 1
        self.report_every = 0
        """As StepPlan.report_every."""

    @property
    def has_work(self) -> bool:
        """Leaves, joins and grants alone can wait for the next plan with rows."""
        return bool(self.rows or self.copies or self.control_ops or self.pieces)

    def spend(self, tokens: int) -> None:
        """Account for a row of `tokens` prompt tokens."""
        self._prompts += 1
        self.budget = 0 if self._prompts == self._max_prompts else self.budget - tokens

    @property
    def load(self) -> StepLoad:
        """The load of the rows, for the other replicas of the step (DP attention)."""
        rows = self.rows
        return StepLoad(
            tokens=sum(row.count for row in rows),
            outputs=sum(row.drafts + 1 for row in rows if row.want & SAMPLE),
            scores=sum(_scored(row) for row in rows if row.want & SCORE),
        )

    def plan(self, loads: list[StepLoad]) -> StepPlan:
        """The finished plan; `loads` of all replicas, [] without DP attention."""
        return StepPlan(
            step=self.step,
            leaves=self.leaves if self.has_work else [],
            joins=self.joins,
            grants=self.grants,
            copies=self.copies,
            rows=self.rows,
            masks=self.masks,
            replica_loads=loads,
            control_ops=self.control_ops,
            steps=self.steps if self.rows else 1,
            forget=self.forget,
            contents=self.contents,
            pieces=self.pieces,
            report_every=self.report_every if self.rows and self.steps > 1 else 0,
        )


def _scored(row: Row) -> int:
    """Most known tokens that a row scores: those after its own positions, up to its end."""
    end = row.start + row.count - bool(row.want & SAMPLE)
    return max(0, end + 1 - max(row.start + 1, row.score_from))
