"""Configuration of a router. Frozen; `cli/router.py` fills it from flags."""

from dataclasses import dataclass, field

from banyan.config.schema import ObserveConfig, ServerConfig
from banyan.scheduler.routing import CacheAware

PLAIN = "regular"
PREFILL = "prefill"
DECODE = "decode"
KINDS = (PLAIN, PREFILL, DECODE)
HUB = "hub"
"""Folder of models: the hub's cache on this machine."""


@dataclass(frozen=True)
class WorkerSpec:
    """One worker as named by flags or a request.

    Attributes:
        kind: one of KINDS.
        bootstrap_port: bootstrap port of a prefill worker; None = as the worker reports it.
        api_key: sent instead of the client's key; "" = send the client's.
    """

    url: str
    kind: str = PLAIN
    bootstrap_port: int | None = None
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True)
class PoolConfig:
    """The workers."""

    workers: tuple[WorkerSpec, ...] = ()
    is_paired: bool = False
    """Every request goes to a prefill and a decode worker."""
    start: tuple[str, ...] = ()
    """Flags of the workers that the router starts itself; () = none."""
    count: int = 0
    """Number of workers to start."""
    startup_s: float = 1800.0
    """Seconds after which a router without a ready worker exits."""
    by_model: bool = False
    """Workers have different models: a request goes to one that has the model it names."""


@dataclass(frozen=True)
class PolicyConfig:
    """How a worker is chosen."""

    name: str = "cache_aware"
    prefill: str = ""
    """"" = as `name`."""
    decode: str = ""
    threshold: float = CacheAware.threshold
    most_apart: int = CacheAware.most_apart
    most_times: float = CacheAware.most_times
    adjust_s: float = 5.0
    """Seconds between recomputations of the bucket policy's bounds."""
    follows_events: bool = False
    """Use the cache events that workers publish."""
    events_secret: str = field(default="", repr=False)
    """BANYAN_DIST_SECRET, which lets the router ask for a replay of events."""
    tree_bytes: int = 1 << 24
    """Bytes of prompts that are remembered for each worker."""


@dataclass(frozen=True)
class RetryConfig:
    """Retries of a request that got no response, and the pauses between them."""

    most: int = 5
    first_pause_s: float = 0.05
    longest_pause_s: float = 30.0
    growth: float = 1.5
    jitter: float = 0.2
    """Pauses are longer or shorter by up to this share."""
    is_off: bool = False


@dataclass(frozen=True)
class BreakerConfig:
    """When the circuit breaker of a worker opens and closes.

    Attributes:
        failures: consecutive failures within `window_s` that open it. A success resets the count.
        successes: consecutive successes that close it.
        open_s: seconds after the last failure without requests.
    """

    failures: int = 10
    successes: int = 3
    open_s: float = 60.0
    window_s: float = 120.0
    is_off: bool = False


@dataclass(frozen=True)
class HealthConfig:
    """Health checks of workers."""

    interval_s: float = 5.0
    timeout_s: float = 5.0
    failures: int = 3
    """Consecutive failed checks after which a worker gets no requests."""
    successes: int = 2
    """Consecutive good checks after which it gets requests again."""
    path: str = "/health"
    first_interval_s: float = 1.0
    """Seconds between checks of a worker that has never been healthy."""
    is_off: bool = False


@dataclass(frozen=True)
class LimitConfig:
    """Admission limits."""

    request_s: float = 1800.0
    """Longest duration of a request in seconds."""
    concurrent: int = -1
    """Requests in progress; -1 = no limit."""
    waiting: int = 100
    """Requests that may wait in addition."""
    waiting_s: float = 60.0
    rate: int = 0
    """Requests per second in the long run; 0 = no limit."""


@dataclass(frozen=True)
class PrometheusConfig:
    """Prometheus metrics: a separate port besides /metrics, and histogram buckets."""

    port: int = 0
    host: str = ""
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelsConfig:
    """Models whose servers the router starts when they are needed.

    Attributes:
        names: models as `banyan serve` takes them.
        folder: each model in it is served; HUB = those in the hub's cache.
        preset: file with a mapping from names to flags of their servers.
        most: models that are loaded at a time.
        memory_gib: memory of the loaded models; 0 = no bound.
        idle_s: seconds without a request after which a model is unloaded; 0 = never.
        default: model of requests that name none, or one that is not here; "" = the first, and an
            error.
    """

    names: tuple[str, ...] = ()
    folder: str = ""
    preset: str = ""
    most: int = 4
    memory_gib: float = 0.0
    idle_s: float = 0.0
    default: str = ""

    @property
    def is_on(self) -> bool:
        return bool(self.names or self.folder or self.preset)


@dataclass(frozen=True)
class VisibilityConfig:
    """What callers see of the workers."""

    shows_workers: bool = False
    """Names and troubles of workers are for every key, not only for administrators."""


@dataclass(frozen=True)
class RouterConfig:
    """The whole configuration.

    Attributes:
        secret: BANYAN_DIST_SECRET, by which servers know the callers of forwarded requests.
    """

    server: ServerConfig = field(default_factory=ServerConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    secret: str = field(default="", repr=False)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    visibility: VisibilityConfig = field(default_factory=VisibilityConfig)
