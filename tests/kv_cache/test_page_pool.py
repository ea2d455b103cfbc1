import pytest

from banyan.base.ids import StepId
from banyan.kv_cache.page_pool import EpochTracker, PagePool


def test_the_padding_page_is_never_given_out():
    pool = PagePool(5, EpochTracker())
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.free == 0


def test_taking_more_than_is_free_is_refused():
    pool = PagePool(3, EpochTracker())
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.take(3)


def test_a_released_page_waits_for_the_steps_in_flight_at_its_release():
    epochs = EpochTracker()
    pool = PagePool(3, epochs)
    pages = pool.take(2)
    epochs.launched = StepId(2)
    pool.release(pages, epochs.now())
    epochs.launched, epochs.completed = StepId(3), StepId(1)
    pool.settle()
    assert (pool.free, pool.limbo) == (0, 2)
    epochs.completed = StepId(2)
    pool.settle()
    assert (pool.free, pool.limbo) == (2, 0)


def test_a_released_page_waits_for_copies_that_were_open():
    epochs = EpochTracker()
    pool = PagePool(3, epochs)
    pages = pool.take(1)
    epochs.open_copies[7] = None
    pool.release(pages, epochs.now())
    epochs.open_copies[8] = None
    del epochs.open_copies[7]
    pool.settle()
    assert pool.free == 2


def test_a_page_released_twice_is_noticed():
    pool = PagePool(3, EpochTracker())
    pages = pool.take(1)
    pool.release(list(pages), EpochTracker().now())
    pool.release(list(pages), EpochTracker().now())
    with pytest.raises(AssertionError, match="free twice"):
        pool.check()
