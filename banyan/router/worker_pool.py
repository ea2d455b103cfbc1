"""The workers of a router, and the choice among them."""

import asyncio
from collections.abc import Container

from banyan.base.errors import ConfigError, RequestError
from banyan.base.log import logger
from banyan.router.config import DECODE, PLAIN, PREFILL, RouterConfig, WorkerSpec
from banyan.router.policies import Policy, RoutingRequest, open_policy
from banyan.router.proxy import Proxy, SingleWorker, WorkerPair
from banyan.router.upstream import checked_url
from banyan.router.worker import Worker

log = logger(__name__)

MAX_WORKERS = 1000


class WorkerPool:
    """The workers of a router with one policy per kind of worker."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        policy = config.policy
        names = {PLAIN: policy.name, PREFILL: policy.prefill, DECODE: policy.decode}
        self._policies: dict[str, Policy] = {
            kind: open_policy(name or policy.name, policy) for kind, name in names.items()
        }
        self.kinds = (PREFILL, DECODE) if config.pool.is_paired else (PLAIN,)
        """Kinds of workers; a request needs one of each."""
        self.workers: list[Worker] = []
        self.changed = asyncio.Event()
        """Set when a worker is added or removed."""
        self._numbers = 0
        for spec in config.pool.workers:
            self.add(spec)

    def add(self, spec: WorkerSpec) -> Worker:
        """Add a worker, which gets requests once it is healthy.

        Raises:
            RequestError: 409 if it exists already, 400 if this router does not use its kind.
            ConfigError: the URL is invalid, or its key would hide the callers.
        """
        if spec.kind not in self.kinds:
            raise RequestError(
                f"this router has workers of kind {' and '.join(self.kinds)}, not {spec.kind}",
                param="worker_type",
                hint="--pd-disaggregation decides which",
            )
        self._check_key(spec)
        if self.find(url := checked_url(spec.url)) is not None:
            raise RequestError(f"{url} is a worker already", status=409, code="worker_exists")
        if len(self.workers) >= MAX_WORKERS:
            raise RequestError(f"a router has at most {MAX_WORKERS} workers", param="url")
        config = self._config
        worker = Worker(
            self._numbers, spec, config.breaker, config.health, config.policy.tree_bytes
        )
        self._numbers += 1
        self.workers.append(worker)
        self.changed.set()
        return worker

    def _check_key(self, spec: WorkerSpec) -> None:
        """ConfigError if the worker could not distinguish the callers of this router."""
        server = self._config.server
        has_several = len(server.api_key.split()) > 1 or bool(server.api_key_file)
        if spec.api_key and has_several and not self._config.secret:
            raise ConfigError(
                f"{checked_url(spec.url)} has a key of its own, and this router has several: the "
                "worker could not distinguish their callers",
                hint="Set BANYAN_DIST_SECRET to the same long random text for the router and its "
                "servers, or give the servers the router's keys",
            )

    def remove(self, worker: Worker) -> None:
        """Send a worker no more requests; its open requests finish."""
        worker.is_leaving = True
        self.workers.remove(worker)
        self.changed.set()

    def find(self, name: str) -> Worker | None:
        """The worker with this URL or number."""
        name = name.rstrip("/")
        return next((w for w in self.workers if name in (w.url, str(w.number))), None)

    @property
    def reads_prompts(self) -> bool:
        return any(self._policies[kind].reads_prompts for kind in self.kinds)

    @property
    def tokenizer_worker(self) -> Worker | None:
        """A worker that tokenizes prompts; None if no worker reports cache events."""
        if all(worker.contents is None for worker in self.workers):
            return None
        return next((w for w in self.workers if w.contents is not None and w.takes()), None)

    def choose(
        self, kind: str, asked: RoutingRequest, without: Container[Worker] = ()
    ) -> Worker | None:
        """Choose a worker of this kind; None if no worker outside `without` can take the request.

        If the breakers of all workers are open, the worker that failed least recently is tried,
        because there is nowhere else to send the request.
        """
        here = [w for w in self._here(kind) if w.serves(asked.model)]
        able = [w for w in here if w.takes()]
        if not able:
            left = [w for w in here if w not in without]
            return min(left, key=lambda w: w.breaker.last_failed_s, default=None)
        able = [w for w in able if w not in without]
        return self._policies[kind].choose(able, asked) if able else None

    def proxy(
        self, asked: RoutingRequest, without: Container[Worker], is_paired: bool
    ) -> Proxy | None:
        """Choose the workers that answer a request; None if none can.

        Args:
            without: workers tried already. At least one worker of a pair is not among them.
            is_paired: use one worker of each kind instead of one of the first kind.
        """
        fresh = {kind: self.choose(kind, asked, without) for kind in self.kinds}
        if not is_paired:
            worker = fresh[self.kinds[0]]
            return SingleWorker(worker) if worker is not None else None
        if not any(fresh.values()):
            return None
        prefill, decode = (fresh[kind] or self.choose(kind, asked) for kind in (PREFILL, DECODE))
        return WorkerPair(prefill, decode) if prefill and decode else None

    def _here(self, kind: str) -> list[Worker]:
        return [w for w in self.workers if w.spec.kind == kind and w.is_here]

    def trouble(self) -> str:
        """Why no request can be taken; "" if one can."""
        for kind in self.kinds:
            if not self._here(kind):
                return self._why_none(kind)
        return ""

    def _why_none(self, kind: str) -> str:
        named = "worker" if kind == PLAIN else f"{kind} worker"
        some = [w for w in self.workers if w.spec.kind == kind]
        if not some:
            return f"there is no {named}"
        reasons = "; ".join(f"{w.url} {_verb(w.why_not())}" for w in some[:4])
        more = f"; and {len(some) - 4} more" if len(some) > 4 else ""
        return f"no {named} can take a request: {reasons}{more}"


def _verb(why: str) -> str:
    return why if why.startswith(("is ", "has ", "it ")) else f"is not well: {why}"
