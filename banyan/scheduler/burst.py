"""When one plan may hold several decode steps: nothing waits and no decision is due between them.

What a burst samples is known at its end, so nobody may be in need of a token before that: neither a
grammar nor a reader to whom tokens are passed on one by one.
"""

from banyan.scheduler.budget import Limits
from banyan.scheduler.request import Request
from banyan.scheduler.roster import Roster


def steps_of_a_burst(roster: Roster, limits: Limits) -> int:
    """How many decode steps the next plan may hold; 1 = it is no burst."""
    if limits.burst == 1 or roster.waiting or not roster.running:
        return 1
    if not all(may_burst(request) for request in roster.running):
        return 1
    return min([limits.burst, *(r.generate.stride for r in roster.running if r.generate.stride)])


def may_burst(request: Request) -> bool:
    """Whether its next tokens follow from the one before, whatever else happens."""
    sampling = request.sampling
    is_plain = not (sampling.min_new_tokens or sampling.logit_bias or sampling.processor)
    is_silent = not (request.wants_scores or request.wants_hidden or request.generate.pool)
    is_free = request.grammar is None and not request.has_jumped
    return request.is_decoding and is_plain and is_silent and is_free
