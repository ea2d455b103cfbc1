"""OutputProcessor: appends new tokens to requests, reports them, and ends requests."""

from array import array

from banyan.base.ids import NO_STEP
from banyan.disaggregation.scheduling import DisaggregationSide
from banyan.grammar.base import masks_for
from banyan.kv_cache.cache import KVCache
from banyan.messages.events import Tokens
from banyan.messages.plan import Mask, RowScores
from banyan.scheduler.jump_forward import advance, jump
from banyan.scheduler.request import Request
from banyan.scheduler.request_table import RequestTable


class OutputProcessor:
    """
    Args:
        disaggregation: told of what may be handed over; None where nothing is.
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

    def take(
        self,
        request: Request,
        tokens: "array[int]",
        scores: list[RowScores],
        now: float,
        vector: bytes = b"",
        hidden: bytes = b"",
        hidden_first: int = 0,
    ) -> None:
        """Append what has become known of a request, pass it on, and see whether it ends."""
        tokens, matched = _cut(request, tokens)
        is_allowed = True
        if request.grammar is not None:
            taken, is_allowed = advance(request, request.grammar, tokens, self._depth)
            matched = matched if len(taken) == len(tokens) else -1
            tokens = taken
        first = request.output_len
        request.tokens += tokens.tobytes()
        self._request_table.counters.output_tokens += len(tokens)
        for score in scores:
            request.scored_to = max(request.scored_to, score.first + len(score.logprobs) // 4)
        if tokens or scores or vector or hidden:
            passed_on = [_passed_on(score, request.known) for score in scores]
            cached = request.cached_tokens
            if self._disaggregation is not None:
                self._disaggregation.on_scores(request, passed_on)
            self._request_table.events.append(
                Tokens(
                    request.id,
                    first,
                    tokens.tobytes(),
                    passed_on,
                    cached,
                    vector,
                    hidden,
                    hidden_first,
                    request.stored_tokens,
                    request.cache_miss,
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
                jump(request, request.grammar, self._request_table)
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
        """The next row in flight can be masked once the token before it is known (rule R4)."""
        if request.grammar is None or not request.flights:
            return
        flight = request.flights[0]
        if flight.awaits_mask:
            flight.awaits_mask = False
            drafts = request.next_drafts[: flight.samples - 1]
            bits = masks_for(request.grammar, drafts, request.next_parents)
            self._request_table.masks.append(Mask(flight.step, flight.row, bits))


def _cut(request: Request, tokens: "array[int]") -> tuple["array[int]", int]:
    """The tokens up to the request's end, and the stop id among them (-1 for none)."""
    tokens = tokens[: request.limit - request.known]
    for i, token in enumerate(tokens):
        length = request.output_len + i + 1
        if token in request.sampling.stop_ids and length > request.sampling.min_new_tokens:
            return tokens[: i + 1], token
    return tokens, -1


def _passed_on(score: RowScores, end: int) -> RowScores:
    """The scores of positions below `end`: a verify row may have scored tokens that were cut."""
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
