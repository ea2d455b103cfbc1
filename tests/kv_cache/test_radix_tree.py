import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.kv_cache.eviction import EVICTION, eviction_key, lru
from banyan.kv_cache.page_pool import NEVER_USED
from banyan.kv_cache.radix_tree import RadixTree
from banyan.kv_cache.sizing import FULL, WINDOW, CacheGroup

FULL_GROUP = (CacheGroup(FULL, 1, 100),)


def make_tree(groups=FULL_GROUP, policy=lru):
    given_back = []
    tree = RadixTree(groups, policy, lambda g, pages, epoch: given_back.extend(pages))
    return tree, given_back


def put(tree, *keys, namespace=b"", first_page=1):
    """A chain of nodes with one page each; returns the nodes."""
    path = []
    for i, key in enumerate(keys):
        node, is_new = tree.insert(namespace, path[-1] if path else None, key)
        if is_new:
            tree.attach(node, 0, [first_page + i], NEVER_USED)
        path.append(node)
    return path


def test_a_walk_finds_the_longest_known_prefix_and_changes_nothing():
    tree, _ = make_tree()
    path = put(tree, b"a", b"b", b"c")
    before = [(n.last_used, n.hits) for n in path]
    assert list(tree.walk(b"", iter([b"a", b"b", b"x"]))) == path[:2]
    assert [(n.last_used, n.hits) for n in path] == before


def test_namespaces_share_nothing():
    tree, _ = make_tree()
    put(tree, b"a", namespace=b"one")
    assert list(tree.walk(b"two", iter([b"a"]))) == []


def test_the_least_recently_used_leaf_goes_first():
    tree, given_back = make_tree()
    put(tree, b"a", first_page=1)
    (b,) = put(tree, b"b", first_page=2)
    put(tree, b"c", first_page=3)
    tree.touch(tree.insert(b"", None, b"a")[0], 0)
    tree.evict(0, 1)
    assert given_back == [2] and not b.is_attached


def test_the_policy_decides_which_leaf_goes_first():
    def first_gone(name):
        tree, given_back = make_tree(policy=EVICTION.load(name))
        for page, key in enumerate((b"a", b"b", b"c"), 1):
            put(tree, key, first_page=page)
        for key in (b"b", b"b", b"c", b"a"):
            tree.touch(tree.insert(b"", None, key)[0], 0)
        tree.evict(0, 1)
        return given_back

    assert (first_gone("lru"), first_gone("lfu"), first_gone("fifo")) == ([2], [3], [1])


def test_a_parent_is_evicted_only_after_its_children():
    tree, given_back = make_tree()
    put(tree, b"a", b"b", b"c")
    tree.evict(0, 2)
    assert given_back == [3, 2]


def test_evicting_a_locked_node_is_refused():
    tree, given_back = make_tree()
    path = put(tree, b"a", b"b")
    for node in path:
        tree.lock(node, 0)
    tree.evict(0, 10)
    assert given_back == [] and tree.evictable == [0]
    for node in reversed(path):
        tree.unlock(node, 0, NEVER_USED)
    tree.evict(0, 10)
    assert given_back == [2, 1] and tree.num_nodes == 0


def test_window_pages_of_inner_nodes_go_while_the_node_stays():
    groups = (CacheGroup(FULL, 1, 100), CacheGroup(WINDOW, 1, 100, window=2))
    tree, given_back = make_tree(groups)
    path = put(tree, b"a", b"b")
    for page, node in enumerate(path, start=50):
        tree.attach(node, 1, [page], NEVER_USED)
    tree.evict(1, 1)
    assert given_back == [50] and path[0].is_attached and not path[0].pages[1]


def test_a_dropped_subtree_gives_back_locked_pages_too():
    tree, given_back = make_tree()
    path = put(tree, b"a", b"b", b"c")
    for node in path:
        tree.lock(node, 0)
    tree.drop_subtree(path[1], NEVER_USED)
    assert sorted(given_back) == [2, 3]
    assert [n.is_attached for n in path] == [True, False, False]
    for node in reversed(path):
        tree.unlock(node, 0, NEVER_USED)
    tree.check()


def test_hits_without_eviction_do_not_grow_the_heaps():
    tree, _ = make_tree()
    (node,) = put(tree, b"a")
    for _ in range(1000):
        tree.touch(node, 0)
        tree.lock(node, 0)
        tree.unlock(node, 0, NEVER_USED)
    assert len(tree._heaps[0]) < 100


@pytest.mark.parametrize("policy", EVICTION.names())
def test_every_policy_evicts_down_to_nothing(policy):
    numbers = {"threshold": 2, "next_prompt_estimate": 1} if policy == "tlru" else {}
    tree, given_back = make_tree(policy=eviction_key(policy, numbers))
    put(tree, b"a", b"b", first_page=1)
    put(tree, b"a", b"c", first_page=3)
    tree.evict(0, 100)
    assert len(given_back) == 3 and tree.cached == [0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("iluex"), st.lists(st.integers(0, 2), max_size=5))))
def test_counts_stay_true_under_random_use(actions):
    tree, _ = make_tree()
    locked = []
    page = 0
    for action, keys in actions:
        names = [bytes([k]) for k in keys]
        if action == "i":
            page += 10
            put(tree, *names, first_page=page)
        elif action == "l":
            path = list(tree.walk(b"", iter(names)))
            for node in path:
                tree.lock(node, 0)
            locked.append(path)
        elif action == "u" and locked:
            for node in reversed(locked.pop()):
                tree.unlock(node, 0, NEVER_USED)
        elif action == "e":
            tree.evict(0, len(keys))
        elif action == "x":
            path = list(tree.walk(b"", iter(names)))
            if path:
                tree.drop_subtree(path[-1], NEVER_USED)
        tree.check()
