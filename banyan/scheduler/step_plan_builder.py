"""StepPlanBuilder: a step plan while it is being put together."""

from banyan.base.ids import SlotId, StepId
from banyan.messages.control_ops import ControlOp
from banyan.messages.plan import (
    SAMPLE,
    SCORE,
    Join,
    Mask,
    PageCopy,
    PageGrant,
    Row,
    StepLoad,
    StepPlan,
)
from banyan.scheduler.request import Flight


class StepPlanBuilder:
    """Collects what goes into one StepPlan, and the flights that will expect its results."""

    def __init__(
        self,
        step: StepId,
        leaves: list[SlotId],
        chunk_tokens: int,
        max_prompts: int = 0,
        running: int = 0,
        draft_room: int = 0,
    ) -> None:
        self.step = step
        self.leaves = leaves
        self.joins: list[Join] = []
        self.grants: list[PageGrant] = []
        self.copies: list[PageCopy] = []
        self.rows: list[Row] = []
        self.masks: list[Mask] = []
        self.control_ops: list[ControlOp] = []
        self.flights: list[Flight] = []
        self.budget = chunk_tokens
        """Known tokens that the step may still take on."""
        self.running = max(1, running)
        """Requests that run when it is begun."""
        self.draft_room = draft_room
        """Drafts that the step may still verify."""
        self._max_prompts = max_prompts
        self._prompts = 0
        self.is_starved = False
        """A running request lacks pages, so nobody new is admitted."""
        self.starved_of: list[int] = []
        """Pages per group that the last starved request lacks."""
        self.has_decode = False
        self.steps = 1
        self.report_every = 0
        """Of a burst."""

    @property
    def has_work(self) -> bool:
        """Leaves, joins and grants alone can wait for the next plan with rows."""
        return bool(self.rows or self.copies or self.control_ops)

    def spend(self, tokens: int) -> None:
        """A row of known tokens was planned; the last prompt that the step may take ends it."""
        self._prompts += 1
        self.budget = 0 if self._prompts == self._max_prompts else self.budget - tokens

    @property
    def load(self) -> StepLoad:
        """What the rows bring to a step of several replicas."""
        rows = self.rows
        return StepLoad(
            tokens=sum(row.count for row in rows),
            outputs=sum(row.drafts + 1 for row in rows if row.want & SAMPLE),
            scores=sum(_scored(row) for row in rows if row.want & SCORE),
        )

    def plan(self, loads: list[StepLoad]) -> StepPlan:
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
            report_every=self.report_every if self.rows and self.steps > 1 else 0,
        )


def _scored(row: Row) -> int:
    """Most positions of known tokens that a row scores: those behind its own, up to its end."""
    end = row.start + row.count - bool(row.want & SAMPLE)
    return max(0, end + 1 - max(row.start + 1, row.score_from))
