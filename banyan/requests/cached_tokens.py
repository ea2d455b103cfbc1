"""What an answer says of the prefix cache beside the number of cached tokens: where they lay, and
why there were no more. Every route says it in these words.
"""

from collections.abc import Sequence

from banyan.config.hicache import HOST
from banyan.requests.generation import Usage


def cached_details(usages: Sequence[Usage], store: str) -> dict[str, object]:
    """How many cached tokens of these prompts lay in memory, on the host and in a store.

    Args:
        store: where pages of the cache outlive the engine; "" = nowhere.
    """
    cached = sum(usage.cached_tokens for usage in usages)
    stored = sum(usage.stored_tokens for usage in usages)
    told: dict[str, object] = {
        "device": cached - stored,
        "host": stored if store == HOST else 0,
    }
    if store:
        told["storage"] = 0 if store == HOST else stored
        told["storage_backend"] = store
    return told


def cache_miss(usages: Sequence[Usage]) -> dict[str, object]:
    """`cache_miss` as a field to add: why no more of these prompts came from the cache, each reason
    once (kv_cache/misses.py); none where everything came that could."""
    reasons = dict.fromkeys(usage.cache_miss for usage in usages if usage.cache_miss)
    return {"cache_miss": ",".join(reasons)} if reasons else {}
