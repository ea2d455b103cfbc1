"""How much a step may take on, and how much room running requests are expected to need.

The expectation is SGLang's new-token ratio: the share of its allowed output that a request is
assumed to produce. It starts at 0.7 × conservativeness, falls over 600 steps with decode rows to
14 % of that, and rises after a retraction to what the running requests have really used.
"""

from dataclasses import dataclass

from banyan.scheduler.request import Request

START = 0.7
FLOOR_SHARE = 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20
"""Decode steps of room that a retraction should have made."""
CLIP_TOKENS = 4096
"""Longer remaining outputs are counted as this many."""


@dataclass(frozen=True)
class Priorities:
    """What the priority of a request means.

    Attributes:
        are_honoured: higher ones go first; False = all requests are equal.
        low_first: lower ones go first instead.
        preemption_gap: a waiting request takes the place of running ones that are at least this
            much below it; 0 = never.
        refuse_when_off: refuse requests that bring one while they are not honoured.
    """

    are_honoured: bool = False
    low_first: bool = False
    preemption_gap: int = 10
    refuse_when_off: bool = False

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
        max_request_tokens: longest prompt + output.
        depth: plans with rows that may be in flight at once.
        token_gap: steps between sampling a token and a row that needs it (stages − 1).
        drafts: tokens the runner drafts after each sampled one; 0 = no speculation.
        conservativeness: scales the new-token ratio.
        priorities: who goes before whom.
    """

    max_running: int
    chunk_tokens: int
    max_request_tokens: int
    depth: int = 1
    max_queued: int = 0
    token_gap: int = 0
    drafts: int = 0
    conservativeness: float = 1.0
    priorities: Priorities = Priorities()
    whole_prompts: bool = False
    max_prompts: int = 0


class NewTokenRatio:
    """Expected share of the allowed output."""

    def __init__(self, conservativeness: float) -> None:
        self._start = min(1.0, START * conservativeness)
        self._floor = self._start * FLOOR_SHARE
        self._step = (self._start - self._floor) / DECAY_STEPS
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
        self.value = min(1.0, (decoded + RETRACT_STEPS * len(running)) / (allowed + 1))

    def expects(self, request: Request) -> int:
        """Tokens the request is still expected to add."""
        left = min(request.limit - request.known, CLIP_TOKENS)
        return int(left * (1.0 if request.sampling.ignore_eos else self.value))
