"""Speculation: how many drafts a row makes and verifies, from none to all.

A further draft is made only if it is expected to raise the tokens per second. The estimate uses two
things learnt from results (and only from those, so that a journal replays every decision): how
often the drafts of a request are accepted, and the time of a step by its number of tokens.

A request whose drafts do not pay is probed now and then: about one row of a step reports drafts
anyway, or with a draft model a few rows from time to time.
"""

from collections.abc import Sequence

from banyan.base.draft_tree import ranks_of
from banyan.messages.plan import StepResult
from banyan.scheduler.request import DraftCounts, Flight, Request

_START = 0.5
"""Assumed acceptance of the likeliest draft before any was seen."""
_START_OF_OTHERS = 0.1
"""Assumed acceptance of the other drafts after the same token (tree)."""
_RECENT = 1 / 8
"""Weight of the newest draft in a request's moving average."""
_RECENT_OF_ALL = 1 / 64
"""Weight of the newest draft in the average of all requests."""
_ASSUMED = 4
"""Number of drafts that `_START` counts as."""
_MARGIN = 1.15
"""Expected gain / cost that drafts must reach: drafting and masking take time too."""
_MARGIN_OF_PAID = 1.05
"""The same when the time of drafting is measured."""
_PAUSE, _PROBES = 64, 4
"""When drafting does not pay: rows between two probes at least, and rows per probe."""
_PROBE_SHARE = 0.03
"""Share of step time that probes may take."""
_RECENT_PASS = 1 / 16
_LONG = 3.0
"""Measured times are cut at this multiple of the expected time: outliers have other causes."""


