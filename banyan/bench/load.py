"""Send prepared requests at their times, and measure the load generator itself.

Open loop: a request is sent at its time, whatever the server does. With a concurrency limit a due
request waits for a free slot; its clock starts when it is sent.
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
"""Above these the load generator itself may have distorted the figures."""


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
    """The times of the trace relative to its first request, multiplied by `slowdown`."""
    return [(p.arrival_s - prompts[0].arrival_s) * slowdown for p in prompts]


@dataclass
class SelfWatch:
    """CPU use and delays of the load generator.

    Attributes:
        cpu_share: share of one core.
        loop_lag_s: delay of the event loop, sampled every 20 ms.
        send_lag_s: delay of each request that did not wait for a slot.
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
    """Results of a run; outcomes are in the order of the requests.

    Attributes:
        over: numbers of the requests that finished, each with an outcome.
        is_cut: the run was cancelled before all requests finished.
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
    """Send requests 0 … count−1. A cancelled run keeps the finished requests, if any.

    Args:
        send: sends one request; a BanyanError is that request's failure.
        due_s: when each is due, seconds from the start, ascending.
        progress: called with the number of finished requests.
    """
    watch = SelfWatch()
    outcomes: list[A | BanyanError | None] = [None] * count
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    done = 0

    async def one(index: int) -> None:
        nonlocal done
        try:
            outcomes[index] = await send(index)
        except BanyanError as error:
            outcomes[index] = error
        finally:
            if slots is not None:
                slots.release()
            done += 1
            progress(done)

    gc.collect()
    gc.freeze()
    gc.disable()  # a garbage collection pause would look like server latency
    ticking = asyncio.create_task(_tick(watch.loop_lag_s))
    is_cut = False
    cpu_began, began = time.process_time(), time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for index in range(count):
                wait_s = began + due_s[index] - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                if slots is not None:
                    await slots.acquire()
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
