"""Work about long texts goes to threads, and to no more of them than were asked for."""

import asyncio
import subprocess
import sys
import threading

import pytest

from banyan.base.errors import RequestError
from banyan.base.thread_pool import THREAD_BYTES, Pool, off_loop, use_threads
from tests.support.flags import config_of

WAIT_S = 60.0


def test_texts_that_wait_for_others_leave_threads_for_work():
    server = config_of(
        "--tokenizer-worker-num", "3", "--enable-dynamic-batch-tokenizer",
        "--dynamic-batch-tokenizer-batch-size", "40",
    ).server  # fmt: skip
    num_waiting = 43
    all_at_once = threading.Barrier(num_waiting + 1)

    async def scenario():
        use_threads(server.waiting_texts)
        waiting = [
            asyncio.create_task(off_loop(THREAD_BYTES + 1, lambda: all_at_once.wait(WAIT_S)))
            for _ in range(num_waiting)
        ]
        assert await off_loop(THREAD_BYTES + 1, lambda: 5) == 5
        await off_loop(THREAD_BYTES + 1, lambda: all_at_once.wait(WAIT_S))
        await asyncio.gather(*waiting)

    asyncio.run(scenario())


def test_short_texts_stay_on_the_loop():
    async def scenario():
        return await off_loop(THREAD_BYTES, threading.current_thread)

    assert asyncio.run(scenario()) is threading.main_thread()


def test_work_that_takes_too_long_fails_its_own_request(monkeypatch):
    monkeypatch.setattr("banyan.base.thread_pool.JOB_S", 0.05)
    gate = threading.Event()

    async def scenario():
        use_threads(1)
        try:
            await off_loop(THREAD_BYTES + 1, gate.wait)
        finally:
            gate.set()

    with pytest.raises(RequestError, match="within 0.05 s") as caught:
        asyncio.run(scenario())
    assert caught.value.status == 503


def test_threads_that_are_lost_to_endless_work_are_replaced():
    pool, gate = Pool(2, lost_s=0.05), threading.Event()
    started = threading.Barrier(3)

    def endless():
        started.wait(WAIT_S)
        gate.wait(WAIT_S)

    for _ in range(2):
        pool.submit(endless)
    started.wait(WAIT_S)
    assert not gate.wait(0.1), "the two are lost by now"
    assert pool.submit(lambda: 5).result(WAIT_S) == 5
    gate.set()
    pool.shutdown()


def test_a_pool_has_no_more_threads_than_asked_for_and_a_job_that_fails_tells_why():
    pool = Pool(2)
    names = {pool.submit(lambda: threading.current_thread().name).result(WAIT_S) for _ in range(20)}
    assert names <= {"words_0", "words_1"}
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(WAIT_S)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="no more jobs"):
        pool.submit(print)


def test_a_process_ends_while_a_thread_of_its_pool_is_busy():
    code = """
import asyncio, threading
from banyan.base.thread_pool import use_threads

async def main():
    use_threads(1)
    asyncio.create_task(asyncio.to_thread(threading.Event().wait))
    await asyncio.sleep(0.05)

asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_S).returncode == 0
