"""OutputProcessor: appends new tokens to requests, reports them, and ends requests. With a grammar
it also jumps forward: tokens that the grammar forces are appended without sampling.
"""

from array import array
from collections.abc import Iterable, Mapping

from banyan.base.ids import NO_STEP
from banyan.disaggregation.scheduling import DisaggregationSide
from banyan.grammar.base import Grammar, masks_for
from banyan.kv_cache.cache import KVCache
from banyan.messages.events import Tokens
from banyan.messages.plan import Mask, RowScores
from banyan.scheduler.request import Flight, Request
from banyan.scheduler.request_table import RequestTable

_MIN_JUMP = 3
"""Forced tokens that make a jump worth it. A jump costs the request one step; every forced token
saves one, except the first, which is being sampled already."""


class OutputProcessor:
    """
    Args:
        disaggregation: hooks of a prefill or decode server; None otherwise.
        depth: plans with rows that may be in flight at once.
    """

    def __init__(
        self,
        cache: KVCache,
        request_table: RequestTable,
        disaggregation: DisaggregationSide | None,
        depth: int,
    ) -> None:
        self._cache = cache
        self._request_table = request_table
        self._disaggregation = disaggregation
        self._depth = depth

    def process(
        self,
        request: Request,
        tokens: "array[int]",
        scores: list[RowScores],
        now: float,
        vector: bytes = b"",
        hidden: bytes = b"",
        hidden_first: int = 0,
    ) -> None:
        """Append the output of a row, report it, and end the request if it is complete.

        Args:
            tokens: sampled ids; may extend beyond the end of the request.
            vector: float32, the pooled vector; b"" without one.
            hidden: hidden states or experts as in StepResult.hidden, from position `hidden_first`.
        """
        tokens, matched = _cut(request, tokens)
        is_allowed = True
        if request.grammar is not None:
            taken, is_allowed = _advance(request, request.grammar, tokens, self._depth)
            matched = matched if len(taken) == len(tokens) else -1
            tokens = taken
        first = request.output_len
        request.tokens += tokens.tobytes()
        self._request_table.counters.output_tokens += len(tokens)
        for score in scores:
            request.scored_to = max(request.scored_to, score.first + len(score.logprobs) // 4)
        if tokens or scores or vector or hidden:
            known_scores = [_cut_scores(score, request.known) for score in scores]
            if self._disaggregation is not None:
                self._disaggregation.on_scores(request, known_scores)
            self._request_table.events.append(
                Tokens(
                    request=request.id,
                    first=first,
                    tokens=tokens.tobytes(),
                    scores=known_scores,
                    cached_tokens=request.stats.cached_tokens,
                    vector=vector,
                    hidden=hidden,
                    hidden_first=hidden_first,
                    stored_tokens=request.stats.stored_tokens,
                    cache_miss=request.stats.cache_miss,
                )
            )
        if request.lease is not None and tokens:
            self._cache.publish(
                request.lease, request.tokens, request.known - 1, NO_STEP, request.id
            )
        if not is_allowed:
            self._fail_grammar(request, tokens[-1])
        elif matched >= 0:
            self._finish(request, "stop", now, matched)
        elif request.grammar is not None and request.grammar.is_ended:
            self._finish(request, "stop", now)
        elif request.known >= request.limit and (tokens or vector or request.is_all_computed):
            self._finish(request, "length", now)
        else:
            if request.grammar is not None and tokens:
                _jump(request, request.grammar, self._request_table)
            self._release_mask(request)

    def _finish(self, request: Request, reason: str, now: float, matched: int = -1) -> None:
        if self._disaggregation is not None:
            self._disaggregation.on_completed(request)
        self._request_table.finish(request, reason, now, matched)
        if self._disaggregation is not None:
            self._disaggregation.delay_end(request, self._request_table.events)

    def _fail_grammar(self, request: Request, token: int) -> None:
        """`token` broke the request's grammar."""
        assert request.grammar is not None
        if problem := request.grammar.problem:
            text = f"The constraint cannot be followed further: {problem}"
            self._request_table.fail(request, 400, text, "invalid_grammar")
        else:
            text = f"token {token} does not fit the grammar"
            self._request_table.fail(request, 500, text, "grammar_error")

    def _release_mask(self, request: Request) -> None:
        """Send the mask of the next row in flight, now that the token before it is known (R4)."""
        if request.grammar is None or not request.flights:
            return
        flight = request.flights[0]
        if flight.awaits_mask:
            flight.awaits_mask = False
            drafts = request.drafting.tokens[: flight.samples - 1]
            bits = masks_for(request.grammar, drafts, request.drafting.parents)
            self._request_table.masks.append(Mask(flight.step, flight.row, bits))


def _cut(request: Request, tokens: "array[int]") -> tuple["array[int]", int]:
    """The tokens up to the request's end, and the stop id among them (-1 for none)."""
    tokens = tokens[: request.limit - request.known]
    for i, token in enumerate(tokens):
        length = request.output_len + i + 1
        if token in request.sampling.stop_ids and length > request.sampling.min_new_tokens:
            return tokens[: i + 1], token
    return tokens, -1


def _cut_scores(score: RowScores, end: int) -> RowScores:
    """Scores of positions below `end`: a verify row may have scored tokens that were cut."""
    rows = len(score.logprobs) // 4
    kept = min(rows, end - score.first)

    def cut(values: bytes) -> bytes:
        return values[: len(values) // rows * kept]

    return RowScores(
        row=-1,
        first=score.first,
        logprobs=cut(score.logprobs),
        top_ids=cut(score.top_ids),
        top_logprobs=cut(score.top_logprobs),
        picked=cut(score.picked),
    )


# -- jump-forward -----------------------------------------------------------------------------


def _advance(
    request: Request, grammar: Grammar, tokens: "array[int]", depth: int
) -> "tuple[array[int], bool]":
    """Move a request's grammar past sampled tokens.

    Stops where the output is complete, and where a jump is due: the request must continue as if its
    tokens had arrived one by one.

    Returns: the tokens that the request takes, and whether the last of them is allowed.
    """
    for count, token in enumerate(tokens, 1):
        if not grammar.accept(token):
            return tokens[:count], False
        if grammar.is_ended or _is_jump_due(request, grammar, request.known + count, depth):
            return tokens[:count], True
    return tokens, True


def _is_jump_due(request: Request, grammar: Grammar, known: int, depth: int) -> bool:
    """Whether the request jumps after `known` tokens, if the last one was sampled.

    The next tokens may be in flight already, and forced text may be tokenised in several ways. So
    the jump always comes after as many sampled tokens as may be in flight. The output then depends
    on its tokens alone, never on the timing of steps.
    """
    if request.wants_scores or request.wants_hidden:
        return False  # only sampling yields the numbers that are reported with each token
    if not request.jumps_at and len(_forced(request, grammar, known)) >= _MIN_JUMP:
        request.jumps_at = known + depth - 1
    return known == request.jumps_at


def _jump(request: Request, grammar: Grammar, request_table: RequestTable) -> None:
    """Append the forced tokens if the request has reached its jump. They run through the model
    together, like a piece of a prompt.
    """
    if request.known != request.jumps_at:
        return
    request.jumps_at = 0
    first = request.output_len
    tokens = array("i")
    for token in _forced(request, grammar, request.known):
        if not grammar.accept(token):
            break
        tokens.append(token)
    if not tokens:
        return
    if request.flights:  # it verifies drafts that do not count any more
        request.given_after = request.flights[-1].step
        request_table.void(request)
    if request.lease is not None:
        request.planned = request.known - 1
    request.tokens += tokens.tobytes()
    request.has_jumped, request.has_sampled = True, False
    request.drop_drafts()
    request_table.counters.output_tokens += len(tokens)
    request_table.events.append(
        Tokens(
            request=request.id,
            first=first,
            tokens=tokens.tobytes(),
            cached_tokens=request.stats.cached_tokens,
            cache_miss=request.stats.cache_miss,
        )
    )


def _forced(request: Request, grammar: Grammar, known: int) -> list[int]:
    """Forced tokens before anything that ends the request. The end is always sampled, so that there
    is only one way to end.
    """
    found = grammar.forced()[: max(0, request.limit - known - 1)]
    stops = request.sampling.stop_ids
    return found[: next((i for i, token in enumerate(found) if token in stops), len(found))]


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
