"""Sizing: from free bytes to page counts, the same for the live engine and the simulator.

Knows bytes per page as a number; `runner/kvstore.py` says what that number is.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from banyan.base.errors import CapacityError, ConfigError
from banyan.config.schema import CacheConfig, ScheduleConfig
from banyan.memory.groups import WINDOW, CacheGroup

MIB = 1 << 20

CACHE_SHARE = 0.25
"""Share of the free memory that the cache takes when nobody says otherwise: the machine is rarely
ours alone."""
MAX_RUNNING = 128
"""Running requests when nobody says otherwise; more only lengthens everybody's step on a CPU."""
FEW_PAGES = 2


@dataclass(frozen=True)
class GroupBytes:
    """One cache group before its pages are counted.

    Attributes:
        kind: of memory.groups.
        page_bytes: bytes of one page over the group's layers on this rank.
        window: tokens that a position of a WINDOW group reads.
    """

    kind: str
    page_bytes: int
    window: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory of one rank is divided.

    Attributes:
        groups: the cache groups with their pages, the padding pages included.
        max_total_tokens: tokens that the cache holds.
        max_request_tokens: longest prompt + output of one request.
    """

    weight_bytes: int
    cache_bytes: int
    free_bytes: int
    """Free before the cache was laid out."""
    groups: tuple[CacheGroup, ...]
    max_total_tokens: int
    max_request_tokens: int
    max_running: int


def plan_memory(
    cache: CacheConfig,
    schedule: ScheduleConfig,
    *,
    context_length: int,
    groups: Sequence[GroupBytes],
    weight_bytes: int,
    total_bytes: int,
    free_bytes: int,
) -> MemoryPlan:
    """Lay out the cache; CapacityError when it cannot hold even a short request.

    Args:
        context_length: longest request the model or the user allows, in tokens.
        total_bytes, free_bytes: memory of the device, with the weights loaded.
    """
    budget = _budget(cache, weight_bytes, total_bytes, free_bytes)
    size = cache.page_size
    most = MAX_RUNNING * -(-context_length // size)
    if cache.max_total_tokens:
        most = cache.max_total_tokens // size
    running = schedule.max_running or max(1, min(MAX_RUNNING, most // 2))
    peaks = [_peak(group, size, schedule.chunk_tokens, running) for group in groups]

    def cost(pages: int) -> int:
        shares = (_share(pages, peak) for peak in peaks)
        return sum(n * g.page_bytes for n, g in zip(shares, groups, strict=True))

    pages = bisect_right(range(most + 1), budget, key=cost) - 1
    if cache.max_total_tokens:
        pages = most
        if cost(pages) > free_bytes:
            raise CapacityError(
                f"{cache.max_total_tokens} cache tokens need {cost(pages) // MIB} MiB, "
                f"{free_bytes // MIB} MiB are free",
                hint="Lower --max-total-tokens.",
            )
    if pages < FEW_PAGES:
        raise CapacityError(
            f"the KV cache needs at least {FEW_PAGES} pages of {size} tokens "
            f"({cost(FEW_PAGES) / MIB:.1f} MiB); {max(0, budget) / MIB:.1f} MiB are left",
            hint="Free memory, or raise --mem-fraction-static or --max-total-tokens.",
        )
    laid_out = tuple(
        CacheGroup(group.kind, size, _share(pages, peak) + 1, group.window)
        for group, peak in zip(groups, peaks, strict=True)
    )
    return MemoryPlan(
        weight_bytes=weight_bytes,
        cache_bytes=cost(pages) + sum(group.page_bytes for group in groups),
        free_bytes=free_bytes,
        groups=laid_out,
        max_total_tokens=pages * size,
        max_request_tokens=min(context_length, pages * size),
        max_running=schedule.max_running or max(1, min(MAX_RUNNING, pages // 2)),
    )


def _peak(group: GroupBytes, page_size: int, chunk: int, running: int) -> int:
    """Pages beyond which more only serve as cache; 0 = every page of the budget is wanted."""
    if group.kind != WINDOW or chunk <= 0:
        return 0
    one = CacheGroup(WINDOW, page_size, FEW_PAGES, group.window)
    return running * one.peak_pages(1 << 62, chunk)


def _share(pages: int, peak: int) -> int:
    """Pages of one group when full groups have `pages`: what all requests need at their peak, and
    a quarter of what full groups keep for prefixes to come."""
    return min(pages, peak + pages // 4) if peak else pages


def _budget(cache: CacheConfig, weight_bytes: int, total_bytes: int, free_bytes: int) -> int:
    if not cache.memory_fraction:
        return int(free_bytes * CACHE_SHARE)
    if not 0 < cache.memory_fraction < 1:
        raise ConfigError(f"--mem-fraction-static must be in (0, 1), got {cache.memory_fraction}")
    return min(int(total_bytes * cache.memory_fraction) - weight_bytes, free_bytes)
