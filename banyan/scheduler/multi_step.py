"""Multi-step decode: one plan with several decode steps while nothing waits.

The engine sees the sampled tokens only at the end of the plan, so no token may need a decision in
between, as it would with a grammar. Streaming requests get their tokens early (`partial_tokens`).
"""

from collections.abc import Iterable, Mapping

from banyan.messages.events import Tokens
from banyan.scheduler.budget import SchedulerLimits
from banyan.scheduler.request import Flight, Request
from banyan.scheduler.request_table import RequestTable


def choose_steps(request_table: RequestTable, limits: SchedulerLimits) -> tuple[int, int]:
    """(steps, report_every) of the next plan.

    Returns:
        steps: decode steps in the plan; 1 = no multi-step decode.
        report_every: steps after which streams get their tokens; 0 = only at the end.
    """
    if limits.multi_step == 1 or request_table.waiting or not request_table.running:
        return 1, 0
    if not all(may_run_multi_step(request) for request in request_table.running):
        return 1, 0
    intervals = (request.generate.stream_interval for request in request_table.running)
    shortest = min((each for each in intervals if each), default=0)
    return limits.multi_step, shortest if shortest < limits.multi_step else 0


def may_run_multi_step(request: Request) -> bool:
    """Whether the request needs nothing between two decode steps."""
    sampling = request.sampling
    is_plain = not (sampling.min_new_tokens or sampling.logit_bias or sampling.processor)
    is_silent = not (request.wants_scores or request.wants_hidden or request.generate.pool)
    is_free = request.grammar is None and not request.has_jumped
    return request.is_decoding and is_plain and is_silent and is_free


def partial_tokens(flights: Iterable[Flight], tokens: Mapping[int, bytes]) -> list[Tokens]:
    """Events for streams while a multi-step plan still runs. Changes no state: the result of the
    plan holds the same tokens again.

    Args:
        flights: rows of the oldest step in flight.
        tokens: by row, int32 ids that it has sampled so far.
    """
    rows = [flight for flight in flights if flight.row in tokens and not flight.is_void]
    return [
        Tokens(
            request=request.id,
            first=request.output_len,
            tokens=tokens[flight.row],
            cached_tokens=request.stats.cached_tokens,
            stored_tokens=request.stats.stored_tokens,
            cache_miss=request.stats.cache_miss,
        )
        for flight in rows
        if (request := flight.request).generate.stream_interval
    ]
