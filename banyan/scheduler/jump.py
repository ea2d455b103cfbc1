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


def jump(request: Request, grammar: Grammar, roster: Roster) -> None:
    """After a sampled token: append those that are certain, or let the request wait for that.

    Nothing may be appended while a row is in flight that samples the next of them.
    """
    if request.wants_scores or request.wants_hidden:
        return  # each of its tokens is told with numbers that only sampling brings
    certain = _certain(request, grammar)
    if request.flights:
        request.waits_to_jump = len(certain) >= _WORTH_WAITING
        return
    request.waits_to_jump = False
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
