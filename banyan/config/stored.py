"""What the flags say of a store beyond the process: which combinations are refused, and what its
extra configuration means. Part of `config/resolve.py`; knows no stores.
"""

import math
from dataclasses import dataclass, field

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.card import WINDOW, ModelCard
from banyan.config.env import Environment
from banyan.config.schema import CacheConfig, Config

log = logger(__name__)

_EXTRA = "--hicache-storage-backend-extra-config"


@dataclass(frozen=True)
class StoreWishes:
    """
    Attributes:
        threshold: tokens; fewer are not looked for.
        timeout_s, timeout_per_ki_s: most seconds that a request waits, and for each 1024 tokens.
        rest: what the store itself is told.
    """

    threshold: int = 256
    timeout_s: float = 1.0
    timeout_per_ki_s: float = 0.25
    rest: dict[str, object] = field(default_factory=dict[str, object])


def store_wishes(cache: CacheConfig) -> StoreWishes:
    """The extra configuration, read; ConfigError names the key that is wrong."""
    rest = dict(cache.store_options)
    if cache.store_path:
        rest.setdefault("path", cache.store_path)
    threshold = _number(rest, "prefetch_threshold", 256)
    if threshold != int(threshold):
        raise ConfigError(f"{_EXTRA}: prefetch_threshold is in whole tokens, got {threshold}")
    return StoreWishes(
        int(threshold),
        _number(rest, "prefetch_timeout_base", 1.0),
        _number(rest, "prefetch_timeout_per_ki_token", 0.25),
        rest,
    )


def _number(given: dict[str, object], key: str, default: float) -> float:
    value = given.pop(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, int | float) or not is_number or not 0 <= value < math.inf:
        raise ConfigError(
            f"{_EXTRA}: {key} must be a number of at least 0, got {printable(repr(value), 60)}"
        )
    return value


def check_the_store(config: Config, card: ModelCard, environment: Environment) -> Config:
    """A store keeps whole prefixes of one rank; what does not go with that is refused by name."""
    cache, parallel = config.cache, config.parallel
    store_wishes(cache)
    if cache.store and not cache.hierarchical:
        raise ConfigError(
            f"--hicache-storage-backend {cache.store} needs --enable-hierarchical-cache",
            hint="give both",
        )
    if not cache.hierarchical:
        return config
    flag = "--enable-hierarchical-cache"
    if cache.disable_radix:
        raise ConfigError(
            f"{flag} and --disable-radix-cache exclude each other: without prefixes "
            "there is nothing to keep",
            hint="leave one of them out",
        )
    if not cache.store:
        log.info(
            "%s: the cache lies in the host's memory already; pages outlive the process with "
            "--hicache-storage-backend file",
            flag,
        )
        return config
    flag = f"--hicache-storage-backend {cache.store}"
    if parallel.world > 1:
        raise ConfigError(
            f"{flag} is not available with --tp-size {parallel.tp} and --pp-size {parallel.pp}: "
            "what several ranks have read or not is not agreed among them",
            hint="use --dp-size for several replicas, which share the store",
        )
    if card.needs_whole_prompts:
        raise ConfigError(
            f"{flag}: a model that reads whole prompts shares no prefixes", hint="leave it out"
        )
    if WINDOW in card.layer_kinds and not cache.keeps_windows:
        raise ConfigError(
            f"{flag} is not available while layers with a window give back what lies below it",
            hint="add --disable-hybrid-swa-memory, with which they keep every position",
        )
    return config
