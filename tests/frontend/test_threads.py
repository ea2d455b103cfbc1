"""Work about long texts goes to threads, and to no more of them than were asked for."""

import asyncio
import threading

from banyan.frontend.threads import THREAD_BYTES, off_loop, use_threads
from tests.flags import config_of

WAIT_S = 20.0


def test_so_many_threads_work_on_long_texts_as_asked_for():
    both = threading.Barrier(2)

    def work():
        both.wait(WAIT_S)
        return threading.current_thread().name

    async def scenario():
        use_threads(config_of("--tokenizer-worker-num", "2").server.tokenizer_threads)
        return await asyncio.gather(*(off_loop(THREAD_BYTES + 1, work) for _ in range(20)))

    assert set(asyncio.run(scenario())) == {"words_0", "words_1"}


def test_short_texts_stay_on_the_loop():
    async def scenario():
        return await off_loop(THREAD_BYTES, threading.current_thread)

    assert asyncio.run(scenario()) is threading.main_thread()
