"""Jump-forward: tokens that a constraint leaves no choice about are not sampled. They are known at
once, and run through the model together like a piece of prompt.
"""

from array import array

from banyan.grammar.base import Grammar
from banyan.messages.events import Tokens
from banyan.scheduler.request import Request
from banyan.scheduler.roster import Roster

_WORTH_WAITING = 3
"""Certain tokens for which a request leaves out a step: it costs one, and each of them saves one,
but for the first, which is being sampled."""


def jump(request: Request, grammar: Grammar, roster: Roster, depth: int) -> None:
    """After a sampled token: append those that are certain, or let the request wait for that.

    The next tokens may be in flight already, and what is forced may be written in several ways. So
    as many as may be in flight are sampled in any case, and the jump comes after them: the output
    depends on its tokens alone, never on how the steps fell.
    """
    if request.wants_scores or request.wants_hidden:
        return  # each of its tokens is told with numbers that only sampling brings
    certain = _certain(request, grammar)
    if not request.jumps_at and len(certain) >= _WORTH_WAITING:
        request.jumps_at = request.known + depth - 1
    if request.known != request.jumps_at:
        return
    assert not request.pending
    request.jumps_at = 0
    first = request.output_len
    tokens = array("i")
    for token in certain:
        if not grammar.accept(token):
            break
        tokens.append(token)
    if not tokens:
        return
    request.tokens += tokens.tobytes()
    request.has_jumped, request.has_sampled = True, False
    roster.counters.output_tokens += len(tokens)
    cached = request.cached_tokens
    roster.events.append(Tokens(request.id, first, tokens.tobytes(), cached_tokens=cached))


def _certain(request: Request, grammar: Grammar) -> list[int]:
    """Up to what may end the request: that is sampled, so that every end has one way to come."""
    found = grammar.forced()[: max(0, request.limit - request.known - 1)]
    stops = request.sampling.stop_ids
    return found[: next((i for i, token in enumerate(found) if token in stops), len(found))]
