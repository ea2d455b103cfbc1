import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.kv_cache.eviction import EVICTION, eviction_key, lru
from banyan.kv_cache.page_pool import NEVER_USED
from banyan.kv_cache.radix_tree import CachedPages, RadixTree
from banyan.kv_cache.sizing import FULL, WINDOW, CacheGroup

FULL_GROUP = (CacheGroup(FULL, 1, 100),)


def make_tree(groups=FULL_GROUP, policy=lru):
    given_back = []
    cached = CachedPages(
        RadixTree(len(groups)),
        groups,
        policy,
        lambda g, pages, epoch: given_back.extend(pages),
    )
    return cached, given_back


def put(cached, *keys, namespace=b"", first_page=1):
    """A chain of nodes with one page each; returns the nodes."""
    path = []
    for i, key in enumerate(keys):
        node, is_new = cached.tree.insert(namespace, path[-1] if path else None, key)
        if is_new:
            cached.attach(node, 0, [first_page + i], NEVER_USED)
        path.append(node)
    return path


def test_a_walk_finds_the_longest_known_prefix_and_changes_nothing():
    cached, _ = make_tree()
    path = put(cached, b"a", b"b", b"c")
    before = [(n.last_used, n.hits) for n in path]
    assert list(cached.tree.walk(b"", iter([b"a", b"b", b"x"]))) == path[:2]
    assert [(n.last_used, n.hits) for n in path] == before


def test_namespaces_share_nothing():
    cached, _ = make_tree()
    put(cached, b"a", namespace=b"one")
    assert list(cached.tree.walk(b"two", iter([b"a"]))) == []


def test_the_least_recently_used_leaf_goes_first():
    cached, given_back = make_tree()
    put(cached, b"a", first_page=1)
    (b,) = put(cached, b"b", first_page=2)
    put(cached, b"c", first_page=3)
    cached.touch(cached.tree.insert(b"", None, b"a")[0], 0)
    cached.evict(0, 1)
    assert given_back == [2] and not b.is_attached


def test_the_policy_decides_which_leaf_goes_first():
    def first_gone(name):
        cached, given_back = make_tree(policy=EVICTION.load(name))
        for page, key in enumerate((b"a", b"b", b"c"), 1):
            put(cached, key, first_page=page)
        for key in (b"b", b"b", b"c", b"a"):
            cached.touch(cached.tree.insert(b"", None, key)[0], 0)
        cached.evict(0, 1)
        return given_back

    assert (first_gone("lru"), first_gone("lfu"), first_gone("fifo")) == ([2], [3], [1])


def test_a_parent_is_evicted_only_after_its_children():
    cached, given_back = make_tree()
    put(cached, b"a", b"b", b"c")
    cached.evict(0, 2)
    assert given_back == [3, 2]


def test_evicting_a_locked_node_is_refused():
    cached, given_back = make_tree()
    path = put(cached, b"a", b"b")
    for node in path:
        cached.lock(node, 0)
    cached.evict(0, 10)
    assert given_back == [] and cached.evictable == [0]
    for node in reversed(path):
        cached.unlock(node, 0, NEVER_USED)
    cached.evict(0, 10)
    assert given_back == [2, 1] and cached.tree.num_nodes == 0


def test_window_pages_of_inner_nodes_go_while_the_node_stays():
    groups = (CacheGroup(FULL, 1, 100), CacheGroup(WINDOW, 1, 100, window=2))
    cached, given_back = make_tree(groups)
    path = put(cached, b"a", b"b")
    for page, node in enumerate(path, start=50):
        cached.attach(node, 1, [page], NEVER_USED)
    cached.evict(1, 1)
    assert given_back == [50] and path[0].is_attached and not path[0].pages[1]


def test_a_dropped_subtree_gives_back_locked_pages_too():
    cached, given_back = make_tree()
    path = put(cached, b"a", b"b", b"c")
    for node in path:
        cached.lock(node, 0)
    cached.drop_subtree(path[1], NEVER_USED)
    assert sorted(given_back) == [2, 3]
    assert [n.is_attached for n in path] == [True, False, False]
    for node in reversed(path):
        cached.unlock(node, 0, NEVER_USED)
    cached.check()


def test_hits_without_eviction_do_not_grow_the_heaps():
    cached, _ = make_tree()
    (node,) = put(cached, b"a")
    for _ in range(1000):
        cached.touch(node, 0)
        cached.lock(node, 0)
        cached.unlock(node, 0, NEVER_USED)
    assert len(cached._heaps[0]) < 100


@pytest.mark.parametrize("policy", EVICTION.names())
def test_every_policy_evicts_down_to_nothing(policy):
    numbers = {"threshold": 2, "next_prompt_estimate": 1} if policy == "tlru" else {}
    cached, given_back = make_tree(policy=eviction_key(policy, numbers))
    put(cached, b"a", b"b", first_page=1)
    put(cached, b"a", b"c", first_page=3)
    cached.evict(0, 100)
    assert len(given_back) == 3 and cached.counts == [0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("iluex"), st.lists(st.integers(0, 2), max_size=5))))
def test_counts_stay_true_under_random_use(actions):
    cached, _ = make_tree()
    locked = []
    page = 0
    for action, keys in actions:
        names = [bytes([k]) for k in keys]
        if action == "i":
            page += 10
            put(cached, *names, first_page=page)
        elif action == "l":
            path = list(cached.tree.walk(b"", iter(names)))
            for node in path:
                cached.lock(node, 0)
            locked.append(path)
        elif action == "u" and locked:
            for node in reversed(locked.pop()):
                cached.unlock(node, 0, NEVER_USED)
        elif action == "e":
            cached.evict(0, len(keys))
        elif action == "x":
            path = list(cached.tree.walk(b"", iter(names)))
            if path:
                cached.drop_subtree(path[-1], NEVER_USED)
        cached.check()
