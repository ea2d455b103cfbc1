"""Sizing: from free bytes to page counts, the same for the live engine and the simulator.

Knows bytes per page as a number; `runner/kvstore.py` says what that number is.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from banyan.base.errors import CapacityError, ConfigError
from banyan.config.schema import CacheConfig, ScheduleConfig
from banyan.kv_cache.groups import FULL, STATE, WINDOW, CacheGroup

MIB = 1 << 20

FEW_PAGES = 2
INTERVAL = 256
"""Tokens between two checkpoints of a state, where nobody says otherwise."""
SPARE_WINDOWS = 4
"""Window groups keep one page for prefixes to come, for this many of the groups beside them."""


@dataclass(frozen=True)
class GroupBytes:
    """One cache group before its pages are counted.

    Attributes:
        kind: of memory.groups.
        page_bytes: bytes of one page over the group's layers on this rank; of a STATE group, of
            one state.
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

    process_bytes: int
    """What the process held before: its libraries, and the weights that are its own."""
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
    process_bytes: int,
    total_bytes: int,
    free_bytes: int,
) -> MemoryPlan:
    """Lay out the cache; CapacityError when it cannot hold even a short request.

    Args:
        context_length: longest request the model or the user allows, in tokens.
        process_bytes, total_bytes, free_bytes: memory of this process and of the device, with the
            weights loaded.
    """
    budget = _budget(cache, process_bytes, total_bytes, free_bytes)
    size = cache.page_size
    if cache.keeps_windows:
        groups = [
            replace(group, kind=FULL, window=0) if group.kind == WINDOW else group
            for group in groups
        ]
    most = schedule.running_cap * -(-context_length // size)
    if cache.max_total_tokens:
        most = cache.max_total_tokens // size
    running = _running(schedule, most)
    chunk = schedule.chunk_tokens
    shares = [_share_of(group, cache, context_length, chunk, running) for group in groups]
    states = [at for at, group in enumerate(groups) if group.kind == STATE]
    for at in states:
        shares[at] = _states_of(groups[at], groups, cache, running, budget)

    def cost(pages: int) -> int:
        return sum(share(pages) * g.page_bytes for share, g in zip(shares, groups, strict=True))

    pages = bisect_right(range(most + 1), budget, key=cost) - 1
    if cache.max_total_tokens:
        pages = most
        if pages < FEW_PAGES:
            raise CapacityError(
                f"--max-total-tokens {cache.max_total_tokens}: the KV cache needs at least "
                f"{FEW_PAGES} pages of {size} tokens",
                hint=f"Give {FEW_PAGES * size} or more, or a smaller --page-size.",
            )
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
            hint="Free memory, or raise --mem-fraction-static.",
        )
    laid_out = tuple(
        CacheGroup(group.kind, _span_of(group, cache), share(pages) + 1, group.window)
        for group, share in zip(groups, shares, strict=True)
    )
    running = min([_running(schedule, pages), *(shares[at](pages) for at in states)])
    return MemoryPlan(
        process_bytes=process_bytes,
        cache_bytes=cost(pages) + sum(group.page_bytes for group in groups),
        free_bytes=free_bytes,
        groups=laid_out,
        max_total_tokens=pages * size,
        max_request_tokens=min(context_length, pages * size),
        max_running=running,
    )


def _span_of(group: GroupBytes, cache: CacheConfig) -> int:
    """Tokens of a page, or between two checkpoints of a state.

    Raises:
        ConfigError: that is no multiple of the page.
    """
    size, interval = cache.page_size, cache.state_interval
    if group.kind != STATE:
        return size
    if interval % size:
        raise ConfigError(
            f"--mamba-track-interval {interval} is no multiple of --page-size {size}",
            hint=f"choose {-(-interval // size) * size}",
        )
    return interval or -(-INTERVAL // size) * size


def _states_of(
    group: GroupBytes,
    groups: Sequence[GroupBytes],
    cache: CacheConfig,
    running: int,
    budget: int,
) -> Callable[[int], int]:
    """States that are held when groups that keep every position have so many pages: no more than
    all that run and all checkpoints of so many tokens, and room for one of each."""
    if cache.states:
        return lambda pages: cache.states
    interval, size = _span_of(group, cache), cache.page_size
    per_page = sum(other.page_bytes for other in groups if other.kind != STATE)

    def share(pages: int) -> int:
        memory = pages * per_page * cache.state_ratio if per_page else max(0, budget)
        useful = running + pages * size // interval
        return max(FEW_PAGES, min(useful, int(memory // group.page_bytes)))

    return share


def _running(schedule: ScheduleConfig, pages: int) -> int:
    """Requests that run at once over so many pages."""
    found = schedule.max_running or max(1, min(schedule.running_cap, pages // 2))
    return min(found, schedule.micro_batch * (schedule.token_gap + 1) or found)


def _share_of(
    group: GroupBytes, cache: CacheConfig, context_length: int, chunk: int, running: int
) -> Callable[[int], int]:
    """Pages of one group when groups that keep every position have so many."""
    if group.kind != WINDOW:
        return lambda pages: pages
    size = cache.page_size
    one = CacheGroup(WINDOW, size, FEW_PAGES, group.window)
    alone = one.peak_pages(1 << 62, chunk) if chunk > 0 else one.pages_for(context_length)
    ratio = cache.window_ratio
    if cache.window_mix >= 0:
        ratio = 1 - cache.window_mix * (1 - min(1.0, group.window / context_length))
    if ratio:  # a request that runs alone must find what it needs at its peak
        return lambda pages: min(pages, max(alone, int(pages * ratio)))
    if chunk <= 0:
        return lambda pages: pages
    return lambda pages: min(pages, running * alone + pages // SPARE_WINDOWS)


def _budget(cache: CacheConfig, process_bytes: int, total_bytes: int, free_bytes: int) -> int:
    if not cache.memory_fraction:
        return int(free_bytes * cache.free_share)
    if not 0 < cache.memory_fraction < 1:
        raise ConfigError(f"--mem-fraction-static must be in (0, 1), got {cache.memory_fraction}")
    return min(int(total_bytes * cache.memory_fraction) - process_bytes, free_bytes)
