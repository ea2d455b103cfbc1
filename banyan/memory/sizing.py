"""Sizing: from free bytes to page counts, the same for the live engine and the simulator.

Knows bytes per page as a number; `runner/kvstore.py` says what that number is.
"""

from dataclasses import dataclass

from banyan.base.errors import CapacityError, ConfigError
from banyan.config.schema import CacheConfig, ScheduleConfig

MIB = 1 << 20

CACHE_SHARE = 0.25
"""Share of the free memory that the cache takes when nobody says otherwise: the machine is rarely
ours alone."""
MAX_RUNNING = 128
"""Running requests when nobody says otherwise; more only lengthens everybody's step on a CPU."""
FEW_PAGES = 2


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory of one rank is divided.

    Attributes:
        num_pages: pages of the cache, the padding page included.
        max_total_tokens: tokens that the cache holds.
        max_request_tokens: longest prompt + output of one request.
    """

    weight_bytes: int
    cache_bytes: int
    free_bytes: int
    """Free before the cache was laid out."""
    page_tokens: int
    num_pages: int
    max_total_tokens: int
    max_request_tokens: int
    max_running: int


def plan_memory(
    cache: CacheConfig,
    schedule: ScheduleConfig,
    *,
    context_length: int,
    page_bytes: int,
    weight_bytes: int,
    total_bytes: int,
    free_bytes: int,
) -> MemoryPlan:
    """Lay out the cache; CapacityError when it cannot hold even a short request.

    Args:
        context_length: longest request the model or the user allows, in tokens.
        page_bytes: bytes of one page over all layers of this rank.
        total_bytes, free_bytes: memory of the device, with the weights loaded.
    """
    budget = _budget(cache, weight_bytes, total_bytes, free_bytes)
    pages = budget // page_bytes
    most = MAX_RUNNING * -(-context_length // cache.page_size)
    pages = min(pages, most)
    if cache.max_total_tokens:
        pages = cache.max_total_tokens // cache.page_size
        if pages * page_bytes > free_bytes:
            raise CapacityError(
                f"{cache.max_total_tokens} cache tokens need {pages * page_bytes // MIB} MiB, "
                f"{free_bytes // MIB} MiB are free",
                hint="Lower --max-total-tokens.",
            )
    if pages < FEW_PAGES:
        raise CapacityError(
            f"the KV cache needs at least {FEW_PAGES} pages of {cache.page_size} tokens "
            f"({FEW_PAGES * page_bytes / MIB:.1f} MiB); {max(0, budget) / MIB:.1f} MiB are left",
            hint="Free memory, or raise --mem-fraction-static or --max-total-tokens.",
        )
    tokens = pages * cache.page_size
    return MemoryPlan(
        weight_bytes=weight_bytes,
        cache_bytes=(pages + 1) * page_bytes,
        free_bytes=free_bytes,
        page_tokens=cache.page_size,
        num_pages=pages + 1,
        max_total_tokens=tokens,
        max_request_tokens=min(context_length, tokens),
        max_running=schedule.max_running or max(1, min(MAX_RUNNING, pages // 2)),
    )


def _budget(cache: CacheConfig, weight_bytes: int, total_bytes: int, free_bytes: int) -> int:
    if not cache.memory_fraction:
        return int(free_bytes * CACHE_SHARE)
    if not 0 < cache.memory_fraction < 1:
        raise ConfigError(f"--mem-fraction-static must be in (0, 1), got {cache.memory_fraction}")
    return min(int(total_bytes * cache.memory_fraction) - weight_bytes, free_bytes)
