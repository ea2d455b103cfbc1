"""How much a step may take on, and how much room running requests are expected to need.

The expectation is SGLang's new-token ratio: the share of its allowed output that a request is
assumed to produce. It falls while steps go by without trouble, and rises after a retraction to what
the running requests have really used.
"""

from dataclasses import dataclass

from banyan.scheduler.request import Request

DRAFT_ROOM = 64
"""Drafts that are worth verifying beside each other: steps of more tokens take longer with each."""


@dataclass(frozen=True)
class Growth:
    """What running requests are expected to add.

    Attributes:
        start: share of its allowed output that a request is assumed to produce at first.
        floor_share: share of `start` below which the expectation does not fall.
        decay_steps: steps with decode rows from `start` to there.
        retract_steps: decode steps of room that a retraction should have made.
        clip_tokens: longer remaining outputs are counted as this many.
    """

    start: float = 0.7
    floor_share: float = 0.14
    decay_steps: int = 600
    retract_steps: int = 20
    clip_tokens: int = 4096


@dataclass(frozen=True)
class Priorities:
    """What the priority of a request means.

    Attributes:
        are_honoured: higher ones go first; False = all requests are equal.
        low_first: lower ones go first instead.
        preemption_gap: a waiting request takes the place of running ones that are at least this
            much below it; 0 = never.
        refuse_when_off: refuse requests that bring one while they are not honoured.
        max_wait_s: who has waited longer goes before all others; 0 = nobody does.
    """

    are_honoured: bool = False
    low_first: bool = False
    preemption_gap: int = 10
    refuse_when_off: bool = False
    max_wait_s: float = 0.0

    def of(self, given: int) -> int:
        """The priority that counts; higher goes first."""
        if not self.are_honoured:
            return 0
        return -given if self.low_first else given


@dataclass(frozen=True)
class Limits:
    """What the scheduler may not exceed.

    Attributes:
        max_running: requests that hold slots at once.
        chunk_tokens: known tokens per step over all rows.
        whole_prompts: a prompt is never cut; one that is longer than a step goes alone.
        max_prompts: requests whose prompts one step computes, whole or in part; 0 = unbounded.
        max_queued: waiting requests before new ones are refused; 0 = unbounded.
        max_queued_tokens: of their prompts, likewise.
        wait_s: longest that a request waits until it runs; 0 = any time.
        run_s: longest that it runs from then on; 0 = any time.
        max_request_tokens: longest prompt + output.
        depth: plans with rows that may be in flight at once.
        token_gap: steps between sampling a token and a row that needs it (stages − 1).
        micro_batch: requests of one step; 0 = all that run.
        drafts: tokens the runner drafts after each sampled one; 0 = no speculation.
        draft_levels: passes that drafting takes at most where it is paid and drafts branch or come
            in blocks; 0 = one for each draft.
        block_drafts: one pass reads all of them, the last one too.
        paid_drafts: drafting takes time and pages of its own, so no more is drafted than is asked.
        fixed_drafts: as many are made and verified as may be, whatever they bring and cost.
        draft_room: drafts of one step, over all rows.
        burst: decode steps that one plan may hold (scheduler/multi_step.py).
        conservativeness: scales the new-token ratio.
        growth: what that ratio is made of.
        priorities: who goes before whom.
    """

    max_running: int
    chunk_tokens: int
    max_request_tokens: int
    depth: int = 1
    max_queued: int = 0
    max_queued_tokens: int = 0
    wait_s: float = 0.0
    run_s: float = 0.0
    token_gap: int = 0
    drafts: int = 0
    draft_levels: int = 0
    block_drafts: bool = False
    paid_drafts: bool = False
    fixed_drafts: bool = False
    conservativeness: float = 1.0
    priorities: Priorities = Priorities()
    whole_prompts: bool = False
    max_prompts: int = 0
    growth: Growth = Growth()
    draft_room: int = DRAFT_ROOM
    multi_step: int = 1
    micro_batch: int = 0

    @property
    def starts_are_bounds(self) -> bool:
        """Rows in flight may yield fewer tokens than planned."""
        return self.drafts > 0 or self.multi_step > 1


class NewTokenRatio:
    """Expected share of the allowed output."""

    def __init__(self, conservativeness: float, growth: Growth = Growth()) -> None:
        self._start = min(1.0, growth.start * conservativeness)
        self._floor = min(1.0, self._start * growth.floor_share)
        self._step = (self._start - self._floor) / growth.decay_steps
        self._room = growth.retract_steps
        self._clip = growth.clip_tokens
        self.value = self._start

    def reset(self) -> None:
        """The engine is idle."""
        self.value = self._start

    def decay(self) -> None:
        """A step with decode rows went by without trouble."""
        self.value = max(self._floor, self.value - self._step)

    def retracted(self, running: list[Request]) -> None:
        """Room ran out: expect what is really being used."""
        decoded = sum(r.output_len for r in running)
        allowed = sum(r.sampling.max_new_tokens for r in running)
        self.value = min(1.0, (decoded + self._room * len(running)) / (allowed + 1))

    def expects(self, request: Request) -> int:
        """Tokens the request is still expected to add."""
        left = min(request.limit - request.known, self._clip)
        return int(left * (1.0 if request.sampling.ignore_eos else self.value))
