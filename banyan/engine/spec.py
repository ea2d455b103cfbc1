"""CoreSpec: everything that an EngineCore's decisions depend on besides what it is told.

The same spec and the same calls give the same plans, which is what simulation and replay rest on.
"""

import msgspec

from banyan.engine.core import EngineCore, Recorder
from banyan.engine.lockstep import Lockstep
from banyan.grammar.base import GrammarFactory
from banyan.memory.cache import KVCache
from banyan.memory.eviction import EVICTION
from banyan.memory.groups import CacheGroup
from banyan.scheduler.budget import Limits
from banyan.scheduler.order import ORDERS
from banyan.scheduler.scheduler import Scheduler


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Plain values; `order` and `eviction` are names in their tables."""

    groups: tuple[CacheGroup, ...]
    limits: Limits
    depth: int = 1
    order: str = "fcfs"
    eviction: str = "lru"
    share: bool = True

    def build(
        self,
        grammars: GrammarFactory | None = None,
        lockstep: Lockstep | None = None,
        recorder: Recorder | None = None,
    ) -> EngineCore:
        """A fresh core. ConfigError when a policy has no such name."""
        cache = KVCache(self.groups, EVICTION.load(self.eviction), self.share)
        scheduler = Scheduler(cache, self.limits, ORDERS.load(self.order), grammars)
        return EngineCore(scheduler, self.depth, lockstep, recorder)
