"""Policies: which of the workers that can take a request gets it. What decides are the pure
functions of `scheduler/routing.py`; here lots are drawn and prompts remembered.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from banyan.base.table import Table
from banyan.router.config import PolicyConfig
from banyan.router.worker import Worker
from banyan.scheduler.prefixes import BLOCK_BYTES, MAX_BLOCKS, prefix_keys
from banyan.scheduler.routing import (
    CacheAware,
    cache_aware,
    consistent_hashing,
    power_of_two,
    round_robin,
)

ROUTING_KEY = b"x-smg-routing-key"
"""Header whose value binds a client's requests to one worker."""


@dataclass(frozen=True)
class Asked:
    """What of a request can decide who gets it.

    Attributes:
        prompt: of its text, or what stands for it; empty where nobody looks at it.
        key: of the header ROUTING_KEY; "" for none.
    """

    prompt: bytes = b""
    key: str = ""


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
    """cache_aware: each worker's cache is guessed from the prompts that it was sent."""

    reads_prompts = True

    def __init__(self, config: PolicyConfig) -> None:
        self._rule = CacheAware(config.threshold, config.most_apart, config.most_times)

    def choose(self, workers: Sequence[Worker], asked: Asked) -> Worker:
        keys = prefix_keys(asked.prompt)
        most = min(len(asked.prompt), BLOCK_BYTES * MAX_BLOCKS)
        seen = [w.prefixes.matched(keys) * BLOCK_BYTES / max(1, most) for w in workers]
        held = [len(w.prefixes) + w.taken for w in workers]  # short prompts leave no keys
        chosen = workers[cache_aware(_loads(workers), seen, held, self._rule)]
        chosen.prefixes.add(keys)
        return chosen


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
        "consistent_hashing": "banyan.router.policies:Sticky",
    },
)


def open_policy(name: str, config: PolicyConfig) -> Policy:
    """ConfigError: there is no such policy."""
    return POLICIES.load(name)(config)


def _loads(workers: Sequence[Worker]) -> list[int]:
    return [worker.open for worker in workers]
