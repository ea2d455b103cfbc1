"""Policies: which of the workers that can take a request gets it. What decides are the pure
functions of `scheduler/routing.py`; here lots are drawn and prompts remembered.
"""

import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from banyan.base.table import Table
from banyan.router.config import PolicyConfig
from banyan.router.worker import Worker
from banyan.scheduler.prefix_hashes import BLOCK_BYTES, MAX_BLOCKS, prefix_keys, token_keys
from banyan.scheduler.routing import (
    CacheAware,
    bucket,
    bucket_bounds,
    cache_aware,
    consistent_hashing,
    power_of_two,
    round_robin,
)

ROUTING_KEY = b"x-smg-routing-key"
"""Header whose value binds a client's requests to one worker."""
_MOST_LENGTHS = 4096
"""Of prompts that came last."""


@dataclass(frozen=True)
class Asked:
    """What of a request can decide who gets it.

    Attributes:
        prompt: of its text, or what stands for it; empty where nobody looks at it.
        key: of the header ROUTING_KEY; "" for none.
        tokens: of its prompt, where somebody looks at them and they are known.
    """

    prompt: bytes = b""
    key: str = ""
    tokens: Sequence[int] = ()


class Policy(Protocol):
    """Chooses among workers of one kind."""

    @property
    def reads_prompts(self) -> bool: ...

    def choose(self, workers: Sequence[Worker], asked: Asked) -> Worker:
        """One of `workers`, of which there is at least one."""
        ...


class RoundRobin:
    reads_prompts = False

    def __init__(self, config: PolicyConfig) -> None:
        self._routed = 0

    def choose(self, workers: Sequence[Worker], asked: Asked) -> Worker:
        self._routed += 1
        return workers[round_robin(_loads(workers), (), self._routed - 1)]


class Random:
    reads_prompts = False

    def __init__(self, config: PolicyConfig) -> None:
        self._lots = random.Random(os.urandom(16))

    def choose(self, workers: Sequence[Worker], asked: Asked) -> Worker:
        return self._lots.choice(workers)


class PowerOfTwo:
    reads_prompts = False

    def __init__(self, config: PolicyConfig) -> None:
        self._lots = random.Random(os.urandom(16))

    def choose(self, workers: Sequence[Worker], asked: Asked) -> Worker:
        if len(workers) == 1:
            return workers[0]
        first, second = self._lots.sample(range(len(workers)), 2)
        return workers[power_of_two(_loads(workers), first, second)]


class ByPrefix:
    """cache_aware: what a worker has cached is what it says; where it says nothing, it is guessed
    from the prompts that it was sent."""

    reads_prompts = True

    def __init__(self, config: PolicyConfig) -> None:
        self._rule = CacheAware(config.threshold, config.most_apart, config.most_times)

    def choose(self, workers: Sequence[Worker], asked: Asked) -> Worker:
        keys = prefix_keys(asked.prompt)
        most = min(len(asked.prompt), BLOCK_BYTES * MAX_BLOCKS)
        told = _told(workers, asked.tokens)
        seen = [told.get(w, w.prefixes.matched(keys) * BLOCK_BYTES / max(1, most)) for w in workers]
        held = [len(w.prefixes) + w.taken for w in workers]  # short prompts leave no keys
        chosen = workers[cache_aware(_loads(workers), seen, held, self._rule)]
        chosen.prefixes.add(keys)
        return chosen


def _told(workers: Sequence[Worker], tokens: Sequence[int]) -> dict[Worker, float]:
    """The share of a prompt that each worker says it has, of those that say something of such."""
    shares: dict[Worker, float] = {}
    keys: dict[int, list[bytes]] = {}
    for worker in workers:
        replicas = worker.contents
        if not tokens or not replicas or any(one.is_of_several for one in replicas):
            continue
        block = replicas[0].block
        if block not in keys:
            keys[block] = token_keys(tokens, block)
        shares[worker] = max(one.matched(keys[block]) for one in replicas) / len(tokens)
    return shares


class ByLength:
    """bucket: prompts of like length to one worker, so that short ones do not wait for long ones.
    Lengths are parted anew every so often, by what has come."""

    reads_prompts = True

    def __init__(self, config: PolicyConfig) -> None:
        self._rule = CacheAware(config.threshold, config.most_apart, config.most_times)
        self._adjust_s = config.adjust_s
        self._lengths: deque[int] = deque(maxlen=_MOST_LENGTHS)
        self._bounds: list[int] = []
        self._next_s = 0.0

    def choose(self, workers: Sequence[Worker], asked: Asked) -> Worker:
        self._lengths.append(len(asked.prompt))
        now = time.monotonic()
        if now >= self._next_s or len(self._bounds) != len(workers) - 1:
            self._bounds = bucket_bounds(self._lengths, len(workers))
            self._next_s = now + self._adjust_s
        index = bucket(_loads(workers), len(asked.prompt), self._bounds, self._rule)
        return workers[index]


class Sticky:
    """consistent_hashing: one worker for each routing key; who sends none is spread by lots."""

    reads_prompts = False

    def __init__(self, config: PolicyConfig) -> None:
        self._lots = random.Random(os.urandom(16))

    def choose(self, workers: Sequence[Worker], asked: Asked) -> Worker:
        if not asked.key:
            return self._lots.choice(workers)
        return workers[consistent_hashing([w.url for w in workers], asked.key)]


POLICIES: Table[Callable[[PolicyConfig], Policy]] = Table(
    "policy",
    {
        "random": "banyan.router.policies:Random",
        "round_robin": "banyan.router.policies:RoundRobin",
        "power_of_two": "banyan.router.policies:PowerOfTwo",
        "cache_aware": "banyan.router.policies:ByPrefix",
        "bucket": "banyan.router.policies:ByLength",
        "consistent_hashing": "banyan.router.policies:Sticky",
    },
)


def open_policy(name: str, config: PolicyConfig) -> Policy:
    """ConfigError: there is no such policy."""
    return POLICIES.load(name)(config)


def _loads(workers: Sequence[Worker]) -> list[int]:
    return [worker.open for worker in workers]
