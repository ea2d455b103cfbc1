"""Jump-forward: tokens that a constraint leaves no choice about are not sampled. They are known at
once, and run through the model together like a piece of prompt.
"""

from array import array

from banyan.grammar.base import Grammar
from banyan.messages.events import Tokens
from banyan.scheduler.request import Request
from banyan.scheduler.request_table import RequestTable

_WORTH_WAITING = 3
"""Certain tokens for which a request leaves out a step: it costs one, and each of them saves one,
but for the first, which is being sampled."""


def advance(
    request: Request, grammar: Grammar, tokens: "array[int]", depth: int
) -> "tuple[array[int], bool]":
    """Move a request's grammar past sampled tokens.

    Where the output is complete, and at the place of a jump, it goes on as it would have done if
    its tokens had come one by one.

    returns: the tokens that the request takes, and whether the last of them is allowed.
    """
    for count, token in enumerate(tokens, 1):
        if not grammar.accept(token):
            return tokens[:count], False
        if grammar.is_ended or _is_place(request, grammar, request.known + count, depth):
            return tokens[:count], True
    return tokens, True


def _is_place(request: Request, grammar: Grammar, known: int, depth: int) -> bool:
    """Whether the request jumps behind its `known` tokens, the last of which was sampled.

    The next tokens may be in flight already, and what is forced may be written in several ways. So
    as many as may be in flight are sampled in any case, and the jump comes after them: the output
    depends on its tokens alone, never on how the steps fell.
    """
    if request.wants_scores or request.wants_hidden:
        return False  # each of its tokens is told with numbers that only sampling brings
    if not request.jumps_at and len(_certain(request, grammar, known)) >= _WORTH_WAITING:
        request.jumps_at = known + depth - 1
    return known == request.jumps_at


def jump(request: Request, grammar: Grammar, request_table: RequestTable) -> None:
    """At its place a request takes the tokens that are certain."""
    if request.known != request.jumps_at:
        return
    request.jumps_at = 0
    first = request.output_len
    tokens = array("i")
    for token in _certain(request, grammar, request.known):
        if not grammar.accept(token):
            break
        tokens.append(token)
    if not tokens:
        return
    if request.flights:  # it was sampled behind drafts that do not count
        request.given_after = request.flights[-1].step
        request_table.void(request)
    if request.lease is not None:
        request.planned = request.known - 1
    request.tokens += tokens.tobytes()
    request.has_jumped, request.has_sampled = True, False
    request.next_drafts, request.next_parents = [], []
    request_table.counters.output_tokens += len(tokens)
    request_table.events.append(
        Tokens(
            request.id,
            first,
            tokens.tobytes(),
            cached_tokens=request.cached_tokens,
            cache_miss=request.cache_miss,
        )
    )


def _certain(request: Request, grammar: Grammar, known: int) -> list[int]:
    """Up to what may end the request: that is sampled, so that every end has one way to come."""
    found = grammar.forced()[: max(0, request.limit - known - 1)]
    stops = request.sampling.stop_ids
    return found[: next((i for i, token in enumerate(found) if token in stops), len(found))]
