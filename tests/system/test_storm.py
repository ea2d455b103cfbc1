"""A storm of requests with disconnects at random bytes, aborts and deadlines leaves nothing behind,
and the answers of those who stay are what they get alone.

STORM requests are sent (`make trust`: 5,000), by default 500.
"""

import asyncio
import os
import random

import pytest

from tests.system.serving import CALL_S, Server, open_files, wait_until
from tests.system.storming import Shares, ask, make, storm
from tests.system.watch import resident_mb

REQUESTS, CONCURRENCY, SHARES = int(os.environ.get("STORM", "500")), 64, Shares()
GROWN_MB = 60
"""Of caches with a bound, which a server fills once."""


def is_at_rest(server: Server) -> bool:
    stats = server.stats()
    return stats["running"] == stats["waiting"] == stats["in_flight_pages"] == 0


@pytest.mark.slow
def test_a_disconnect_storm_leaves_nothing_behind_and_disturbs_nobody(server):
    dice = random.Random(20)
    requests = [make(i, dice, SHARES) for i in range(REQUESTS)]
    with server("--max-running-requests", "24", "--check-ledger") as running:
        solo = {}
        for request in requests:
            if request.stays and request.key not in solo:
                solo[request.key] = asyncio.run(ask(running.port, request.alone()))
        running.http.close()
        running.http = type(running.http)(base_url=running.url, timeout=CALL_S)
        wait_until(lambda: is_at_rest(running), 60.0, "rest before the storm")
        pids = (running.pid, running.engine_pid())
        before = {p: open_files(p) for p in pids}
        tasks, memory_mb = running.facts()["server_tasks"], resident_mb(pids)

        texts = asyncio.run(storm(running.port, requests, CONCURRENCY))

        wait_until(lambda: is_at_rest(running), 60.0, "rest after the storm")
        wait_until(
            lambda: all(open_files(p) <= n for p, n in before.items()),
            60.0,
            f"descriptors to fall back to {before}",
        )
        wait_until(
            lambda: running.facts()["server_tasks"] <= tasks,
            60.0,
            f"server tasks to fall back to {tasks}",
        )
        stats, grown_mb = running.stats(), resident_mb(pids) - memory_mb
        assert stats["held_pages"] == 0
        assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]
        assert stats["leaked"] == 0 and stats["failed"] == 0
        assert "ledger" not in running.log.read_text()
        survivors = [(r, t) for r, t in zip(requests, texts, strict=True) if t is not None]
        wrong = [r.key for r, text in survivors if text != solo[r.key]]
        lost = (REQUESTS - len(survivors)) / REQUESTS
        print(
            f"\nfigure: {REQUESTS:,} requests, {lost:.0%} of them abandoned: 0 pages, places, "
            f"descriptors and tasks left, {grown_mb:+.0f} MB; {len(wrong)} of "
            f"{len(survivors):,} others differ from their runs alone"
        )
        assert len(survivors) > REQUESTS * 0.6
        assert not wrong, f"{len(wrong)} of {len(survivors)}: {wrong[:3]}"
        assert grown_mb < GROWN_MB
