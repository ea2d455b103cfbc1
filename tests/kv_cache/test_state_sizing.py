"""From bytes to states: how many are held beside pages, and where prefixes can be taken up."""

import pytest

from banyan.base.errors import CapacityError, ConfigError
from banyan.base.ids import SlotId
from banyan.kv_cache.cache import KVCache, Match
from banyan.kv_cache.eviction import EVICTION
from banyan.kv_cache.sizing import FULL, STATE, CacheGroup, GroupBytes, MemoryPlan, plan_memory
from tests.kv_cache.test_sizing import GIB, settled

MIB = 1 << 20
PAGES = GroupBytes(FULL, 1 << 16)
STATES = GroupBytes(STATE, 3 << 20)


def plan(*flags: str, groups=(STATES, PAGES), free: int = 4 * GIB) -> MemoryPlan:
    settled_flags = settled(*flags)
    return plan_memory(
        settled_flags.cache,
        settled_flags.schedule,
        context_length=32768,
        groups=groups,
        process_bytes=0,
        total_bytes=16 * GIB,
        free_bytes=free,
    )


def shares(laid: MemoryPlan) -> tuple[int, int]:
    """States and pages."""
    states, pages = (group.num_pages - 1 for group in laid.groups)
    return states, pages


@pytest.mark.parametrize("free", [GIB, 3 * GIB])
def test_a_ratio_decides_what_states_take(free: int) -> None:
    for words, ratio in (((), 0.9), (("--mamba-full-memory-ratio", "0.25"), 0.25)):
        laid = plan(*words, free=free)
        states, pages = shares(laid)
        assert states * STATES.page_bytes == pytest.approx(
            pages * PAGES.page_bytes * ratio, abs=STATES.page_bytes
        )
        assert 0.97 * free // 4 < laid.cache_bytes <= free // 4 + STATES.page_bytes + MIB


def test_as_many_states_are_held_as_the_flag_says() -> None:
    laid = plan("--max-mamba-cache-size", "21", "--max-total-tokens", "4096")
    assert shares(laid) == (21, 256)
    assert laid.max_running == 21, "each running request needs one"


def test_no_more_states_are_held_than_requests_and_checkpoints_can_have() -> None:
    small = GroupBytes(STATE, 100)
    words = ("--max-total-tokens", "8192", "--max-running-requests", "3")
    assert shares(plan(*words, groups=(small, PAGES))) == (3 + 8192 // 256, 512)


def test_no_states_are_held_for_checkpoints_where_none_are_wanted() -> None:
    small = GroupBytes(STATE, 100)
    words = ("--max-total-tokens", "8192", "--max-running-requests", "3")
    held = [
        shares(plan(*words, "--mamba-scheduler-strategy", strategy, groups=(small, PAGES)))[0]
        for strategy in ("no_buffer", "extra_buffer")
    ]
    assert held == [3, 3 + 8192 // 256]


def test_one_request_and_one_checkpoint_always_have_a_state() -> None:
    laid = plan("--max-total-tokens", "64", groups=(STATES, PAGES))
    assert shares(laid) == (2, 4)
    assert laid.max_running == 2


def test_states_alone_take_what_is_free_and_bound_no_tokens() -> None:
    laid = plan(groups=(STATES,))
    (group,) = laid.groups
    assert group.num_pages - 1 == GIB // STATES.page_bytes
    assert laid.max_request_tokens == 32768
    with pytest.raises(CapacityError):
        plan(groups=(STATES,), free=8 * MIB)


def test_the_interval_decides_where_a_prefix_can_be_taken_up() -> None:
    def intervals(*words: str) -> tuple[int, ...]:
        return tuple(group.page_tokens for group in plan(*words).groups)

    assert intervals() == (256, 16)
    assert intervals("--mamba-track-interval", "64") == (64, 16)
    assert intervals("--page-size", "512") == (512, 512)
    with pytest.raises(ConfigError, match=r"--mamba-track-interval 40 .* --page-size 16"):
        intervals("--mamba-track-interval", "40")


def test_states_keep_their_kind_where_windows_keep_every_position() -> None:
    laid = plan("--disable-hybrid-swa-memory", "--max-total-tokens", "4096")
    assert [group.kind for group in laid.groups] == [STATE, FULL]


def test_a_request_of_any_length_holds_one_state() -> None:
    cache = KVCache((CacheGroup(STATE, 256, 9), CacheGroup(FULL, 16, 2200)), EVICTION.load("lru"))
    lease, _ = cache.lease(SlotId(1), b"", Match([], 0), 0)
    held = {}
    for length in (1, 1024, 32768):
        assert cache.grow(lease, length) is not None
        held[length] = tuple(len(table) for table in lease.tables)
    assert held == {1: (1, 1), 1024: (1, 64), 32768: (1, 2048)}
