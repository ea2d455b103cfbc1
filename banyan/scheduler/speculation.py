"""How many drafts a row should verify: as many as are likely to be worth their time, down to none.

Two things are learnt from results, and from them alone, so that a journal replays every decision:
how often a request's drafts come true, and what a step takes by the number of its tokens. The
runner tells some drafts also when none are verified, so a request whose drafts were not worth it is
still watched: about one row of a step, or, where a model drafts, a few rows from time to time.
"""

from collections.abc import Sequence

from banyan.base.draft_tree import ranks_of
from banyan.messages.plan import StepResult
from banyan.scheduler.request import DraftCounts, Flight, Request

_START = 0.5
"""Share of drafts that come true, as long as nothing is known."""
_START_OF_OTHERS = 0.1
"""The same of one that is not the likeliest behind its token."""
_RECENT = 1 / 8
"""Weight of the newest draft in a request's share, and much less in everybody's."""
_RECENT_OF_ALL = 1 / 64
_ASSUMED = 4
"""Drafts that `_START` counts as much as."""
_MARGIN = 1.15
"""What drafts must promise beyond what they cost: drafting and masking take time too."""
_MARGIN_OF_PAID = 1.05
"""The same where the time of drafting is measured."""
_PAUSE, _WATCHED = 64, 4
"""Where drafts are not worth it, a few rows in turn are drafted for all the same, and where that is
paid so many rows lie between two times at least."""
_WATCH_SHARE = 0.03
"""Of the time of steps, what that may take."""
_RECENT_PASS = 1 / 16
_LONG = 3.0
"""A step that took so many times what was expected tells of something else."""


