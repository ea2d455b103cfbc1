"""Pages in memory of the host: what is kept, what goes first, and what a store behind gets."""

from collections.abc import Iterator

import numpy as np
import pytest

from banyan.kv_transfer.store import HostTier, Missing

PAGE = 100


class Shelf:
    """A store in a dict."""

    capacity_bytes = 1 << 30

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.reads = 0
        self.is_closed = False

    def has(self, name: bytes) -> bool:
        return name in self.pages

    def read(self, name: bytes) -> bytes:
        self.reads += 1
        if name not in self.pages:
            raise Missing
        return self.pages[name]

    def write(self, name: bytes, payload: bytes | memoryview) -> None:
        self.pages[name] = bytes(payload)

    def delete(self, name: bytes) -> None:
        self.pages.pop(name, None)

    def close(self) -> None:
        self.is_closed = True


def page(name: bytes) -> bytes:
    return name * PAGE


def allocate(size: int) -> np.ndarray:
    return np.full(size, 255, np.uint8)


@pytest.fixture
def tier() -> Iterator[HostTier]:
    """Has room for three pages."""
    tier = HostTier(3 * PAGE + 1, allocate, None)
    for name in (b"a", b"b", b"c"):
        tier.write(name, page(name))
    yield tier
    tier.close()
    assert not tier.has(b"a")


def test_pages_are_kept_as_they_were_given(tier: HostTier) -> None:
    payload = bytearray(page(b"a"))
    tier.delete(b"a")
    tier.write(b"a", memoryview(payload))
    payload[:] = bytes(PAGE)
    assert bytes(tier.read(b"a")) == page(b"a")


def test_the_page_that_was_used_longest_ago_goes_first(tier: HostTier) -> None:
    tier.read(b"a")
    tier.write(b"b", page(b"b"))
    tier.write(b"d", page(b"d"))
    assert [tier.has(name) for name in (b"a", b"b", b"c", b"d")] == [True, True, False, True]
    with pytest.raises(Missing):
        tier.read(b"c")


def test_what_somebody_reads_stays_when_it_goes(tier: HostTier) -> None:
    read = tier.read(b"a")
    for name in (b"d", b"e", b"f"):
        tier.write(name, page(name))
    assert not tier.has(b"a") and bytes(read) == page(b"a")


def test_a_page_that_no_room_is_for_sends_nothing_away(tier: HostTier) -> None:
    tier.write(b"z", bytes(3 * PAGE + 2))
    assert [tier.has(name) for name in (b"z", b"a", b"b", b"c")] == [False, True, True, True]


def test_a_store_behind_gets_all_and_is_asked_for_what_went() -> None:
    behind = Shelf()
    tier = HostTier(PAGE, allocate, behind)
    for name in (b"a", b"b"):
        tier.write(name, page(name))
    assert behind.pages == {b"a": page(b"a"), b"b": page(b"b")}
    assert bytes(tier.read(b"b")) == page(b"b") and behind.reads == 0
    assert tier.has(b"a")
    assert [bytes(tier.read(b"a")) for _ in range(2)] == [page(b"a")] * 2
    assert behind.reads == 1
    tier.delete(b"a")
    assert not tier.has(b"a")
    tier.close()
    assert behind.is_closed
