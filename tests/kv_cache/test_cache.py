from array import array

import pytest

from banyan.base.ids import NO_STEP, SlotId, StepId
from banyan.kv_cache.cache import KVCache, Match
from banyan.kv_cache.eviction import lru
from banyan.kv_cache.sizing import FULL, STATE, WINDOW, CacheGroup

NOTHING = Match([], 0)


def make_cache(*groups, share=True):
    return KVCache(groups or (CacheGroup(FULL, 4, 20),), lru, share)


def ids(count, start=0):
    return array("i", range(start, start + count)).tobytes()


def lease_of(cache, slot=1, namespace=b"", tokens=b"", limit=0):
    match = cache.probe(namespace, tokens, limit) if tokens else NOTHING
    return cache.lease(SlotId(slot), namespace, match, 0)[0]


def fill(cache, tokens, step=NO_STEP, namespace=b"", slot=1):
    """A lease that has computed all of `tokens` and published them."""
    lease = lease_of(cache, slot, namespace)
    count = len(tokens) // 4
    assert cache.grow(lease, count) is not None
    cache.publish(lease, tokens, count, step, "writer")
    return lease


def test_full_pages_are_shared_and_the_rest_is_not():
    cache = make_cache()
    fill(cache, ids(10))
    assert cache.probe(b"", ids(10), 10).tokens == 8
    assert cache.probe(b"", ids(10), 7).whole_blocks.tokens == 4
    assert cache.probe(b"other", ids(10), 10).tokens == 0
    assert cache.probe(b"", ids(10, start=1), 10).tokens == 0


def test_probing_changes_nothing():
    cache = make_cache()
    cache.release(fill(cache, ids(8)))
    before = [n.last_used for n in cache.tree.nodes()]
    cache.probe(b"", ids(8), 8)
    assert [n.last_used for n in cache.tree.nodes()] == before


def test_a_hit_is_granted_the_pages_of_the_writer():
    cache = make_cache()
    writer = fill(cache, ids(8))
    lease, grants = cache.lease(SlotId(2), b"", cache.probe(b"", ids(9), 8), 0)
    assert [g.pages for g in grants] == [writer.tables[0]]
    assert cache.grow(lease, 9)[0].first == 2
    cache.check([writer, lease])


def test_growing_without_room_changes_nothing():
    cache = make_cache(CacheGroup(FULL, 4, 4))
    lease = lease_of(cache)
    assert cache.grow(lease, 13) is None
    assert cache.ledgers[0].free == 3 and lease.tables == [[]]


def test_pages_of_ended_requests_are_evicted_for_new_ones():
    cache = make_cache(CacheGroup(FULL, 4, 4))
    cache.release(fill(cache, ids(12)))
    assert cache.ledgers[0].cached == 3
    lease = lease_of(cache)
    assert cache.grow(lease, 12) is not None
    assert cache.cached.evicted == 3
    cache.check([lease])


def test_a_private_page_returns_only_when_the_steps_in_flight_are_complete():
    cache = make_cache(CacheGroup(FULL, 4, 4))
    lease = lease_of(cache)
    cache.grow(lease, 12)
    cache.epochs.launched = StepId(1)
    cache.release(lease)
    other = lease_of(cache, slot=2)
    assert cache.grow(other, 4) is None
    assert cache.capacity.has([1])
    cache.settle(StepId(1))
    assert cache.grow(other, 4) is not None


def test_the_same_unit_from_two_writers_keeps_one_copy_in_the_tree():
    cache = make_cache()
    first, second = lease_of(cache, 1), lease_of(cache, 2)
    for lease in (first, second):
        cache.grow(lease, 8)
    cache.publish(first, ids(8), 8, NO_STEP, "a")
    cache.publish(second, ids(8), 8, NO_STEP, "b")
    assert cache.ledgers[0].cached == 2 and cache.ledgers[0].held == 2
    cache.check([first, second])
    cache.release(first)
    cache.cached.evict(0, 10)
    assert cache.ledgers[0].cached == 2, "the second writer's path is locked"
    cache.release(second)
    cache.check([])


def test_a_failed_step_takes_its_promises_out_of_the_tree():
    cache = make_cache()
    settled = fill(cache, ids(4))
    promised = fill(cache, ids(8), step=StepId(3), slot=2)
    user = lease_of(cache, 3, tokens=ids(9), limit=8)
    assert cache.forget_promises(StepId(3))
    assert [n.is_attached for n in user.path] == [True, False]
    for lease in (settled, promised, user):
        cache.release(lease)
    assert cache.probe(b"", ids(8), 8).tokens == 4
    cache.check([])


def test_promises_hold_once_their_step_is_complete():
    cache = make_cache()
    fill(cache, ids(8), step=StepId(1))
    cache.settle(StepId(1))
    assert not cache.forget_promises(StepId(1))
    assert cache.probe(b"", ids(8), 8).tokens == 8


def test_without_sharing_nothing_is_ever_matched():
    cache = make_cache(share=False)
    lease = fill(cache, ids(8))
    assert cache.probe(b"", ids(8), 8).tokens == 0
    cache.check([lease])


def test_window_pages_return_while_the_request_runs():
    cache = make_cache(CacheGroup(WINDOW, 4, 20, window=6))
    lease = lease_of(cache)
    cache.grow(lease, 40)
    cache.slide(lease, 30)
    assert cache.ledgers[0].held == 4
    assert lease.tables[0][:6] == [0] * 6
    cache.check([lease])


def test_a_prefix_is_usable_only_with_its_last_window():
    cache = make_cache(CacheGroup(FULL, 4, 40), CacheGroup(WINDOW, 4, 40, window=6))
    cache.release(fill(cache, ids(32)))
    nodes = list(cache.tree.walk(cache.weights, (ids(4, 4 * i) for i in range(8))))
    cache.cached.drop_pages(nodes[6], 1)
    assert cache.probe(b"", ids(32), 32).tokens == 24
    cache.cached.drop_pages(nodes[2], 1)
    assert cache.probe(b"", ids(32), 32).tokens == 24


def test_a_state_is_resumed_only_where_a_checkpoint_was_copied():
    cache = make_cache(CacheGroup(FULL, 4, 40), CacheGroup(STATE, 4, 10))
    lease = fill(cache, ids(8), step=StepId(1))
    assert cache.probe(b"", ids(9), 8).tokens == 0
    (copy,) = cache.states.checkpoint(lease, 8, 0, StepId(1), "writer")
    assert copy.when == "after" and copy.src.page == lease.tables[1][0]
    cache.settle(StepId(1))
    cache.end_copies([copy.id], [])
    match = cache.probe(b"", ids(9), 8)
    assert match.tokens == 8
    user, _ = cache.lease(SlotId(2), b"", match, 0)
    cache.grow(user, 9)
    (restore,) = cache.states.restores(user, 0, StepId(2))
    assert (restore.when, restore.src) == ("before", copy.dst)
    cache.end_copies([restore.id], [])
    cache.check([lease, user])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_checkpoint_of_a_failed_step_is_thrown_away(is_late):
    cache = make_cache(CacheGroup(FULL, 4, 40), CacheGroup(STATE, 4, 10))
    lease = fill(cache, ids(8), step=StepId(1))
    (copy,) = cache.states.checkpoint(lease, 8, 0, StepId(1), "writer")
    if is_late:
        cache.forget_promises(StepId(1))
        cache.end_copies([copy.id], [])
    else:
        cache.end_copies([], [copy.id])
    cache.release(lease)
    cache.settle(StepId(1))
    assert cache.probe(b"", ids(9), 8).tokens == 0
    cache.check([])
