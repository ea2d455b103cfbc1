"""Load: sends prepared requests at their times and watches itself while it does.

Open loop: a request goes out at its time, whatever the server does. With a limit on concurrency a
request that is due waits for a place; its clock starts when it is sent.
"""

import asyncio
import gc
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar

from banyan.base.errors import BanyanError
from banyan.bench.metrics import percentile
from banyan.bench.prompts import Prompt

A = TypeVar("A")

_TICK_S = 0.02
BUSY_SHARE = 0.7
LATE_S = 0.01
"""Above these the load generator itself may have shaped the figures."""


def poisson_times(count: int, rate_rps: float, seed: int) -> list[float]:
    """Seconds from the start at which each request is due; all at once for an infinite rate."""
    if math.isinf(rate_rps):
        return [0.0] * count
    random = Random(seed)
    at_s, times = 0.0, []
    for _ in range(count):
        times.append(at_s)
        at_s += random.expovariate(rate_rps)
    return times


def trace_times(prompts: Sequence[Prompt], slowdown: float) -> list[float]:
    """The trace's own times, from its first request on, stretched by `slowdown`."""
    return [(p.arrival_s - prompts[0].arrival_s) * slowdown for p in prompts]


@dataclass
class SelfWatch:
    """What the load generator cost and how late it was.

    Attributes:
        cpu_share: of one core.
        loop_lag_s: how late the event loop woke up, sampled every 20 ms.
        send_lag_s: how late each request left that did not wait for a place.
    """

    cpu_share: float = 0.0
    loop_lag_s: list[float] = field(default_factory=list)
    send_lag_s: list[float] = field(default_factory=list)

    def keys(self) -> dict[str, object]:
        lag, sent = self.loop_lag_s, self.send_lag_s
        return {
            "client_cpu_share": self.cpu_share,
            "client_loop_lag_p99_ms": percentile(lag, 99) * 1e3,
            "client_loop_lag_max_ms": max(lag, default=0.0) * 1e3,
            "client_send_lag_p99_ms": percentile(sent, 99) * 1e3,
            "client_send_lag_max_ms": max(sent, default=0.0) * 1e3,
        }

    def warnings(self) -> list[str]:
        found = []
        if self.cpu_share > BUSY_SHARE:
            found.append(
                f"the load generator used {self.cpu_share:.0%} of a core: it may have been the "
                "bottleneck. Give it a core of its own, or lower the load."
            )
        for name, lag in (("event loop", self.loop_lag_s), ("sending", self.send_lag_s)):
            late_s = percentile(lag, 99)
            if late_s > LATE_S:
                found.append(
                    f"the load generator's {name} was {late_s * 1e3:.1f} ms late (p99): latencies "
                    "are too high by up to that much. Give it a core of its own."
                )
        return found


@dataclass
class Run(Generic[A]):
    """What a run brought; outcomes stand in the order of the requests.

    Attributes:
        over: the numbers of the requests that came to an end, with an outcome each.
        is_cut: the run was cancelled before all of them were.
    """

    outcomes: list[A | BanyanError]
    duration_s: float
    watch: SelfWatch
    over: list[int]
    is_cut: bool = False


async def run_load(
    count: int,
    send: Callable[[int], Awaitable[A]],
    due_s: Sequence[float],
    max_concurrency: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Run[A]:
    """Send requests 0 … count−1. A run that is cancelled keeps what is over by then, if anything.

    Args:
        send: one request; a BanyanError is that request's own failure.
        due_s: when each is due, seconds from the start, ascending.
        progress: told how many are over.
    """
    watch = SelfWatch()
    outcomes: list[A | BanyanError | None] = [None] * count
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    done = 0

    async def one(index: int) -> None:
        nonlocal done
        try:
            outcomes[index] = await send(index)
        except BanyanError as error:
            outcomes[index] = error
        finally:
            if places is not None:
                places.release()
            done += 1
            progress(done)

    gc.collect()
    gc.freeze()
    gc.disable()  # a pause of the collector would be taken for the server's
    ticking = asyncio.create_task(_tick(watch.loop_lag_s))
    is_cut = False
    cpu_began, began = time.process_time(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(count):
                wait_s = began + due_s[index] - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                if places is not None:
                    await places.acquire()
                else:
                    watch.send_lag_s.append(time.perf_counter() - began - due_s[index])
                group.create_task(one(index))
    except asyncio.CancelledError:
        is_cut = True
        if all(outcome is None for outcome in outcomes):
            raise
    finally:
        ticking.cancel()
        gc.enable()
        gc.unfreeze()
    duration_s = time.perf_counter() - began
    watch.cpu_share = (time.process_time() - cpu_began) / duration_s
    finished = {i: outcome for i, outcome in enumerate(outcomes) if outcome is not None}
    assert is_cut or len(finished) == count
    return Run(list(finished.values()), duration_s, watch, list(finished), is_cut)


async def _tick(lag_s: list[float]) -> None:
    while True:
        due = time.perf_counter() + _TICK_S
        await asyncio.sleep(_TICK_S)
        lag_s.append(max(0.0, time.perf_counter() - due))
