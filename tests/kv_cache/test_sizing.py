"""From bytes to pages: what is laid out fits, and window groups get what their requests need."""

import pytest

from banyan.base.errors import CapacityError
from banyan.config.defaults import Defaults, settle
from banyan.config.schema import CacheConfig, Config, ScheduleConfig
from banyan.kv_cache.sizing import FULL, WINDOW, GroupBytes, MemoryPlan, plan_memory
from tests.support.flags import config_of

GIB = 1 << 30
FULL_LAYERS = GroupBytes(FULL, 1 << 16)
WINDOW_LAYERS = GroupBytes(WINDOW, 5 << 16, window=512)


def settled(*words: str) -> Config:
    """What a server started with these words has on a device of modest taste."""
    return settle(config_of(*words), Defaults("abacus", ("float32",), 16, 512, 128, 0.25))[0]


def plan(
    *groups: GroupBytes,
    free: int = 4 * GIB,
    tokens: int = 0,
    running: int = 0,
    chunk: int = 512,
    context: int = 32768,
) -> MemoryPlan:
    return plan_memory(
        CacheConfig(page_size=16, max_total_tokens=tokens, free_share=0.25),
        ScheduleConfig(max_running=running, running_cap=128, chunk_tokens=chunk),
        context_length=context,
        groups=groups,
        process_bytes=0,
        total_bytes=16 * GIB,
        free_bytes=free,
    )


