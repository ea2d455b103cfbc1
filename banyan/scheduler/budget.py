"""Scheduler limits, and the new-token ratio: the expected growth of running requests.

The new-token ratio is SGLang's: the share of its allowed output that a request is expected to
produce. It decays while decode steps run without a retraction. A retraction raises it to what the
running requests have used so far.
"""

import math
from dataclasses import dataclass

import msgspec

from banyan.scheduler.request import Request
from banyan.scheduler.spans import ContentLimits

DRAFT_BUDGET = 64
"""Drafts that one step verifies at most: beyond this every further token makes a step slower."""


@dataclass(frozen=True)
class Growth:
    """Parameters of the new-token ratio.

    Attributes:
        start: initial ratio, before conservativeness.
        floor_share: lowest ratio, as a share of `start`.
        decay_steps: steps with decode rows from `start` down to the floor.
        retract_steps: decode steps of capacity that a retraction should free.
        clip_tokens: longest remaining output that is taken into account.
        reserved_tokens: a request is expected to add at least so many, if it may.
    """

    start: float = 0.7
    floor_share: float = 0.14
    decay_steps: int = 600
    retract_steps: int = 20
    clip_tokens: int = 4096
    reserved_tokens: int = 0


@dataclass(frozen=True)
class Priorities:
    """How request priorities are used.

    Attributes:
        are_honoured: higher priorities go first; False = all requests are equal.
        low_first: lower numbers go first instead.
        preemption_gap: a waiting request preempts running ones whose priority is lower by at least
            this; 0 = never.
        refuse_when_off: refuse requests with a priority while `are_honoured` is False.
        max_wait_s: requests that have waited longer go before all others; 0 = off.
    """

    are_honoured: bool = False
    low_first: bool = False
    preemption_gap: int = 10
    refuse_when_off: bool = False
    max_wait_s: float = 0.0

    def of(self, given: int) -> int:
        """The effective priority of a request; higher goes first."""
        if not self.are_honoured:
            return 0
        return -given if self.low_first else given


_LEAST_CHUNK, _CHUNK_STEP = 64, 16
"""Chunks that shrink have at least so many tokens, and a multiple of so many."""


class SchedulerLimits(msgspec.Struct, frozen=True):
    """Limits that the scheduler must keep. Journals hold them: encoded names must not change.

    Attributes:
        max_running: requests that hold a slot at the same time.
        chunk_tokens: prompt tokens per step, over all rows (chunked prefill size).
        max_request_tokens: longest prompt + output of a request.
        depth: plans with rows that may be in flight at once.
        max_queued: waiting requests before new ones are refused; 0 = unlimited.
        max_queued_tokens: prompt tokens of waiting requests, likewise.
        wait_s: longest wait in the queue; 0 = unlimited.
        run_s: longest run after admission; 0 = unlimited.
        token_gap: steps between sampling a token and a row that needs it (pipeline stages − 1).
        drafts: drafts after each sampled token; 0 = no speculative decoding.
        draft_levels: most drafter passes per step for drafts in a tree or a block; 0 = one pass per
            draft.
        block_drafts: one pass of the drafter makes all drafts, the last one included.
        paid_drafts: drafting needs its own time and pages, so only as many as wanted are made.
        fixed_drafts: always make and verify `drafts` drafts.
        conservativeness: factor on the new-token ratio.
        priorities: how priorities are used.
        whole_prompts: never split a prompt; a prompt longer than a step runs alone.
        max_prompts: requests whose prompts one step computes, whole or in part; 0 = unlimited.
        growth: parameters of the new-token ratio.
        draft_budget: drafts per step, over all rows.
        multi_step: decode steps per plan (`choose_steps`).
        micro_batch: rows per step with pipeline stages; 0 = running requests divided by stages.
        content: features of prompts that are given by content.
        attention_ratio: work of attending to one position, relative to the rest of a token's work;
            later chunks of a prompt shrink, so that all take the same time. 0 = they do not.
        polling_interval: steps after which a decode server looks for prompts that have been found.
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
    draft_budget: int = msgspec.field(name="draft_room", default=DRAFT_BUDGET)
    multi_step: int = msgspec.field(name="burst", default=1)
    micro_batch: int = 0
    content: ContentLimits = ContentLimits()
    attention_ratio: float = 0.0
    polling_interval: int = 1

    def chunk_at(self, start: int) -> int:
        """Tokens of a prompt's chunk that begins at position `start`.

        A token at position p takes 1 + ratio · p. The chunk takes as long as the first one.
        """
        ratio, chunk = self.attention_ratio, self.chunk_tokens
        if not ratio or not start:
            return chunk
        each = 1 + ratio * start
        whole = chunk + ratio * chunk * chunk / 2
        exact = (math.sqrt(each * each + 2 * ratio * whole) - each) / ratio
        return min(chunk, max(_LEAST_CHUNK, int(exact) // _CHUNK_STEP * _CHUNK_STEP))

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
        self._retract_steps = growth.retract_steps
        self._clip = growth.clip_tokens
        self._reserved = growth.reserved_tokens
        self.value = self._start

    def reset(self) -> None:
        """The engine is idle."""
        self.value = self._start

    def decay(self) -> None:
        """A step with decode rows was planned without a retraction."""
        self.value = max(self._floor, self.value - self._step)

    def on_retraction(self, running: list[Request]) -> None:
        """Pages ran out: expect what running requests really use."""
        decoded = sum(r.output_len for r in running)
        allowed = sum(r.sampling.max_new_tokens for r in running)
        self.value = min(1.0, (decoded + self._retract_steps * len(running)) / (allowed + 1))

    def expected_tokens(self, request: Request) -> int:
        """Tokens that the request is still expected to add."""
        left = min(request.limit - request.known, self._clip)
        expected = int(left * (1.0 if request.sampling.ignore_eos else self.value))
        return max(expected, min(left, self._reserved - request.output_len))
