"""When one plan may hold several decode steps: nothing waits and no decision is due between them.

What a burst samples is decided upon at its end, so no token before may decide anything, as with
a grammar. Readers to whom tokens are passed on as they are made get them meanwhile.
"""

from collections.abc import Iterable, Mapping

from banyan.messages.events import Tokens
from banyan.scheduler.budget import Limits
from banyan.scheduler.request import Flight, Request
from banyan.scheduler.request_table import RequestTable


def steps_of_a_multi_step(request_table: RequestTable, limits: Limits) -> tuple[int, int]:
    """How many decode steps the next plan may hold, 1 = it is no burst; and after each how many of
    them readers are told, 0 = at the end alone."""
    if limits.multi_step == 1 or request_table.waiting or not request_table.running:
        return 1, 0
    if not all(may_run_multi_step(request) for request in request_table.running):
        return 1, 0
    tell = min(
        (r.generate.stream_interval for r in request_table.running if r.generate.stream_interval),
        default=0,
    )
    return limits.multi_step, tell if tell < limits.multi_step else 0


def may_run_multi_step(request: Request) -> bool:
    """Whether its next tokens follow from the one before, whatever else happens."""
    sampling = request.sampling
    is_plain = not (sampling.min_new_tokens or sampling.logit_bias or sampling.processor)
    is_silent = not (request.wants_scores or request.wants_hidden or request.generate.pool)
    is_free = request.grammar is None and not request.has_jumped
    return request.is_decoding and is_plain and is_silent and is_free


def so_far(flights: Iterable[Flight], tokens: Mapping[int, bytes]) -> list[Tokens]:
    """What readers may see of a burst before it is complete. Decides nothing: all of it comes once
    more with the result.

    Args:
        flights: of the oldest step in flight.
        tokens: by row, what it has sampled in steps that others have followed.
    """
    rows = [flight for flight in flights if flight.row in tokens and not flight.is_void]
    return [
        Tokens(
            *(request.id, request.output_len, tokens[flight.row]),
            cached_tokens=request.cached_tokens,
            stored_tokens=request.stored_tokens,
            cache_miss=request.cache_miss,
        )
        for flight in rows
        if (request := flight.request).generate.stream_interval
    ]