@pytest.mark.parametrize("groups", [(FULL_LAYERS,), (FULL_LAYERS, WINDOW_LAYERS), (WINDOW_LAYERS,)])
@pytest.mark.parametrize("free", [GIB // 16, GIB, 5 * GIB])
def test_what_is_laid_out_fits_into_its_share_and_one_page_more_would_not(groups, free):
    laid = plan(*groups, free=free, running=4)
    used = sum(
        (group.num_pages - 1) * asked.page_bytes
        for group, asked in zip(laid.groups, groups, strict=True)
    )
    assert used <= free // 4
    assert used > free // 4 - 2 * sum(g.page_bytes for g in groups)
    assert laid.cache_bytes == used + sum(g.page_bytes for g in groups)


def test_a_window_group_holds_every_running_request_at_its_peak():
    laid = plan(FULL_LAYERS, WINDOW_LAYERS, running=4, tokens=100_000)
    full, window = laid.groups
    peak = window.peak_pages(1 << 30, chunk=512)
    assert window.num_pages - 1 >= 4 * peak
    assert window.num_pages < full.num_pages / 2


def test_pages_of_a_window_make_room_for_more_tokens():
    mixed = plan(FULL_LAYERS, WINDOW_LAYERS, running=2)
    full = plan(FULL_LAYERS, GroupBytes(FULL, WINDOW_LAYERS.page_bytes), running=2)
    assert mixed.max_total_tokens > 2 * full.max_total_tokens


def windows_of(*flags: str, tokens: int = 100_000) -> float:
    """Tokens of the window group per token of the full one, under these flags."""
    laid = plan_memory(
        settled("--max-total-tokens", str(tokens), *flags).cache,
        settled("--max-running-requests", "2").schedule,
        context_length=32768,
        groups=(FULL_LAYERS, WINDOW_LAYERS),
        process_bytes=0,
        total_bytes=16 * GIB,
        free_bytes=8 * GIB,
    )
    full, window = laid.groups
    assert laid.max_total_tokens == tokens - tokens % 16 == (full.num_pages - 1) * 16
    return (window.num_pages - 1) / (full.num_pages - 1)


def test_a_ratio_decides_what_window_layers_hold():
    assert windows_of() == pytest.approx(0.25 + 2 * 66 / 6250, abs=0.001)
    assert windows_of("--swa-full-tokens-ratio", "0.8") == pytest.approx(0.8, abs=0.001)
    assert windows_of("--swa-full-tokens-ratio", "0.1") == pytest.approx(0.1, abs=0.001)


def test_no_ratio_takes_from_a_window_what_one_request_needs():
    assert windows_of("--swa-full-tokens-ratio", "0.001") == pytest.approx(66 / 6250, abs=0.001)
    assert windows_of("--swa-full-tokens-ratio", "0.001", tokens=320) == 1


def test_a_mix_lies_between_equal_groups_and_the_window_s_share_of_the_context():
    assert windows_of("--hybrid-kvcache-ratio", "0") == 1
    assert windows_of("--hybrid-kvcache-ratio", "0.5") == pytest.approx(0.508, abs=0.001)
    assert windows_of("--hybrid-kvcache-ratio", "1") == pytest.approx(512 / 32768, abs=0.001)


def test_a_micro_batch_bounds_what_runs_at_once():
    def running(*flags: str) -> int:
        return plan_memory(
            settled("--max-total-tokens", "4096").cache,
            settled(*flags).schedule,
            context_length=32768,
            groups=(FULL_LAYERS,),
            process_bytes=0,
            total_bytes=16 * GIB,
            free_bytes=8 * GIB,
        ).max_running

    assert (running(), running("--max-running-requests", "5")) == (128, 5)
    assert running("--pp-max-micro-batch-size", "3") == 3
    assert running("--pp-max-micro-batch-size", "3", "--max-running-requests", "5") == 3
    assert running("--pp-max-micro-batch-size", "9", "--max-running-requests", "5") == 5


def test_window_layers_keep_every_position_when_a_flag_asks_for_it():
    laid = [
        plan_memory(
            settled("--max-total-tokens", "4096", *flags).cache,
            settled().schedule,
            context_length=32768,
            groups=(FULL_LAYERS, WINDOW_LAYERS),
            process_bytes=0,
            total_bytes=16 * GIB,
            free_bytes=8 * GIB,
        ).groups[1]
        for flags in ([], ["--disable-hybrid-swa-memory"])
    ]
    assert [(group.kind, group.window) for group in laid] == [(WINDOW, 512), (FULL, 0)]
    assert laid[1].num_pages == 4096 // 16 + 1


def test_a_share_of_memory_decides_what_weights_and_cache_may_take():
    def cache_bytes(share: float) -> int:
        return plan_memory(
            settled("--mem-fraction-static", str(share)).cache,
            settled().schedule,
            context_length=32768,
            groups=(FULL_LAYERS,),
            process_bytes=GIB,
            total_bytes=16 * GIB,
            free_bytes=8 * GIB,
        ).cache_bytes

    assert 0.9 * GIB < cache_bytes(1 / 8) <= 1.1 * GIB
    assert 2.9 * GIB < cache_bytes(1 / 4) <= 3.1 * GIB


def test_a_cache_of_fixed_size_that_does_not_fit_is_refused_with_numbers():
    with pytest.raises(CapacityError, match="100000 cache tokens need 390 MiB, 300 MiB are free"):
        plan(FULL_LAYERS, tokens=100_000, free=300 << 20)


def test_memory_for_less_than_two_pages_is_refused():
    with pytest.raises(CapacityError, match="at least 2 pages of 16 tokens"):
        plan(FULL_LAYERS, free=1 << 17)


@pytest.mark.parametrize("tokens", ["1", "31"])
def test_fewer_tokens_than_the_cache_must_hold_are_the_flag_s_fault_and_not_the_memory_s(tokens):
    with pytest.raises(CapacityError) as refused:
        plan_memory(
            settled("--max-total-tokens", tokens).cache,
            settled().schedule,
            context_length=32768,
            groups=(FULL_LAYERS,),
            process_bytes=GIB,
            total_bytes=16 * GIB,
            free_bytes=8 * GIB,
        )
    assert str(refused.value) == (
        f"--max-total-tokens {tokens}: the KV cache needs at least 2 pages of 16 tokens. "
        "Give 32 or more, or a smaller --page-size."
    )
