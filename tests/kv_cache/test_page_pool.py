import pytest

from banyan.base.ids import StepId
from banyan.kv_cache.epochs import Horizon
from banyan.kv_cache.page_pool import PagePool


def test_the_padding_page_is_never_given_out():
    pool = PagePool(5, Horizon())
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.free == 0


def test_taking_more_than_is_free_is_refused():
    pool = PagePool(3, Horizon())
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.take(3)


def test_a_released_page_waits_for_the_steps_in_flight_at_its_release():
    horizon = Horizon()
    pool = PagePool(3, horizon)
    pages = pool.take(2)
    horizon.launched = StepId(2)
    pool.release(pages, horizon.now())
    horizon.launched, horizon.completed = StepId(3), StepId(1)
    pool.settle()
    assert (pool.free, pool.limbo) == (0, 2)
    horizon.completed = StepId(2)
    pool.settle()
    assert (pool.free, pool.limbo) == (2, 0)


def test_a_released_page_waits_for_copies_that_were_open():
    horizon = Horizon()
    pool = PagePool(3, horizon)
    pages = pool.take(1)
    horizon.open_copies[7] = None
    pool.release(pages, horizon.now())
    horizon.open_copies[8] = None
    del horizon.open_copies[7]
    pool.settle()
    assert pool.free == 2


def test_a_page_released_twice_is_noticed():
    pool = PagePool(3, Horizon())
    pages = pool.take(1)
    pool.release(list(pages), Horizon().now())
    pool.release(list(pages), Horizon().now())
    with pytest.raises(AssertionError, match="free twice"):
        pool.check()
