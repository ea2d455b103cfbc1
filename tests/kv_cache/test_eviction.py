"""Policies of eviction, held against a reference that looks at everything each time."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.base.ids import PageId
from banyan.kv_cache.eviction import eviction_key
from banyan.kv_cache.page_pool import NEVER_USED
from banyan.kv_cache.radix_tree import CachedPages, Node, RadixTree
from banyan.kv_cache.sizing import FULL, WINDOW, CacheGroup

UNIT = 4
GROUPS = (CacheGroup(FULL, UNIT, 1000), CacheGroup(WINDOW, UNIT, 1000, window=2))
SPARE = {"threshold": 12, "next_prompt_estimate": 3}
POLICIES = {
    "lru": {},
    "mru": {},
    "lfu": {},
    "slru": {"protected_threshold": 1},
    "tlru": SPARE,
    "fifo": {},
    "filo": {},
    "priority": {},
}

Path = tuple[str, ...]
"""A namespace, and the units below it."""


@dataclass
class Seen:
    """What the reference knows of one block."""

    born: int
    used: int
    hits: int = 0
    priority: int = 0
    longest: int = 0
    """Units of the longest path through it since it came."""
    locks: int = 0
    pages: set[int] = field(default_factory=lambda: {0, 1})


def rank(policy: str, path: Path, seen: Seen, is_leaf: bool) -> tuple[float, ...]:
    """The order that documents of these policies give in words."""
    if policy in ("lru", "mru"):
        return (seen.used if policy == "lru" else -seen.used,)
    if policy in ("fifo", "filo"):
        return (seen.born if policy == "fifo" else -seen.born,)
    if policy == "lfu":
        return (seen.hits, seen.used)
    if policy == "slru":
        return (seen.hits >= 1, seen.used)
    if policy == "priority":
        return (seen.priority, seen.used)
    keeps = max(0, seen.longest * UNIT + SPARE["next_prompt_estimate"] - SPARE["threshold"])
    is_safe = is_leaf and (len(path) - 2) * UNIT >= keeps
    return (0 if is_safe else 1, seen.used)


class Reference:
    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.blocks: dict[Path, Seen] = {}
        self.now = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def put(self, path: Path, priority: int) -> None:
        for end in range(2, len(path) + 1):
            block = path[:end]
            if block not in self.blocks:
                self.blocks[block] = Seen(now := self.tick(), now, priority=priority)
            self.blocks[block].longest = max(self.blocks[block].longest, len(path) - 1)

    def hit(self, path: Path, priority: int) -> None:
        for end in range(2, len(path) + 1):
            if (seen := self.blocks.get(path[:end])) is None:
                return
            seen.used, seen.hits = self.tick(), seen.hits + 1
            seen.priority = max(seen.priority, priority)

    def evict(self, group: int) -> tuple[Path, int] | None:
        inner = {path[:-1] for path in self.blocks}
        free = [
            path
            for path, seen in self.blocks.items()
            if group in seen.pages and not seen.locks and (group == 1 or path not in inner)
        ]
        if not free:
            return None
        first = min(free, key=lambda p: rank(self.policy, p, self.blocks[p], p not in inner))
        if group == 0:
            del self.blocks[first]
        else:
            self.blocks[first].pages.remove(1)
        return first, group


class Real:
    def __init__(self, policy: str) -> None:
        self.gone: list[int] = []
        self.tree = RadixTree(len(GROUPS), block_size=UNIT)
        self.cached = CachedPages(
            self.tree,
            GROUPS,
            eviction_key(policy, POLICIES[policy]),
            lambda g, pages, epoch: self.gone.extend(pages),
        )
        self.names: dict[int, tuple[Path, int]] = {}

    def nodes(self, path: Path) -> list[Node]:
        return list(self.tree.walk(path[0].encode(), (block.encode() for block in path[1:])))

    def put(self, path: Path, priority: int) -> None:
        parent: Node | None = None
        for end in range(2, len(path) + 1):
            node, is_new = self.tree.insert(path[0].encode(), parent, path[end - 1].encode())
            if is_new:
                node.priority = priority
                for group in (0, 1):
                    self.names[page := 1 + len(self.names)] = (path[:end], group)
                    self.cached.attach(node, group, [PageId(page)], NEVER_USED)
            parent = node

    def evict(self, group: int) -> set[tuple[Path, int]]:
        self.gone.clear()
        self.cached.evict(group, 1)
        return {self.names[page] for page in self.gone}


PATHS = st.tuples(
    st.sampled_from("xy"), st.lists(st.sampled_from("abc"), min_size=1, max_size=5)
).map(lambda pair: (pair[0], *pair[1]))
ACTIONS = st.lists(
    st.tuples(st.sampled_from("pphhlue ew"), PATHS, st.integers(0, 2)), min_size=5, max_size=40
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_what_goes_is_what_the_policy_says(policy: str, actions: list) -> None:
    """Branches of two tenants, hits, locks, and pages that go with a block and without it."""
    real, model = Real(policy), Reference(policy)
    locked: list[list[Node]] = []
    for action, path, number in actions:
        if action == "p":
            real.put(path, number)
            model.put(path, number)
        elif action == "h":
            for node in real.nodes(path):
                real.cached.touch(node, number)
            model.hit(path, number)
        elif action == "l":
            locked.append(nodes := real.nodes(path))
            for end, node in enumerate(nodes, 2):
                model.blocks[path[:end]].locks += 1
                for group in (0, 1):
                    real.cached.lock(node, group)
        elif action == "u" and locked:
            for node in reversed(locked.pop()):
                for group in (0, 1):
                    real.cached.unlock(node, group, NEVER_USED)
            for seen in model.blocks.values():
                seen.locks = 0
            for nodes in locked:
                for node in nodes:
                    model.blocks[path_of(node)].locks += 1
        elif action in "ew":
            group = int(action == "w")
            went, reported = real.evict(group), model.evict(group)
            assert (
                went - {(reported[0], 1)} == {reported} - {(reported[0], 1)}
                if reported
                else not went
            )
            assert group == 0 or went == ({reported} if reported else set())
        real.cached.check()


def path_of(node: Node) -> Path:
    words: list[str] = []
    while node.parent is not None:
        words.append(node.key.decode())
        node = node.parent
    return tuple(reversed(words))


def chain(real: Real, length: int, namespace: str = "x") -> Path:
    real.put(path := (namespace, *(f"u{i}" for i in range(length))), 0)
    return path


def left(real: Real, path: Path) -> int:
    return len(real.nodes(path))


def test_the_end_of_a_long_branch_goes_before_a_short_one_that_is_older() -> None:
    """12 tokens may be left to compute, of which a prompt brings 3: two units of 4 are to spare."""
    real = Real("tlru")
    short, long = chain(real, 3, "x"), chain(real, 10, "y")
    for expected in ((2, 10), (1, 10), (1, 9), (1, 8), (0, 8), (0, 7), (0, 6)):
        real.evict(0)
        assert (left(real, short), left(real, long)) == expected


def test_what_is_left_of_a_branch_is_not_shortened_again() -> None:
    real = Real("tlru")
    first = chain(real, 6, "x")
    real.evict(0)
    real.evict(0)
    second = chain(real, 6, "y")
    real.evict(0)
    assert (left(real, first), left(real, second)) == (4, 5)
