"""Worker: one server behind the router, what is known of it, and whether it can take a request."""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager

from banyan.router.breaker import Breaker, BreakerRule
from banyan.router.config import HealthConfig, WorkerSpec
from banyan.router.upstream import Upstream
from banyan.scheduler.prefix_hashes import BLOCK_BYTES, Contents, Prefixes


class Try:
    """One request at one worker. `is_good` stays None where nothing speaks for or against it."""

    def __init__(self, worker: "Worker") -> None:
        self.worker = worker
        self.is_good: bool | None = None


class Worker:
    """
    Args:
        number: of this router's workers, never used twice.
        tree_bytes: bytes of prompts that are remembered.
    """

    def __init__(
        self,
        number: int,
        spec: WorkerSpec,
        breaker: BreakerRule,
        health: HealthConfig,
        tree_bytes: int,
    ) -> None:
        self.number = number
        self.spec = spec
        self.upstream = Upstream(spec.url)
        self.url = self.upstream.url
        self.breaker = Breaker(breaker)
        self.prefixes = Prefixes(max(1, tree_bytes // BLOCK_BYTES))
        self.contents: list[Contents] | None = None
        """What it says that it holds, by replica; None where it says nothing."""
        self.open = 0
        """Requests that it has now."""
        self.taken = 0
        """Requests that it has had."""
        self.failed = 0
        """Those that it failed."""
        self.is_leaving = False
        """It gets no more requests, and goes when it has none."""
        self.trouble = "" if health.is_off else "it has not been asked yet"
        """Why it is not well; "" = it is."""
        self.has_been_well = health.is_off
        self.doubted = asyncio.Event()
        """Set to have it looked at now."""
        self._health = health
        self._good = self._bad = 0

    @property
    def is_well(self) -> bool:
        return not self.trouble

    @property
    def is_here(self) -> bool:
        """Whether it is well and stays, whatever its breaker says."""
        return self.is_well and not self.is_leaving

    def takes(self) -> bool:
        """Whether it can be sent a request now."""
        return self.is_here and self.breaker.lets_in(time.monotonic())

    def why_not(self) -> str:
        """Why it cannot be sent one, in a few words."""
        if self.is_leaving:
            return "is being removed"
        return self.trouble or "has failed too often and is left alone for a while"

    @contextmanager
    def trying(self) -> Generator[Try]:
        """Count a request that is sent there, for as long as the block runs."""
        outcome = Try(self)
        self.open += 1
        self.taken += 1
        is_probe = self.breaker.begin(time.monotonic())
        try:
            yield outcome
        finally:
            self.open -= 1
            self.failed += outcome.is_good is False
            self.breaker.end(outcome.is_good, is_probe, time.monotonic())

    def checked(self, trouble: str) -> bool:
        """Note what a look at its health found ("" = nothing wrong); whether that changed what is
        thought of it."""
        was_well = self.is_well
        if trouble:
            self._good, self._bad = 0, self._bad + 1
            if self._bad >= self._health.failures or not self.has_been_well:
                self.trouble = trouble
        else:
            self._good, self._bad = self._good + 1, 0
            if self._good >= self._health.successes or not self.has_been_well:
                self.trouble, self.has_been_well = "", True
        if self.is_well and not was_well:
            self.breaker.close()  # what failed was while it was away
        return self.is_well != was_well