class StepTimes:
    """Seconds of a decode step as a linear function of its tokens.

    A weighted regression over the last few dozen steps. While all of them have the same number of
    tokens the slope cannot be measured; then the last known slope holds, as a share of a step with
    one token. That share slowly returns to its default, so that other sizes are tried again.
    """

    _KEEP = 0.98
    _SHARE = 0.1
    """Default cost of a further token, as a share of a step with one token."""
    _FORGETS = 0.001
    _DOUBT = 4.0
    """Spread at which a measured slope counts as much as the share."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._spread = self._slope = 0.0
        """Sum of weights, means of tokens and seconds, and centred sums of squares and products."""
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
        """Expected seconds of a step of `tokens` tokens; 0 before the first measurement."""
        return max(0.0, self._seconds + self.per_token * (tokens - self._tokens))

    @property
    def per_token(self) -> float:
        """Seconds that one more token costs."""
        share = self._share * self._seconds / (1 + self._share * max(0.0, self._tokens - 1))
        return max(0.0, (self._slope + self._DOUBT * share) / (self._spread + self._DOUBT))


class Speculation:
    """
    Args:
        most: drafts per row.
        is_paid: each draft is a pass of a draft model over all rows and takes step time.
        is_fixed: always use `most` drafts; estimates are ignored.
        levels: one pass makes all drafts of a tree level, so there are at most this many passes;
            0 = one draft per pass.
        in_blocks: one pass makes all drafts of a row, never fewer.
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
        self._acceptance, self._seen = _START, _ASSUMED
        """Acceptance of likeliest drafts over all requests, and the number of drafts in it."""
        self._margin = _MARGIN_OF_PAID if is_paid else _MARGIN
        self._others = [_START_OF_OTHERS] * most
        """Acceptance in a tree by rank: how many likelier drafts follow the same token."""
        self._levels = levels
        self._in_blocks = in_blocks
        self._is_paid = is_paid
        self._is_fixed = is_fixed
        self._pass_s = 0.0
        """Seconds per pass of the draft model."""
        self._rows_since_probe = -1
        """Rows since the last probe started; -1 = none has started."""

    def learn_times(self, tokens: int, flights: Sequence[Flight], result: StepResult) -> None:
        """Learn from a decode step of `tokens` tokens. Every row began at its newest token."""
        if not self._is_paid:
            self.times.learn(tokens, result.seconds)
            return
        self.times.learn(tokens, result.seconds - result.draft_seconds)
        passes = max(flight.propose for flight in flights)
        passes = min(passes, self._levels) if self._levels else passes
        if passes and all(flight.follows_proposal for flight in flights):
            seconds = result.draft_seconds / passes
            if self._pass_s:
                seconds = min(seconds, _LONG * self._pass_s)
            weight = _RECENT_PASS if self._pass_s else 1.0
            self._pass_s += weight * (seconds - self._pass_s)

    def drafts_to_make(self, request: Request, rows: int) -> int:
        """Drafts that the draft model makes after the next row of `request`."""
        wanted = self._worthwhile(request, rows, self._pass_s)
        if wanted:
            return wanted
        drafting = request.drafting
        self._rows_since_probe += self._rows_since_probe >= 0
        if not drafting.probes_left:
            cost = _PROBES * self._pass_s / (_PROBE_SHARE * (self.times.of(rows) or 1.0))
            if 0 <= self._rows_since_probe < max(_PAUSE, rows * cost):
                return 0
            self._rows_since_probe, drafting.probes_left = 0, _PROBES
        drafting.probes_left -= 1
        return self._most if self._in_blocks else 1

    def drafts_to_report(self, request: Request, rows: int) -> int:
        """Drafts that a drafter without passes (n-gram) reports after the next row of `request`.

        If drafts do not pay, about one row per step is probed, each for a few steps in turn:
        reporting takes time in which nothing else runs.
        """
        if self._worthwhile(request, rows):
            return self._most
        is_probed = (request.planned // _PROBES + request.slot) % max(1, rows) == 0
        return self._most if is_probed else 0

    def drafts_to_verify(self, request: Request, rows: int) -> int:
        """Drafts that the next row of `request` verifies, in a step of `rows` such rows."""
        return min(self._worthwhile(request, rows), request.drafting.proposed)

    def _worthwhile(self, request: Request, rows: int, pass_s: float = 0.0) -> int:
        """How many drafts raise the tokens per second of a step; `pass_s`: seconds to make one."""
        if self._is_fixed:
            return self._most
        drafting = request.drafting
        share = self._acceptance if drafting.acceptance is None else drafting.acceptance
        if drafting.parents and (self._levels or not pass_s):
            return self._worthwhile_in_tree(drafting.parents, share, pass_s, rows)
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
        """Whether a pass that makes a block of drafts pays with the best number to verify."""
        plain = self.times.of(rows)
        tokens, seconds, chance = 1.0, plain + self._margin * pass_s, share
        for _ in range(self._most):
            seconds += self._margin * self.times.per_token * rows
            tokens += chance
            chance *= share
            if tokens * plain > seconds:
                return True
        return False

    def _worthwhile_in_tree(
        self, parents: Sequence[int], share: float, pass_s: float, rows: int
    ) -> int:
        """`_worthwhile` for drafts in a tree, in the order in which they are reported.

        The tree of the next row is not known when it is planned, so the last one stands for it.
        """
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
        # All pay. A draft model can only be asked for one more: the larger tree is not known yet.
        return min(self._most, len(parents) + 1) if self._levels else self._most

    def learn_acceptance(self, request: Request, verified: int, sampled: Sequence[int]) -> None:
        """Compare the request's drafts with the tokens that the model chose; `verified` drafts were
        in the row.
        """
        drafting = request.drafting
        if drafting.parents:
            self._learn_tree(request, drafting.tokens, drafting.parents, sampled)
        else:
            for draft, token in zip(drafting.tokens, sampled, strict=False):
                self._note_first(request, draft == token)
                if draft != token:
                    break
        if sampled:
            drafting.counts.count(verified, len(sampled) - 1)
            self.drafts.count(verified, len(sampled) - 1)

    def _note_first(self, request: Request, was_correct: bool) -> None:
        """Count the likeliest draft after an accepted token."""
        drafting = request.drafting
        before = self._acceptance if drafting.acceptance is None else drafting.acceptance
        drafting.acceptance = before + _RECENT * (was_correct - before)
        self._seen += 1
        weight = max(_RECENT_OF_ALL, 1 / self._seen)
        self._acceptance += weight * (was_correct - self._acceptance)

    def _learn_tree(
        self,
        request: Request,
        drafts: Sequence[int],
        parents: Sequence[int],
        sampled: Sequence[int],
    ) -> None:
        ranks, here = ranks_of(parents), -1
        for token in sampled:
            children = [at for at, parent in enumerate(parents) if parent == here]
            for at in children:
                was_correct = drafts[at] == token
                if rank := ranks[at]:
                    self._others[rank] += _RECENT_OF_ALL * (was_correct - self._others[rank])
                else:
                    self._note_first(request, was_correct)
            here = next((at for at in children if drafts[at] == token), None)
            if here is None:
                break
