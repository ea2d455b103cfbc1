"""How many drafts a row should verify: as many as are likely to be worth their time, down to none.

Two things are learnt from results, and from them alone, so that a journal replays every decision:
how often a request's drafts come true, and what a step takes by the number of its tokens. The
runner tells its drafts also when none are verified, so a request whose drafts were not worth it is
still watched, at no cost.
"""

from collections.abc import Sequence

from banyan.scheduler.request import DraftCounts, Request

_START = 0.5
"""Share of drafts that come true, as long as nothing is known."""
_RECENT = 1 / 8
"""Weight of the newest draft in a request's share, and much less in everybody's."""
_RECENT_OF_ALL = 1 / 64
_MARGIN = 1.15
"""What drafts must promise beyond what they cost: drafting and masking take time too."""


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
    _LONG = 3.0
    """A step that took so many times what was expected tells of something else."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._spread = self._slope = 0.0
        """Sum of weights, the means, and the sums of squares and products around them."""
        self._share = self._SHARE

    def learn(self, tokens: int, seconds: float) -> None:
        if self._weight:
            seconds = min(seconds, self._LONG * self.of(tokens))
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
    """

    def __init__(self, most: int) -> None:
        self.times = StepTimes()
        self.drafts = DraftCounts()
        """Of all requests."""
        self._most = most
        self._share = _START

    def wanted(self, request: Request, rows: int) -> int:
        """Drafts for the next row of `request` in a step of `rows` rows like it.

        Each further draft must bring more tokens a second than the step has without it.
        """
        share = self._share if request.draft_share < 0 else request.draft_share
        per_draft = self.times.per_token * rows
        tokens, seconds = 1.0, self.times.of(rows)
        chance = share
        for drafts in range(self._most):
            if chance * seconds <= _MARGIN * per_draft * tokens:
                return drafts
            tokens += chance
            seconds += per_draft
            chance *= share
        return self._most

    def saw(
        self, request: Request, drafts: Sequence[int], verified: int, sampled: Sequence[int]
    ) -> None:
        """What the model chose where `drafts` were told; `verified` of them were in the row."""
        for draft, token in zip(drafts, sampled, strict=False):
            came_true = float(draft == token)
            if request.draft_share < 0:
                request.draft_share = self._share
            request.draft_share += _RECENT * (came_true - request.draft_share)
            self._share += _RECENT_OF_ALL * (came_true - self._share)
            if not came_true:
                break
        if sampled:
            request.drafts.count(verified, len(sampled) - 1)
            self.drafts.count(verified, len(sampled) - 1)
