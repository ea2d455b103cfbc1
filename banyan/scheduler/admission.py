"""Admission: which requests may join the queue, and which waiting requests may run.

A refused request raises RequestError with the reason. Admission to a slot depends on the pages that
the request and the running ones are expected to need.
"""

from collections import Counter

from banyan.base.errors import RequestError
from banyan.kv_cache import misses
from banyan.kv_cache.cache import TOKEN_BYTES, KVCache, Match
from banyan.kv_cache.misses import Miss
from banyan.kv_cache.sizing import FULL
from banyan.lora.scheduling import Adapters, unknown_adapter
from banyan.messages.requests import Generate
from banyan.scheduler.budget import NewTokenRatio, SchedulerLimits
from banyan.scheduler.request import Request
from banyan.scheduler.request_table import RequestTable
from banyan.scheduler.spans import last_end


def check_request(
    generate: Generate,
    request_table: RequestTable,
    cache: KVCache,
    limits: SchedulerLimits,
    adapters: Adapters | None = None,
) -> None:
    """Raise RequestError when the request cannot be served here, or not now.

    If the queue is full, waiting requests of lower priority are evicted for it.
    """
    known = len(generate.tokens) // TOKEN_BYTES
    total = known + generate.sampling.max_new_tokens
    if request_table.find(generate.request) is not None:
        raise RequestError(f"Duplicate request ID detected: {generate.request}", param="rid")
    if generate.adapter and adapters is None:
        raise unknown_adapter(generate.adapter, [])
    if not known:
        raise RequestError("The prompt is empty", hint="Send at least one token.")
    if total > limits.max_request_tokens:
        raise RequestError(
            f"{known} prompt tokens and {generate.sampling.max_new_tokens} new tokens are more "
            f"than the {limits.max_request_tokens} that one request may have",
            code="context_length_exceeded",
        )
    if not cache.capacity.fits_alone(total, limits.chunk_tokens):
        raise RequestError(
            f"{total} tokens do not fit in the cache", code="context_length_exceeded"
        )
    priorities = limits.priorities
    if generate.priority and priorities.refuse_when_off and not priorities.are_honoured:
        raise RequestError(
            f"The request brings priority {generate.priority}; priorities are switched off",
            param="priority",
            hint="Start the server with --enable-priority-scheduling.",
        )
    if limits.max_queued or limits.max_queued_tokens:
        _evict_queued(
            request_table, limits, known, priorities.of(generate.priority), generate.caller
        )


def _evict_queued(
    request_table: RequestTable, limits: SchedulerLimits, known: int, priority: int, caller: bytes
) -> None:
    """Make place for a new prompt of `known` tokens in a full queue.

    Evicts waiting requests without output, the newest first: of lower priority, or of the same one
    and a caller with more waiting requests. Evicts none if that does not make enough place, and
    raises RequestError.
    """
    number = len(request_table.waiting)
    tokens = sum(r.prompt_len for r in request_table.waiting) if limits.max_queued_tokens else 0
    evicted: list[Request] = []
    held = Counter(request.caller for request in request_table.waiting)
    for last in reversed(request_table.waiting):
        if _queue_has_place(limits, number, tokens + known):
            break
        has_run = last.stats.admitted_s is not None or last.output_len
        is_heavy = last.priority == priority and held[last.caller] > held[caller] + 1
        if has_run or not (last.priority < priority or is_heavy):
            continue
        evicted.append(last)
        held[last.caller] -= 1
        number, tokens = number - 1, tokens - last.prompt_len
    if not _queue_has_place(limits, number, tokens + known):
        raise RequestError("The request queue is full.", status=503, code="queue_full")
    for last in evicted:
        text = "The request is aborted by a higher priority request."
        if last.priority == priority:
            text = "The request is aborted: the queue is full, and other callers wait for less."
        request_table.fail(last, 503, text, "queue_full")


def _queue_has_place(limits: SchedulerLimits, waiting: int, tokens: int) -> bool:
    """Whether one more request may wait next to `waiting` others; `tokens` counts the prompt tokens
    of all. An empty queue takes any prompt, else a long one would never be served.
    """
    if limits.max_queued and waiting >= limits.max_queued:
        return False
    return not waiting or not limits.max_queued_tokens or tokens <= limits.max_queued_tokens


