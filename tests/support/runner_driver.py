"""Drives a ModelRunner by plans the way an engine would, for one or many requests at a time."""

from dataclasses import dataclass, field

import numpy as np

from banyan.messages.plan import (
    SAMPLE,
    SCORE,
    Join,
    PageGrant,
    Row,
    RowScores,
    StepPlan,
    StepResult,
)
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.model_config import STATE
from banyan.runner.runner import ModelRunner

PAGE = 16


def ids(tokens) -> bytes:
    return np.asarray(list(tokens), np.int32).tobytes()


@dataclass
class Request:
    prompt: list[int]
    sampling: SamplingParams
    score_from: int = -1
    score_top: int = 0
    score_ids: tuple[int, ...] = ()
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    done: int = 0
    output: list[int] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    tops: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    picked: dict[int, list[float]] = field(default_factory=dict)
    failure: str = ""

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def is_over(self) -> bool:
        return bool(self.failure) or len(self.output) >= self.sampling.max_new_tokens


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, **more)


class Driver:
    """Hands out slots and pages in order and never reuses a page."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step = 0
        self.next_slot = 1
        self.next_page = 1
        self.leaves: list[int] = []

    def plan(self, **parts) -> StepPlan:
        self.step += 1
        return StepPlan(step=self.step, **parts)

    def enter(
        self, request: Request, shared: list[int] = (), slot: int = 0
    ) -> tuple[Join, PageGrant]:
        """Join with prompt + output so far; `shared` pages hold a computed prefix."""
        if not slot:
            slot, self.next_slot = self.next_slot, self.next_slot + 1
        request.slot, request.done = slot, len(shared) * PAGE
        need = -(-(len(request.prompt) + request.sampling.max_new_tokens) // PAGE)
        fresh = need - len(shared)
        request.pages = [*shared, *range(self.next_page, self.next_page + fresh)]
        self.next_page += fresh
        join = Join(
            slot,
            ids(request.prompt + request.output),
            len(request.prompt),
            request.sampling,
            request.score_top,
            request.score_ids,
        )
        return join, PageGrant(slot, 0, 0, request.pages)

    def of_every_group(self, grant: PageGrant) -> list[PageGrant]:
        """The same pages in every group; a state takes the first of them alone."""
        return [
            PageGrant(grant.slot, g, 0, grant.pages[: 1 if group.kind == STATE else None])
            for g, group in enumerate(self.runner.store.groups)
        ]

    def row(self, request: Request, chunk: int = 1 << 30, **more) -> Row:
        count = min(chunk, request.known - request.done)
        want = SAMPLE if request.done + count == request.known else 0
        if request.score_from >= 0:
            want |= SCORE
        return Row(
            request.slot,
            request.done,
            count,
            want=want,
            score_from=max(0, request.score_from),
            **more,
        )

    def run(
        self, requests: list[Request], chunk: int = 1 << 30, shared: list[int] = (), limit: int = 0
    ) -> None:
        """Run requests together until all are over, or have `limit` output tokens."""
        entered = [self.enter(r, shared) for r in requests]
        grants = [grant for _, first in entered for grant in self.of_every_group(first)]
        parts = {"joins": [join for join, _ in entered], "grants": grants}
        while running := [
            r for r in requests if not (r.is_over or (limit and len(r.output) >= limit))
        ]:
            rows = [self.row(r, chunk) for r in running]
            result = self.runner.launch(self.plan(rows=rows, **parts)).result()
            assert not result.error, result.error
            self.accept(running, rows, result)
            parts = {}

    def accept(self, requests: list[Request], rows: list[Row], result: StepResult) -> None:
        for failure in result.failed:
            requests[failure.row].failure = failure.text
        for scores in result.scores:
            self.note(requests[scores.row], scores)
        for request, row, tokens in zip(requests, rows, result.tokens, strict=True):
            request.done = row.start + row.count
            request.output += np.frombuffer(tokens, np.int32).tolist()

    def note(self, request: Request, scores: RowScores) -> None:
        values = np.frombuffer(scores.logprobs, np.float32)
        count = len(values)
        top_ids = np.frombuffer(scores.top_ids, np.int32).reshape(count, -1)
        tops = np.frombuffer(scores.top_logprobs, np.float32).reshape(count, -1)
        picked = np.frombuffer(scores.picked, np.float32).reshape(count, -1)
        for i in range(count):
            position = scores.first + i
            assert position not in request.scores, "a position was scored twice"
            request.scores[position] = float(values[i])
            request.tops[position] = list(zip(top_ids[i].tolist(), tops[i].tolist(), strict=True))
            request.picked[position] = picked[i].tolist()
