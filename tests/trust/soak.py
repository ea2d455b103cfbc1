"""Hours of mixed load at a low rate: memory, descriptors, threads and tasks stay where they are.

SOAK_MINUTES says how long (60). The first third of it, 10 minutes at most, is warm-up. Memory is
what the processes of the server have for themselves (anonymous and shared pages of the kernel's
account, without files that it maps), the mean of each minute.
"""

import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.system.serving import Server, open_files, settled
from tests.system.storming import Ask, Shares, ask, make
from tests.trust.slope import slope

MINUTES = float(os.environ.get("SOAK_MINUTES", "60"))
RATE_RPS = float(os.environ.get("SOAK_RPS", "4"))
WARM_UP_S = min(600.0, MINUTES * 20)
SAMPLE_S = 5.0
BLOCK_S = min(60.0, MINUTES * 2)
"""Figures of one block are one point of the line."""
MOST_MB_PER_HOUR = 1.0
PATIENCE_S = 600.0
"""A soak runs beside whatever else the machine does, and is the last to get a core."""


@dataclass
class Samples:
    """What was seen, at seconds from the start."""

    at_s: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)

    def blocks(self) -> tuple[list[float], list[float]]:
        """Middle and mean memory of each block after the warm-up."""
        found: dict[int, list[tuple[float, float]]] = {}
        for at_s, memory in zip(self.at_s, self.memory_mb, strict=True):
            if at_s >= WARM_UP_S:
                found.setdefault(int(at_s // BLOCK_S), []).append((at_s, memory))
        pairs = [tuple(sum(x) / len(x) for x in zip(*b, strict=True)) for b in found.values()]
        return [at for at, _ in pairs], [memory for _, memory in pairs]

    def least(self, values: list[int], is_late: bool) -> int:
        """Fewest in the first or the last third after the warm-up: load only adds to that."""
        late = [v for at, v in zip(self.at_s, values, strict=True) if at >= WARM_UP_S]
        third = max(1, len(late) // 3)
        return min(late[-third:] if is_late else late[:third])


def own_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    kib = [int(status.split(f"{name}:")[1].split()[0]) for name in ("RssAnon", "RssShmem")]
    return sum(kib) / 2**10


async def drive(server: Server, samples: Samples) -> tuple[int, int, list[str]]:
    """The load, and a look every few seconds; how many were sent, how many stayed, what was
    wrong."""
    dice, end_s, began = random.Random(7), MINUTES * 60, time.monotonic()
    open_: set[asyncio.Task[None]] = set()
    known: dict[str, str] = {}
    wrong: list[str] = []
    sent = stayed = 0

    async def one(request: Ask) -> None:
        nonlocal stayed
        try:
            text = await asyncio.wait_for(ask(server.port, request), PATIENCE_S)
        except Exception as error:  # reported at the end
            wrong.append(f"{request.key}: {error!r}")
            return
        if text is not None:
            stayed += 1
            if known.setdefault(request.key, text) != text:
                wrong.append(f"{request.key}: another answer than the first time")

    look_s = 0.0
    while (now_s := time.monotonic() - began) < end_s:
        if now_s >= look_s:
            look_s = now_s + SAMPLE_S
            await asyncio.to_thread(look, server, samples, now_s)
            if int(now_s) % 60 < SAMPLE_S:
                print(f"{now_s / 60:5.1f} min {samples.memory_mb[-1]:8.1f} MB", flush=True)
        task = asyncio.create_task(one(make(sent, dice, Shares())))
        open_.add(task)
        task.add_done_callback(open_.discard)
        sent += 1
        await asyncio.sleep(dice.expovariate(RATE_RPS))
    await asyncio.gather(*open_)
    return sent, stayed, wrong


def look(server: Server, samples: Samples, now_s: float) -> None:
    pids = (server.pid, *server.members())
    samples.at_s.append(now_s)
    samples.memory_mb.append(sum(own_mb(pid) for pid in pids))
    samples.files.append(sum(open_files(pid) for pid in pids))
    samples.threads.append(sum(psutil.Process(pid).num_threads() for pid in pids))
    samples.tasks.append(server.facts()["server_tasks"])


def test_nothing_grows_with_time(server, monkeypatch):
    samples = Samples()
    monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", f"{PATIENCE_S:.0f}")
    with server("--check-ledger", "--watchdog-timeout", f"{PATIENCE_S:.0f}") as running:
        engine = running.engine_pid()
        sent, stayed, wrong = asyncio.run(drive(running, samples))
        stats = settled(running.stats, stayed)
        assert running.engine_pid() == engine, "the engine was lost and replaced"
    line = slope(*samples.blocks())
    kept = {
        name: (samples.least(values, False), samples.least(values, True))
        for name, values in (
            ("descriptors", samples.files),
            ("threads", samples.threads),
            ("tasks", samples.tasks),
        )
    }
    print(
        f"\nfigure: {MINUTES:g} min, {sent:,} requests at {RATE_RPS:g}/s: memory "
        f"{line.per_hour:+.2f} ± {line.error:.2f} MB/h after {WARM_UP_S / 60:.0f} min of warm-up "
        f"({samples.memory_mb[-1]:.0f} MB at the end); "
        + ", ".join(f"{name} {a} → {b}" for name, (a, b) in kept.items())
        + f"; {len(wrong)} wrong answers"
    )
    assert not wrong, wrong[:3]
    assert stats["leaked"] == 0 and stats["held_pages"] == 0
    assert stats["free_pages"] + stats["cached_pages"] == stats["total_pages"]
    assert all(late <= early for early, late in kept.values()), kept
    assert line.per_hour < MOST_MB_PER_HOUR, line
