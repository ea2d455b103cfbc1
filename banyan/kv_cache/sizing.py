"""CacheGroup: layers with the same page geometry and the same rule for which positions are kept.
`plan_memory` computes their page counts from free bytes, for the live engine and the simulator.

`runner/kvstore.py` computes the bytes per page and holds the tensors.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm

from banyan.base.errors import CapacityError, ConfigError
from banyan.config.schema import CacheConfig, ScheduleConfig
from banyan.model_config.model_config import FULL, STATE, WINDOW

MIB = 1 << 20

FEW_PAGES = 2
INTERVAL = 256
"""Default tokens between two state checkpoints."""
SPARE_WINDOWS = 4
"""A window group keeps one extra page for cached prefixes per this many pages of a full group."""


@dataclass(frozen=True)
class CacheGroup:
    """Geometry of one group on one rank.

    Attributes:
        kind: FULL | WINDOW | STATE.
        page_tokens: tokens per page; for STATE the distance between checkpoints.
        num_pages: pages in the pool, including the padding page 0.
        window: positions that a WINDOW layer reads, including its own.
    """

    kind: str
    page_tokens: int
    num_pages: int
    window: int = 0

    def __post_init__(self) -> None:
        assert self.kind in (FULL, WINDOW, STATE), self.kind
        assert self.page_tokens > 0 and self.num_pages > 1
        assert (self.window > 0) == (self.kind == WINDOW)

    def pages_for(self, tokens: int) -> int:
        """Pages for `tokens` positions of one request, nothing shared, nothing released."""
        return 1 if self.kind == STATE else -(-tokens // self.page_tokens)

    def first_read(self, start: int) -> int:
        """Lowest position that a row starting at `start` reads in a WINDOW group."""
        return max(0, start - self.window + 1)

    def first_needed(self, block_size: int, blocks: int) -> int:
        """Index of the first block whose pages a prefix of `blocks` blocks needs in this group."""
        if self.kind == WINDOW:
            return self.first_read(blocks * block_size) // block_size
        return 0 if self.kind == FULL else max(0, blocks - 1)

    def peak_pages(self, tokens: int, chunk: int) -> int:
        """Most pages a request of `tokens` positions needs at once, in rows of at most `chunk`."""
        if self.kind != WINDOW:
            return self.pages_for(tokens)
        return min(self.pages_for(tokens), self.pages_for(self.window + chunk) + 1)


def common_block_size(groups: tuple[CacheGroup, ...]) -> int:
    """Tokens per radix node: a multiple of every group's page, so that a node has whole pages."""
    return lcm(*(g.page_tokens for g in groups))


@dataclass(frozen=True)
class GroupBytes:
    """One cache group before its pages are counted.

    Attributes:
        kind: FULL | WINDOW | STATE.
        page_bytes: bytes of one page over the group's layers on this rank; for STATE, bytes of one
            state.
        window: positions that a WINDOW layer reads.
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
    """Memory of the process before the cache: libraries and its own weights."""
    cache_bytes: int
    free_bytes: int
    """Free before the cache was allocated."""
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
    """Compute page counts; CapacityError if not even a short request fits.

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
    """Tokens per page, or between two state checkpoints.

    Raises:
        ConfigError: the interval is not a multiple of the page size.
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
    """Number of states as a function of the pages of the other groups: at most one per running
    request plus one per checkpoint interval, at least FEW_PAGES. "no_buffer" leaves out the
    checkpoints, which then take states that no running request has.
    """
    if cache.states:
        return lambda pages: cache.states
    interval, size = _span_of(group, cache), cache.page_size
    per_page = sum(other.page_bytes for other in groups if other.kind != STATE)

    def share(pages: int) -> int:
        memory = pages * per_page * cache.state_ratio if per_page else max(0, budget)
        checkpoints = 0 if cache.state_strategy == "no_buffer" else pages * size // interval
        useful = running + checkpoints
        return max(FEW_PAGES, min(useful, int(memory // group.page_bytes)))

    return share


def _running(schedule: ScheduleConfig, pages: int) -> int:
    """Requests that may run at the same time with this many pages."""
    found = schedule.max_running or max(1, min(schedule.running_cap, pages // 2))
    return min(found, schedule.micro_batch * (schedule.token_gap + 1) or found)


def _share_of(
    group: GroupBytes, cache: CacheConfig, context_length: int, chunk: int, running: int
) -> Callable[[int], int]:
    """Pages of one group as a function of the pages of a FULL group."""
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
