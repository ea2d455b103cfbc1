"""Prefixes that end within a block: what is found, copied, kept, and let go."""

from array import array

from banyan.base.ids import NO_STEP, SlotId, StepId
from banyan.kv_cache.cache import KVCache
from banyan.kv_cache.eviction import lru
from banyan.kv_cache.radix_tree import PartialMatch
from banyan.kv_cache.sizing import FULL, STATE, WINDOW, CacheGroup
from banyan.messages.requests import StopAt
from tests.kv_cache.test_cache import fill, ids, lease_of, make_cache
from tests.scheduler.driver import Driver


def part_of(
    cache: KVCache, tokens: bytes, limit: int, namespace: bytes = b""
) -> PartialMatch | None:
    return cache.probe(namespace, tokens, limit).partial


def tokens(*values: int) -> bytes:
    return array("i", values).tobytes()


def test_of_many_units_the_one_that_begins_with_most_tokens_is_found() -> None:
    cache = make_cache()
    for block in ((5, 6, 7, 8), (5, 6, 9, 9), (5, 6, 7, 1), (4, 6, 7, 8)):
        cache.release(fill(cache, tokens(*block)))
    for wanted, shared in (((5, 6, 9, 1), 3), ((5, 6, 7, 3), 3), ((4, 4, 4, 4), 1), ((9, 9), 0)):
        part = part_of(cache, tokens(*wanted), 4)
        assert (part.tokens if part else 0) == shared
    assert part_of(cache, tokens(5, 6, 7, 8), 2).tokens == 2, "no more than the limit"
    assert part_of(cache, tokens(5, 6, 7, 8), 4, b"other") is None


def test_what_a_step_in_flight_writes_is_not_copied() -> None:
    cache = make_cache()
    lease = fill(cache, ids(4), step=StepId(1))
    assert part_of(cache, ids(3), 3) is None
    cache.settle(StepId(1))
    assert part_of(cache, ids(3), 3).tokens == 3
    cache.check([lease])


def test_a_copied_unit_stays_until_the_copies_of_all_its_pages_have_ended() -> None:
    cache = make_cache(CacheGroup(FULL, 4, 20), CacheGroup(WINDOW, 2, 20, window=6))
    cache.release(fill(cache, ids(8)))
    lease, _ = cache.lease(SlotId(2), b"", cache.probe(b"", ids(8), 7), 0)
    cache.grow(lease, 8)
    copies = cache.partial_blocks.begin(lease, 0)
    assert [(c.group, c.dst.page) for c in copies] == [
        (0, lease.tables[0][1]),
        *((1, page) for page in lease.tables[1][2:4]),
    ]
    cache.release(lease)
    cache.flush()
    assert cache.tree.num_nodes == 2, "the block is being read"
    cache.end_copies([copies[0].id], [copies[1].id])
    cache.flush()
    assert cache.tree.num_nodes == 2
    cache.end_copies([copies[2].id], [])
    cache.flush()
    cache.check([])
    assert not cache.tree.num_nodes and cache.ledgers[0].free == 19


def test_a_lease_that_ends_before_its_copy_begins_lets_the_unit_go() -> None:
    cache = make_cache()
    cache.release(fill(cache, ids(8)))
    lease, _ = cache.lease(SlotId(2), b"", cache.probe(b"", ids(8), 7), 0)
    cache.release(lease)
    cache.flush()
    assert not cache.tree.num_nodes
    cache.check([])


def ended(cache: KVCache, prompt: bytes, slot: int = 1) -> None:
    """A request that has computed all of `prompt` and ended."""
    count = len(prompt) // 4
    lease = lease_of(cache, slot)
    cache.grow(lease, count)
    cache.publish(lease, prompt, count, NO_STEP, "writer")
    cache.partial_blocks.keep(lease, prompt, count)
    cache.release(lease)
    cache.check([])


def test_what_lies_behind_the_last_whole_unit_is_kept_until_something_longer_is_there() -> None:
    cache = make_cache()
    ended(cache, ids(6))
    assert cache.probe(b"", ids(12), 11).tokens == 6
    ended(cache, ids(5))
    assert cache.tree.num_nodes == 2, "the longer tail has its tokens"
    ended(cache, ids(7))
    assert cache.tree.num_nodes == 2 and cache.probe(b"", ids(12), 11).tokens == 7
    ended(cache, ids(8))
    assert cache.probe(b"", ids(12), 11).tokens == 8
    cache.flush()
    assert cache.ledgers[0].free == 19


def test_states_and_pages_of_one_token_have_no_parts() -> None:
    for groups in (
        (CacheGroup(FULL, 1, 20),),
        (CacheGroup(FULL, 4, 20), CacheGroup(STATE, 4, 9)),
    ):
        cache = KVCache(groups, lru)
        ended(cache, ids(6))
        assert part_of(cache, ids(6), 5) is None
        assert not any(node.is_tail for node in cache.tree.nodes())


def test_pages_beyond_128_tokens_are_copied_where_that_saves_more() -> None:
    cache = make_cache(CacheGroup(FULL, 512, 9))
    ended(cache, ids(512))
    assert part_of(cache, ids(3), 3) is None
    assert part_of(cache, ids(4), 4).tokens == 4


def test_the_next_turn_of_a_conversation_begins_where_the_answer_was_computed() -> None:
    driver = Driver()
    driver.submit("first", list(range(10)), new=5)
    driver.run()
    said = [*range(10), *driver.outputs["first"]]
    driver.submit("second", [*said, 90, 91], new=2)
    driver.run()
    assert driver.ends["second"].cached_tokens == len(said) - 1
    assert driver.core.stats(0.0).cached_tokens == len(said) - 1
    assert sum(row.count for plan in driver.plans for row in plan.rows) == (
        driver.core.stats(0.0).computed_tokens
    )


def test_an_answer_that_the_front_cuts_is_kept_as_far_as_it_counts() -> None:
    driver = Driver()
    driver.submit("first", list(range(9)), new=30)
    for _ in range(6):
        driver.step()
    driver.receive(StopAt("first", 3))
    said = [*range(9), *driver.outputs["first"][:3]]
    driver.submit("second", [*said, 90, 91], new=1)
    driver.run()
    assert driver.ends["second"].cached_tokens == len(said)


def test_a_request_that_needs_the_whole_cache_copies_nothing_and_runs() -> None:
    driver = Driver(pages=5, page_tokens=4)
    driver.submit("first", list(range(15)), new=1)
    driver.run()
    driver.submit("second", [*range(14), 50], new=1)
    driver.run()
    assert driver.ends["second"].cached_tokens == 12
    assert not any(plan.copies for plan in driver.plans)
