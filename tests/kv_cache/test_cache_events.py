"""What the cache tells of itself is what it holds."""

from array import array
from random import Random

import msgspec
import pytest

from banyan.kv_cache.cache import KVCache
from banyan.kv_cache.cache_events import Removed, Stored
from banyan.kv_cache.eviction import EVICTION
from banyan.kv_cache.sizing import FULL, WINDOW, CacheGroup
from banyan.messages.requests import Generate
from banyan.messages.sampling_params import SamplingParams
from tests.scheduler.driver import Driver


class Reader:
    """Follows the news as a router does: which names are there, and what each one is called for."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int | None, bytes]] = {}

    def take(self, cache: KVCache) -> None:
        size = cache.block_size * 4
        for one in cache.events.take():
            if isinstance(one, Removed):
                for name in one.names:
                    del self.held[name]
                continue
            parent = one.parent
            assert parent is None or parent in self.held
            assert len(one.tokens) == len(one.names) * size
            for i, name in enumerate(one.names):
                assert name not in self.held
                self.held[name] = (parent, bytes(one.tokens[i * size : (i + 1) * size]))
                parent = name

    def prefixes(self) -> list[bytes]:
        def whole(name: int) -> bytes:
            parent, tokens = self.held[name]
            return (whole(parent) if parent is not None else b"") + tokens

        return sorted(whole(name) for name in self.held)


def held_by(cache: KVCache) -> list[bytes]:
    """The prefixes of whole units of the tree that are computed."""

    def whole(node) -> bytes:
        return b"" if node.parent.parent is None else whole(node.parent) + node.key

    found = [n for n in cache.tree.nodes() if not n.is_tail]
    return sorted(whole(n) for n in found if n.promised < 0 or not n.writer)


def driver(**spec) -> Driver:
    made = Driver(pages=24, page_tokens=4, max_running=4)
    made.spec = msgspec.structs.replace(made.spec, **spec)
    made.core = made.spec.build(records_events=True)
    return made


def ask(running: Driver, name: str, prompt: list[int], namespace: bytes = b"") -> None:
    running.receive(
        Generate(
            request=name,
            tokens=array("i", prompt).tobytes(),
            sampling=SamplingParams(max_new_tokens=9),
            namespace=namespace,
        )
    )


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_who_follows_the_news_knows_what_is_held(groups):
    made = tuple(CacheGroup(kind, 4, 24, 8 if kind == WINDOW else 0) for kind in groups)
    running, reader, draw = driver(groups=made), Reader(), Random(7)
    for i in range(60):
        start = draw.choice([[1, 2, 3, 4, 5, 6, 7, 8], [9] * 12, [draw.randrange(90)] * 5])
        ask(running, f"r{i}", [*start, *(draw.randrange(90) for _ in range(draw.randrange(1, 9)))])
        for _ in range(draw.randrange(6)):
            if running.launch() is None and not running.flying:
                break
            if running.flying and draw.random() < 0.8:
                running.complete()
            reader.take(running.core.scheduler.cache)
    running.run()
    cache = running.core.scheduler.cache
    reader.take(cache)
    assert reader.prefixes() == held_by(cache) and len(reader.held) > 8
    cache.flush()
    reader.take(cache)
    assert not reader.held


def test_nothing_is_reported_before_it_is_computed():
    running = driver()
    ask(running, "r", list(range(1, 14)))
    running.launch()
    assert list(running.core.scheduler.cache.events.take()) == []
    running.complete()
    (stored,) = running.core.scheduler.cache.events.take()
    assert isinstance(stored, Stored) and stored.parent is None
    assert list(memoryview(bytes(stored.tokens)).cast("i")) == list(range(1, 13))


def test_tenants_have_names_of_their_own_for_the_same_tokens():
    running = driver()
    for name, namespace in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        ask(running, name, [5] * 9, namespace)
        running.run()
    reported = [
        one for one in running.core.scheduler.cache.events.take() if isinstance(one, Stored)
    ]
    first = [one for one in reported if one.parent is None]
    assert [one.namespace[-3:] for one in first] == [b"one", b"two"]
    assert not set(first[0].names) & set(first[1].names)


def test_a_cache_that_tells_nobody_keeps_no_names():
    cache = KVCache((CacheGroup(FULL, 4, 24),), EVICTION.load("lru"))
    assert cache.events is None
