"""Fleet: the workers of one router, and the choice among them. Sends nothing."""

import asyncio
from collections.abc import Container

from banyan.base.errors import RequestError
from banyan.base.log import logger
from banyan.router.config import DECODE, PLAIN, PREFILL, RouterConfig, WorkerSpec
from banyan.router.pairs import Pair
from banyan.router.policies import Asked, Policy, open_policy
from banyan.router.proxy import Alone, Proxy
from banyan.router.upstream import checked_url
from banyan.router.worker import Worker

log = logger(__name__)

MAX_WORKERS = 1000


class Fleet:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        policy = config.policy
        names = {PLAIN: policy.name, PREFILL: policy.prefill, DECODE: policy.decode}
        self._policies: dict[str, Policy] = {
            kind: open_policy(name or policy.name, policy) for kind, name in names.items()
        }
        self.kinds = (PREFILL, DECODE) if config.fleet.is_paired else (PLAIN,)
        """Of workers that every request needs one of."""
        self.workers: list[Worker] = []
        self.came = asyncio.Event()
        """Set when a worker was added or removed."""
        self._numbers = 0
        for spec in config.fleet.workers:
            self.add(spec)

    def add(self, spec: WorkerSpec) -> Worker:
        """Take in one more worker, which gets requests once it is well.

        Raises:
            RequestError: 409 it is here already, 400 it is of a kind that this router has not.
            ConfigError: its URL is none.
        """
        if spec.kind not in self.kinds:
            raise RequestError(
                f"this router has workers of kind {' and '.join(self.kinds)}, not {spec.kind}",
                param="worker_type",
                hint="--pd-disaggregation decides which",
            )
        if self.find(url := checked_url(spec.url)) is not None:
            raise RequestError(f"{url} is a worker already", status=409, code="worker_exists")
        if len(self.workers) >= MAX_WORKERS:
            raise RequestError(f"a router has at most {MAX_WORKERS} workers", param="url")
        config = self._config
        worker = Worker(
            self._numbers, spec, config.breaker.rule, config.health, config.policy.tree_bytes
        )
        self._numbers += 1
        self.workers.append(worker)
        self.came.set()
        return worker

    def remove(self, worker: Worker) -> None:
        """Send a worker no more requests. What it has open goes on to its end."""
        worker.is_leaving = True
        self.workers.remove(worker)
        self.came.set()

    def find(self, name: str) -> Worker | None:
        """The worker of this URL or number."""
        name = name.rstrip("/")
        return next((w for w in self.workers if name in (w.url, str(w.number))), None)

    @property
    def reads_prompts(self) -> bool:
        return any(self._policies[kind].reads_prompts for kind in self.kinds)

    @property
    def speaker(self) -> Worker | None:
        """Who turns words into tokens, where some are looked at; None where none are."""
        if all(worker.contents is None for worker in self.workers):
            return None
        return next((w for w in self.workers if w.contents is not None and w.takes()), None)

    def choose(self, kind: str, asked: Asked, without: Container[Worker] = ()) -> Worker | None:
        """The worker of this kind for a request; None when none of the others can take it.

        Where the breakers of all workers are open, the one that failed least recently is tried: a
        breaker spreads requests away from a worker, and here there is nowhere to spread them to.
        """
        able = self.able(kind)
        if not able:
            left = [w for w in self._here(kind) if w not in without]
            return min(left, key=lambda w: w.breaker.last_failed_s, default=None)
        able = [w for w in able if w not in without]
        return self._policies[kind].choose(able, asked) if able else None

    def proxy(self, asked: Asked, without: Container[Worker], is_paired: bool) -> Proxy | None:
        """Who answers a request; None when nobody can.

        Args:
            without: workers that have been tried. Of a pair one at least is none of these.
            is_paired: it takes one worker of each kind; one of the first kind otherwise.
        """
        fresh = {kind: self.choose(kind, asked, without) for kind in self.kinds}
        if not is_paired:
            worker = fresh[self.kinds[0]]
            return Alone(worker) if worker is not None else None
        if not any(fresh.values()):
            return None
        prefill, decode = (fresh[kind] or self.choose(kind, asked) for kind in (PREFILL, DECODE))
        return Pair(prefill, decode) if prefill and decode else None

    def able(self, kind: str) -> list[Worker]:
        """Workers that can take a request and whose breaker lets it in."""
        return [w for w in self._here(kind) if w.takes()]

    def _here(self, kind: str) -> list[Worker]:
        return [w for w in self.workers if w.spec.kind == kind and w.is_here]

    def trouble(self) -> str:
        """Why no request can be taken; "" when one can."""
        for kind in self.kinds:
            if not self._here(kind):
                return self._nobody(kind)
        return ""

    def _nobody(self, kind: str) -> str:
        named = "worker" if kind == PLAIN else f"{kind} worker"
        some = [w for w in self.workers if w.spec.kind == kind]
        if not some:
            return f"there is no {named}"
        told = "; ".join(f"{w.url} {_verb(w.why_not())}" for w in some[:4])
        more = f"; and {len(some) - 4} more" if len(some) > 4 else ""
        return f"no {named} can take a request: {told}{more}"


def _verb(why: str) -> str:
    return why if why.startswith(("is ", "has ", "it ")) else f"is not well: {why}"
