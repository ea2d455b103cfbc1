import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from banyan.kv_transfer.page_mover import Mover
from banyan.messages.plan import (
    CopyResult,
    Held,
    Lookup,
    PageCopy,
    device_page,
    stored_page,
)
from tests.support.store_kit import MemoryStore

WAIT_S = 60
SIZE = 8


class Pages:
    """Two groups of ten pages."""

    def __init__(self):
        self.groups = (0, 1)
        self.bytes = np.zeros((2, 10, SIZE), np.uint8)

    def page_bytes(self, group):
        return SIZE

    def take(self, group, page):
        return self.bytes[group, page].copy()

    def put(self, group, page, payload):
        self.bytes[group, page] = payload


@pytest.fixture
def scene():
    pages, store, rung = Pages(), MemoryStore(), threading.Semaphore(0)
    mover = Mover(pages, store, rung.release)

    def hear(count):
        """What ended, until so many copies and lookups have."""
        heard = []
        while count > 0:
            assert rung.acquire(timeout=WAIT_S), f"only {heard} came"
            for end in mover.ended():
                heard.append(end)
                count -= 1 if isinstance(end, Held) else len(end.ids) + len(end.failed)
        return heard

    yield SimpleNamespace(pages=pages, store=store, mover=mover, hear=hear)
    store.gate.set()
    mover.close()
    assert store.is_closed


def to_store(number, page, key, group=0, when="before"):
    return PageCopy(number, group, device_page(page), stored_page(key), when)


def from_store(number, key, page, group=0):
    return PageCopy(number, group, stored_page(key), device_page(page), "before")


def test_a_page_goes_to_the_store_and_comes_back(scene):
    scene.pages.bytes[:, 3] = [[7], [8]]
    scene.mover.start([to_store(1, 3, b"k"), to_store(2, 3, b"k", group=1)])
    scene.hear(2)
    scene.mover.start([from_store(3, b"k", 5), from_store(4, b"k", 6, group=1)])
    ended = scene.hear(2)
    assert [end.ids for end in ended] == [[3, 4]] and ended[0].seconds > 0
    assert (scene.pages.bytes[0, 5] == 7).all() and (scene.pages.bytes[1, 6] == 8).all()


def test_the_bytes_of_a_page_are_taken_at_once(scene):
    scene.pages.bytes[0, 3] = 7
    scene.store.gate.clear()
    scene.mover.start([to_store(1, 3, b"k")])
    scene.pages.bytes[0, 3] = 9
    assert scene.mover.ended() == []
    scene.store.gate.set()
    scene.hear(1)
    assert scene.store.pages[b"\0k"] == bytes([7] * SIZE)


def test_a_page_that_is_not_there_is_a_failed_copy_without_a_word(scene, caplog):
    scene.mover.start([from_store(1, b"k", 5)])
    assert scene.hear(1) == [CopyResult([], [1])]
    assert not caplog.records


def test_what_goes_wrong_fails_the_copy_and_is_reported_once(scene, caplog):
    scene.store.fails = OSError(28, "no space left")
    with caplog.at_level(logging.WARNING):
        scene.mover.start([to_store(n, 3, bytes([n])) for n in range(1, 4)])
        assert sorted(i for end in scene.hear(3) for i in end.failed) == [1, 2, 3]
    (line,) = caplog.messages
    assert "cannot be written" in line and "no space left" in line


def test_a_page_of_another_size_does_not_reach_the_device(scene):
    scene.store.pages[b"\0k"] = bytes([7] * (SIZE - 1))
    scene.mover.start([from_store(1, b"k", 5)])
    assert scene.hear(1)[0].failed == [1] and not scene.pages.bytes.any()


def test_a_lookup_counts_keys_that_every_group_has(scene):
    for key in (b"a", b"b", b"d"):
        scene.store.pages[b"\0" + key] = scene.store.pages[b"\1" + key] = bytes(SIZE)
    scene.store.pages[b"\0c"] = bytes(SIZE)
    scene.mover.look([Lookup(4, [b"a", b"b", b"c", b"d"]), Lookup(5, [b"x", b"a"])])
    assert scene.hear(2) == [Held(4, 2), Held(5, 0)]


def test_a_slow_store_holds_up_neither_lookups_nor_who_starts_copies(scene):
    scene.store.pages[b"\0k"] = scene.store.pages[b"\1k"] = bytes(SIZE)
    scene.store.gate.clear()
    scene.mover.start([to_store(1, 3, b"w"), from_store(2, b"k", 4)])
    scene.mover.look([Lookup(3, [b"k"])])
    assert scene.hear(1) == [Held(3, 1)]


def test_the_coming_of_many_pages_is_reported_in_parts(scene):
    scene.store.pages[b"\0k"] = bytes(SIZE)
    scene.mover.start([from_store(n, b"k", 5) for n in range(40)])
    ended = scene.hear(40)
    assert [len(end.ids) for end in ended] == [16, 16, 8]


def test_copies_that_a_mover_cannot_order_fail(scene):
    scene.mover.start([to_store(1, 3, b"k", when="after")])
    assert scene.hear(1) == [CopyResult([], [1])]


def test_copies_within_the_device_are_not_the_mover_s(scene):
    scene.mover.start([PageCopy(1, 0, device_page(1), device_page(2), "before")])
    scene.mover.start([from_store(2, b"k", 5)])
    assert scene.hear(1) == [CopyResult([], [2])]


def test_a_store_that_hangs_does_not_hold_up_the_end(scene):
    scene.store.gate.clear()
    scene.mover.start([to_store(1, 3, b"w"), from_store(2, b"k", 4), from_store(3, b"k", 5)])
    scene.mover.close()  # while the gate is shut
    scene.store.gate.set()


def test_a_store_comes_and_goes_and_what_is_asked_without_one_fails(scene):
    mover, pages, first, second = scene.mover, scene.pages, scene.store, MemoryStore()
    pages.bytes[0, 1] = 7
    mover.start([to_store(1, 1, b"a")])
    assert scene.hear(1)[0].ids == [1]
    mover.detach()
    assert first.is_closed and not mover.is_attached
    mover.start([to_store(2, 1, b"a"), from_store(3, b"a", 2)])
    mover.look([Lookup(4, [b"a"])])
    assert [getattr(end, "failed", end) for end in scene.hear(3)] == [[2, 3], Held(4, 0)]
    mover.attach(second)
    mover.look([Lookup(5, [b"a"])])
    assert scene.hear(1) == [Held(5, 0)], "it has nothing of what the first one has"
    mover.detach()
    assert second.is_closed
    first.is_closed = False
    mover.attach(first)
    mover.start([from_store(6, b"a", 2)])
    assert scene.hear(1)[0].ids == [6] and (pages.bytes[0, 2] == 7).all()


def test_a_store_that_hangs_is_left_behind_and_not_closed_under_its_own_call(scene):
    mover, other = scene.mover, MemoryStore()
    mover.detach()
    other.gate.clear()
    began, write = threading.Event(), other.write
    other.write = lambda *args: began.set() or write(*args)
    mover.attach(other)
    mover.start([to_store(1, 1, b"a")])
    assert began.wait(WAIT_S)
    mover.detach()
    assert not other.is_closed
    other.gate.set()
    assert scene.hear(1)[0].ids == [1]
