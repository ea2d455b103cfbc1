"""Who enters, and who gives pages back. Pure functions over requests and the cache's counts."""

from banyan.kv_cache import misses
from banyan.kv_cache.cache import KVCache, Match
from banyan.kv_cache.groups import FULL
from banyan.kv_cache.misses import Miss
from banyan.scheduler.budget import Limits, NewTokenRatio
from banyan.scheduler.request import Request


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


def prefix_of(request: Request, cache: KVCache) -> Match:
    """Longest cached prefix that the request may use."""
    return cache.probe(request.namespace, request.tokens, prefix_limit(request))


def why_no_more(request: Request, cache: KVCache, match: Match) -> Miss:
    """Why the cache gives no more of a request that begins."""
    found = (cache.weights + request.namespace, match.path, match.tokens)
    miss = cache.misses.why(*found, request.tokens, prefix_limit(request), request.known - 1)
    if miss.reason not in (misses.EVICTED, misses.PAGE, misses.UNSEEN):
        return miss
    return miss._replace(reason=_why_not_from_store(request, cache, match) or miss.reason)


def _why_not_from_store(request: Request, cache: KVCache, match: Match) -> str:
    """Why what comes next does not come from the store; "" where the store has none, or where
    nobody asked it."""
    fetch, tier, depth = request.fetch, cache.tier, len(match.path)
    if fetch is None or tier is None or not tier.is_attached or depth >= len(fetch.keys):
        return ""
    if fetch.held < 0 or tier.load_of(fetch.keys[depth]) is not None:
        return misses.LOADING
    if depth >= fetch.held:
        return ""
    return misses.UNREADABLE if fetch.loads and fetch.loads[-1].is_broken else misses.STORED


def reserve(running: list[Request], cache: KVCache, ratio: NewTokenRatio) -> list[int]:
    """Pages per group that running requests are expected to take yet."""
    pages = [0] * len(cache.groups)
    for request in running:
        tokens = request.known - request.planned + ratio.expects(request)
        for g, group in enumerate(cache.groups):
            if group.kind == FULL:
                pages[g] += -(-max(0, tokens) // group.page_tokens)
    return pages


def may_enter(
    request: Request,
    match: Match,
    cache: KVCache,
    limits: Limits,
    ratio: NewTokenRatio,
    reserved: list[int],
) -> bool:
    """Whether there is room for the request's known tokens and its share of the expected ones."""
    expected = 1 + (ratio.expects(request) if any(reserved) else 0)
    tokens = min(request.known + expected, request.limit)
    return cache.admits(match, max(tokens, request.known), limits.chunk_tokens, reserved)


def victims(running: list[Request], starved: Request) -> list[Request]:
    """Who is retracted so that `starved` can go on, first victim first.

    Only requests of lower rank: the oldest request of the highest priority always runs to its
    end, so retraction cannot go round in circles.
    """
    return [r for r in reversed(running) if r.rank > starved.rank]