class StepTimes:
    """Seconds of a step without prompts, as a line over its tokens.

    The last few dozen steps count. While they all have the same number of tokens, what a further
    token costs is what it cost before, as a share of a step of one; that share is forgotten too,
    but slowly, so that it is tried again some time.
    """

    _KEEP = 0.98
    _SHARE = 0.1
    """What is assumed as long as nothing is known, and in the long run."""
    _FORGETS = 0.001
    _DOUBT = 4.0
    """How much spread it takes to believe a measured slope as much as the share."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._spread = self._slope = 0.0
        """Sum of weights, the means, and the sums of squares and products around them."""
        self._share = self._SHARE

    def learn(self, tokens: int, seconds: float) -> None:
        if self._weight:
            seconds = min(seconds, _LONG * self.of(tokens))
        self._weight = self._KEEP * self._weight + 1
        by_tokens, by_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens += by_tokens / self._weight
        self._seconds += by_seconds / self._weight
        self._spread = self._KEEP * self._spread + by_tokens * (tokens - self._tokens)
        self._slope = self._KEEP * self._slope + by_tokens * (seconds - self._seconds)
        if self._spread > self._DOUBT:
            first = max(self.of(1), 0.1 * self._seconds)
            self._share = max(0.0, self._slope / self._spread / first) if first else self._SHARE
        else:
            self._share += self._FORGETS * (self._SHARE - self._share)

    def of(self, tokens: float) -> float:
        """A step of so many tokens; in seconds once any was seen."""
        return max(0.0, self._seconds + self.per_token * (tokens - self._tokens))

    @property
    def per_token(self) -> float:
        """What one more token costs."""
        share = self._share * self._seconds / (1 + self._share * max(0.0, self._tokens - 1))
        return max(0.0, (self._slope + self._DOUBT * share) / (self._spread + self._DOUBT))


class Speculation:
    """
    Args:
        most: drafts of a row.
        is_paid: each draft is a pass of a drafter over all rows, which takes time of the step.
        is_fixed: as many drafts as there may be, always; what is learnt does not count.
        levels: a pass makes all drafts that are as far from the newest token, so there are so many
            at most; 0 = it makes one.
        in_blocks: a pass makes all drafts of a row, and no fewer.
    """

    def __init__(
        self,
        most: int,
        is_paid: bool = False,
        is_fixed: bool = False,
        levels: int = 0,
        in_blocks: bool = False,
    ) -> None:
        self.times = StepTimes()
        self.drafts = DraftCounts()
        """Of all requests."""
        self._most = most
        self._share, self._seen = _START, _ASSUMED
        """Of the likeliest drafts of all requests, and how many it is of."""
        self._margin = _MARGIN_OF_PAID if is_paid else _MARGIN
        self._others = [_START_OF_OTHERS] * most
        """Of drafts that follow a token beside likelier ones, by how many these are."""
        self._levels = levels
        self._in_blocks = in_blocks
        self._is_paid = is_paid
        self._is_fixed = is_fixed
        self._pass_s = 0.0
        """Seconds of a pass of the drafter."""
        self._unwatched = -1
        """Rows since a request was last watched where drafts were not worth it; -1 = none was."""

    def learn(self, tokens: int, flights: Sequence[Flight], result: StepResult) -> None:
        """From a step whose rows all began at their newest tokens; tokens: that it ran."""
        if not self._is_paid:
            self.times.learn(tokens, result.seconds)
            return
        self.times.learn(tokens, result.seconds - result.draft_seconds)
        passes = max(flight.ahead for flight in flights)
        passes = min(passes, self._levels) if self._levels else passes
        if passes and all(flight.is_abreast for flight in flights):
            seconds = result.draft_seconds / passes
            if self._pass_s:
                seconds = min(seconds, _LONG * self._pass_s)
            weight = _RECENT_PASS if self._pass_s else 1.0
            self._pass_s += weight * (seconds - self._pass_s)

    def to_make(self, request: Request, rows: int) -> int:
        """Drafts to make for the row after the next one of `request`, where that is paid."""
        wanted = self._worthwhile(request, rows, self._pass_s)
        if wanted:
            return wanted
        self._unwatched += self._unwatched >= 0
        if not request.watched:
            cost = _WATCHED * self._pass_s / (_WATCH_SHARE * (self.times.of(rows) or 1.0))
            if 0 <= self._unwatched < max(_PAUSE, rows * cost):
                return 0
            self._unwatched, request.watched = 0, _WATCHED
        request.watched -= 1
        return self._most if self._in_blocks else 1

    def to_tell(self, request: Request, rows: int) -> int:
        """Drafts to tell for the row after the next one of `request`, where they cost no pass. Of
        rows whose drafts are not worth verifying about one in each step is watched, each for a few
        steps in turn: telling takes time in which nothing else runs."""
        if self._worthwhile(request, rows):
            return self._most
        is_its_turn = (request.planned // _WATCHED + request.slot) % max(1, rows) == 0
        return self._most if is_its_turn else 0

    def to_verify(self, request: Request, rows: int) -> int:
        """Drafts for the next row of `request` in a step of `rows` rows like it."""
        return min(self._worthwhile(request, rows), request.ahead)

    def _worthwhile(self, request: Request, rows: int, pass_s: float = 0.0) -> int:
        """How many drafts bring more than they cost; pass_s: seconds that making one takes.

        Each further draft must bring more tokens a second than the step has without it.
        """
        if self._is_fixed:
            return self._most
        share = self._share if request.draft_share < 0 else request.draft_share
        if request.next_parents and (self._levels or not pass_s):
            return self._worthwhile_of(request.next_parents, share, pass_s, rows)
        if self._in_blocks and pass_s:
            return self._most if self._is_worth_a_block(share, pass_s, rows) else 0
        per_draft = self.times.per_token * rows + pass_s
        tokens, seconds = 1.0, self.times.of(rows)
        chance = share
        for drafts in range(self._most if self._in_blocks else self._levels or self._most):
            if chance * seconds <= self._margin * per_draft * tokens:
                return drafts
            tokens += chance
            seconds += per_draft
            chance *= share
        return self._most

    def _is_worth_a_block(self, share: float, pass_s: float, rows: int) -> bool:
        """Whether a pass that makes all drafts pays with as many of them as are then verified."""
        plain = self.times.of(rows)
        tokens, seconds, chance = 1.0, plain + self._margin * pass_s, share
        for _ in range(self._most):
            seconds += self._margin * self.times.per_token * rows
            tokens += chance
            chance *= share
            if tokens * plain > seconds:
                return True
        return False

    def _worthwhile_of(self, parents: Sequence[int], share: float, pass_s: float, rows: int) -> int:
        """The same of drafts that branch, taken in the order in which they are told. Those of the
        next row are not known when it is planned: they branch like the last ones, more or less."""
        tokens, seconds = 1.0, self.times.of(rows)
        chances, depths = list[float](), list[int]()
        for at, (parent, rank) in enumerate(zip(parents, ranks_of(parents), strict=True)):
            before, above = (chances[parent], depths[parent]) if parent >= 0 else (1.0, 0)
            cost = self.times.per_token * rows + pass_s * (above >= max(depths, default=0))
            chances.append(before * (self._others[rank] if rank else share))
            depths.append(above + 1)
            if chances[-1] * seconds <= self._margin * cost * tokens:
                return at
            tokens += chances[-1]
            seconds += cost
        # What a larger tree would look like is not known where a model was asked for no more.
        return min(self._most, len(parents) + 1) if self._levels else self._most

    def saw(
        self, request: Request, drafts: Sequence[int], verified: int, sampled: Sequence[int]
    ) -> None:
        """What the model chose where `drafts` were told; `verified` of them were in the row."""
        if request.next_parents:
            self._saw_branches(request, drafts, request.next_parents, sampled)
        else:
            for draft, token in zip(drafts, sampled, strict=False):
                self._note_first(request, draft == token)
                if draft != token:
                    break
        if sampled:
            request.drafts.count(verified, len(sampled) - 1)
            self.drafts.count(verified, len(sampled) - 1)

    def _note_first(self, request: Request, came_true: bool) -> None:
        """Whether the likeliest draft behind a token that stands was right."""
        if request.draft_share < 0:
            request.draft_share = self._share
        request.draft_share += _RECENT * (came_true - request.draft_share)
        self._seen += 1
        self._share += max(_RECENT_OF_ALL, 1 / self._seen) * (came_true - self._share)

    def _saw_branches(
        self,
        request: Request,
        drafts: Sequence[int],
        parents: Sequence[int],
        sampled: Sequence[int],
    ) -> None:
        ranks, here = ranks_of(parents), -1
        for token in sampled:
            ways = [at for at, parent in enumerate(parents) if parent == here]
            for at in ways:
                came_true = drafts[at] == token
                if rank := ranks[at]:
                    self._others[rank] += _RECENT_OF_ALL * (came_true - self._others[rank])
                else:
                    self._note_first(request, came_true)
            here = next((at for at in ways if drafts[at] == token), None)
            if here is None:
                break
