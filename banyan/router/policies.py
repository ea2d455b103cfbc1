"""Routing policies: choose one of the workers that can take a request.

The decisions are pure functions in `scheduler/routing.py`. The classes here keep the state: random
numbers, counters and remembered prompts.
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
from banyan.scheduler.routing import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    CacheAware,
    bucket,
    bucket_bounds,
    cache_aware,
    consistent_hashing,
    power_of_two,
    prefix_keys,
    round_robin,
    token_keys,
)

ROUTING_KEY = b"x-smg-routing-key"
"""Header whose value binds a client's requests to one worker."""
_MOST_LENGTHS = 4096
"""Number of recent prompt lengths that are kept."""


@dataclass(frozen=True)
class RoutingRequest:
    """The parts of a request that policies use.

    Attributes:
        prompt: beginning of the prompt text; empty if no policy reads it.
        key: value of the header ROUTING_KEY; "" if absent.
        tokens: token ids of the prompt, if known and needed.
        model: what its workers must serve; "" = anything.
    """

    prompt: bytes = b""
    key: str = ""
    tokens: Sequence[int] = ()
    model: str = ""


class Policy(Protocol):
    """Chooses among workers of one kind."""

    @property
    def reads_prompts(self) -> bool: ...

    def choose(self, workers: Sequence[Worker], asked: RoutingRequest) -> Worker:
        """One of `workers`, which is not empty."""
        ...


class RoundRobinPolicy:
    reads_prompts = False

    def __init__(self, config: PolicyConfig) -> None:
        self._routed = 0

    def choose(self, workers: Sequence[Worker], asked: RoutingRequest) -> Worker:
        self._routed += 1
        return workers[round_robin(_loads(workers), (), self._routed - 1)]


class RandomPolicy:
    reads_prompts = False

    def __init__(self, config: PolicyConfig) -> None:
        self._lots = random.Random(os.urandom(16))

    def choose(self, workers: Sequence[Worker], asked: RoutingRequest) -> Worker:
        return self._lots.choice(workers)


class PowerOfTwoPolicy:
    reads_prompts = False

    def __init__(self, config: PolicyConfig) -> None:
        self._lots = random.Random(os.urandom(16))

    def choose(self, workers: Sequence[Worker], asked: RoutingRequest) -> Worker:
        if len(workers) == 1:
            return workers[0]
        first, second = self._lots.sample(range(len(workers)), 2)
        return workers[power_of_two(_loads(workers), first, second)]


class CacheAwarePolicy:
    """cache_aware: prefer the worker that has most of the prompt cached.

    Cached prefixes come from the worker's cache events, or are estimated from earlier prompts.
    """

    reads_prompts = True

    def __init__(self, config: PolicyConfig) -> None:
        self._rule = CacheAware(config.threshold, config.most_apart, config.most_times)

    def choose(self, workers: Sequence[Worker], asked: RoutingRequest) -> Worker:
        keys = prefix_keys(asked.prompt)
        most = min(len(asked.prompt), BLOCK_BYTES * MAX_BLOCKS)
        reported = _reported_shares(workers, asked.tokens)
        seen = [
            reported.get(w, w.prefixes.matched(keys) * BLOCK_BYTES / max(1, most)) for w in workers
        ]
        held = [len(w.prefixes) + w.taken for w in workers]  # short prompts leave no keys
        chosen = workers[cache_aware(_loads(workers), seen, held, self._rule)]
        chosen.prefixes.add(keys)
        return chosen


def _reported_shares(workers: Sequence[Worker], tokens: Sequence[int]) -> dict[Worker, float]:
    """Share of the prompt that each worker has cached, for workers that report cache events."""
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


class BucketPolicy:
    """bucket: one worker per range of prompt lengths, so short prompts do not wait for long ones.

    The length bounds are recomputed periodically from recent prompts.
    """

    reads_prompts = True

    def __init__(self, config: PolicyConfig) -> None:
        self._rule = CacheAware(config.threshold, config.most_apart, config.most_times)
        self._adjust_s = config.adjust_s
        self._lengths: deque[int] = deque(maxlen=_MOST_LENGTHS)
        self._bounds: list[int] = []
        self._next_s = 0.0

    def choose(self, workers: Sequence[Worker], asked: RoutingRequest) -> Worker:
        self._lengths.append(len(asked.prompt))
        now = time.monotonic()
        if now >= self._next_s or len(self._bounds) != len(workers) - 1:
            self._bounds = bucket_bounds(self._lengths, len(workers))
            self._next_s = now + self._adjust_s
        index = bucket(_loads(workers), len(asked.prompt), self._bounds, self._rule)
        return workers[index]


class ConsistentHashingPolicy:
    """consistent_hashing: one worker per routing key; requests without a key go to a random one."""

    reads_prompts = False

    def __init__(self, config: PolicyConfig) -> None:
        self._lots = random.Random(os.urandom(16))

    def choose(self, workers: Sequence[Worker], asked: RoutingRequest) -> Worker:
        if not asked.key:
            return self._lots.choice(workers)
        return workers[consistent_hashing([w.url for w in workers], asked.key)]


POLICIES: Table[Callable[[PolicyConfig], Policy]] = Table(
    "policy",
    {
        "random": "banyan.router.policies:RandomPolicy",
        "round_robin": "banyan.router.policies:RoundRobinPolicy",
        "power_of_two": "banyan.router.policies:PowerOfTwoPolicy",
        "cache_aware": "banyan.router.policies:CacheAwarePolicy",
        "bucket": "banyan.router.policies:BucketPolicy",
        "consistent_hashing": "banyan.router.policies:ConsistentHashingPolicy",
    },
)


def open_policy(name: str, config: PolicyConfig) -> Policy:
    """The policy of this name; ConfigError if there is none."""
    return POLICIES.load(name)(config)


def _loads(workers: Sequence[Worker]) -> list[int]:
    return [worker.open for worker in workers]
