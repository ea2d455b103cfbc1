"""RouterConfig: everything a router is told at its start. Frozen; `support/flags.py` fills it."""

from dataclasses import dataclass, field

from banyan.config.schema import ObserveConfig, ServerConfig
from banyan.router.breaker import BreakerRule
from banyan.scheduler.routing import CacheAware

PLAIN = "regular"
PREFILL = "prefill"
DECODE = "decode"
KINDS = (PLAIN, PREFILL, DECODE)


@dataclass(frozen=True)
class WorkerSpec:
    """One worker as somebody named it.

    Attributes:
        kind: one of KINDS.
        bootstrap_port: of a prefill worker: where decode workers find it; None = its own default.
        api_key: sent in the place of the client's; "" = the client's own.
    """

    url: str
    kind: str = PLAIN
    bootstrap_port: int | None = None
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True)
class FleetConfig:
    """Who answers."""

    workers: tuple[WorkerSpec, ...] = ()
    is_paired: bool = False
    """Every request goes to a prefill and a decode worker."""
    start: tuple[str, ...] = ()
    """Flags of workers that the router starts itself; () = it starts none."""
    count: int = 0
    """How many of those."""
    startup_s: float = 1800.0
    """A router that has nobody to ask for so long after its start ends."""


@dataclass(frozen=True)
class PolicyConfig:
    """Who gets a request."""

    name: str = "cache_aware"
    prefill: str = ""
    """"" = as `name`."""
    decode: str = ""
    threshold: float = CacheAware.threshold
    most_apart: int = CacheAware.most_apart
    most_times: float = CacheAware.most_times
    adjust_s: float = 5.0
    """How often the policy bucket parts lengths anew."""
    follows_events: bool = False
    """What workers hold is heard from them, where they tell."""
    tree_bytes: int = 1 << 24
    """Bytes of prompts that are remembered for each worker."""


@dataclass(frozen=True)
class RetryConfig:
    """How often, and after what pauses, a request is sent again of which nothing was answered."""

    most: int = 5
    first_pause_s: float = 0.05
    longest_pause_s: float = 30.0
    growth: float = 1.5
    jitter: float = 0.2
    """Pauses are longer or shorter by up to this share."""
    is_off: bool = False


@dataclass(frozen=True)
class BreakerConfig:
    failures: int = BreakerRule.failures
    successes: int = BreakerRule.successes
    open_s: float = BreakerRule.open_s
    window_s: float = BreakerRule.window_s
    is_off: bool = False

    @property
    def rule(self) -> BreakerRule:
        failures = 0 if self.is_off else self.failures
        return BreakerRule(failures, self.successes, self.open_s, self.window_s)


@dataclass(frozen=True)
class HealthConfig:
    """How workers are watched."""

    interval_s: float = 5.0
    timeout_s: float = 5.0
    failures: int = 3
    """So many bad answers in a row, or none, and a worker gets no more requests."""
    successes: int = 2
    """So many good ones, and it gets requests again."""
    path: str = "/health"
    first_interval_s: float = 1.0
    """Between checks of a worker that has not been well yet."""
    is_off: bool = False


@dataclass(frozen=True)
class LimitConfig:
    """What is taken in."""

    request_s: float = 1800.0
    """A request that takes longer ends."""
    concurrent: int = -1
    """Requests at a time; -1 = no bound."""
    waiting: int = 100
    """More that wait for a place."""
    waiting_s: float = 60.0
    rate: int = 0
    """Requests a second in the long run; 0 = no bound."""


@dataclass(frozen=True)
class FiguresConfig:
    """What is counted for Prometheus, and where it is shown beside /metrics."""

    port: int = 0
    host: str = ""
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True)
class RouterConfig:
    server: ServerConfig = field(default_factory=ServerConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    limits: LimitConfig = field(default_factory=LimitConfig)
    figures: FiguresConfig = field(default_factory=FiguresConfig)