def fail_overdue(request_table: RequestTable, limits: SchedulerLimits, now: float) -> None:
    """Fail each request that has waited or run for longer than is allowed."""
    if limits.wait_s <= 0 and limits.run_s <= 0:
        return
    for request in (*request_table.waiting, *request_table.running):
        stats = request.stats
        if stats.admitted_s is None:
            verb, limit_s, since_s = "has waited", limits.wait_s, stats.submitted_s
        else:
            verb, limit_s, since_s = "has run", limits.run_s, stats.admitted_s
        if 0 < limit_s < now - since_s:
            text = f"The request {verb} for {now - since_s:.1f} s; {limit_s:g} s are allowed."
            request_table.fail(request, 503, text, "timed_out")


class Admission:
    """Whether waiting requests fit next to the running ones."""

    def __init__(self, cache: KVCache, limits: SchedulerLimits, ratio: NewTokenRatio) -> None:
        self._cache = cache
        self._limits = limits
        self._ratio = ratio

    def reserve(self, running: list[Request]) -> list[int]:
        """Pages per group that running requests are still expected to take."""
        pages = [0] * len(self._cache.groups)
        for request in running:
            tokens = request.known - request.planned + self._ratio.expected_tokens(request)
            for g, group in enumerate(self._cache.groups):
                if group.kind == FULL:
                    pages[g] += -(-max(0, tokens) // group.page_tokens)
        return pages

    def fits(self, request: Request, match: Match, reserved: list[int]) -> bool:
        """Whether there are pages for the request's known tokens and its expected output.

        Args:
            match: its cached prefix.
            reserved: pages per group for others.
        """
        expected = 1 + (self._ratio.expected_tokens(request) if any(reserved) else 0)
        tokens = max(request.known, min(request.known + expected, request.limit))
        return self._cache.capacity.admits(match, tokens, self._limits.chunk_tokens, reserved)


def prefix_limit(request: Request) -> int:
    """Most tokens of the request that may come from a cache.

    At least the last known token is computed, and so is every position whose logits are scored or
    whose hidden state is wanted.
    """
    limit = 0 if request.starts_over else request.known - 1
    if request.wants_scores:
        limit = min(limit, max(0, request.scored_to - 1))
    if request.wants_hidden:
        limit = min(limit, request.hidden_to)
    return limit


def cached_prefix(request: Request, cache: KVCache) -> Match:
    """Longest cached prefix of the request, wherever it ends in a span."""
    return cache.probe(request.namespace, request.tokens, prefix_limit(request))


def prefix_of(request: Request, cache: KVCache) -> Match:
    """Longest cached prefix that the request may use."""
    match = cached_prefix(request, cache)
    spans = request.generate.spans
    while spans and (end := last_end(spans, match.tokens)) < match.tokens:
        match = cache.probe(request.namespace, request.tokens, end)
    return match


def explain_miss(request: Request, cache: KVCache, match: Match) -> Miss:
    """Why no more of a new request's prompt comes from the cache."""
    if match.tokens >= request.known - 1:
        return Miss()
    miss = cache.misses.explain(
        namespace=cache.weights + request.namespace,
        path=match.path,
        found=match.tokens,
        tokens=request.tokens,
        limit=prefix_limit(request),
    )
    if miss.reason not in (misses.EVICTED, misses.PAGE, misses.UNSEEN):
        return miss
    return miss._replace(reason=_explain_store_miss(request, cache, match) or miss.reason)


def _explain_store_miss(request: Request, cache: KVCache, match: Match) -> str:
    """Why the next block does not come from the store; "" if the store lacks it or was not
    asked.
    """
    fetch, tier, depth = request.fetch, cache.tier, len(match.path)
    if fetch is None or tier is None or not tier.is_attached or depth >= len(fetch.keys):
        return ""
    if fetch.held < 0 or fetch.keys[depth] in tier.loading:
        return misses.LOADING
    if depth >= fetch.held:
        return ""
    return misses.UNREADABLE if fetch.loads and fetch.loads[-1].is_broken else misses.STORED


def victims(running: list[Request], starved: Request) -> list[Request]:
    """Requests that may be retracted so that `starved` can continue, first victim first.

    Only requests of lower rank: the oldest request of the highest priority always runs to its end,
    so retraction always makes progress.
    """
    return [r for r in reversed(running) if r.rank > starved.rank]
