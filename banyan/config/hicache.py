"""What the flags say of a store beyond the process: which combinations are refused, and what its
extra configuration means. Part of `config/resolve.py`.
"""

import math
from dataclasses import dataclass, field, replace

from banyan.base.errors import ConfigError
from banyan.base.log import logger, printable
from banyan.config.devices import HostTierFacts, facts_of
from banyan.config.env import Environment
from banyan.config.schema import CacheConfig, Config
from banyan.model_config.model_config import WINDOW, ModelConfig

log = logger(__name__)

HOST = "host"
"""The name of the memory of the host as a store of pages of a device."""
BY_NAME = ("page_first_kv_split", "page_first")
"""Layouts in which what all layers keep under one name lies together; each device has its word."""
COPIED_APART = "direct"
_EXTRA = "--hicache-storage-backend-extra-config"


@dataclass(frozen=True)
class StoreWishes:
    """
    Attributes:
        threshold: tokens; fewer are not looked for.
        timeout_s, timeout_per_ki_s: most seconds that a request waits, and for each 1024 tokens.
        rest: options of the store itself.
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


def why_no_store(config: Config, model_config: ModelConfig) -> str:
    """Why the pages of this model, served so, cannot be stored; "" = they can. Pages of several
    ranks lie in memory that the first one maps."""
    cache, parallel = config.cache, config.parallel
    for is_so, why in (
        (bool(config.handoff.role), "pages come from one place at a time, here another server"),
        (parallel.nodes > 1, "one process carries the pages of all ranks, of one machine"),
        (parallel.cp > 1, "ranks that divide a prompt keep its pages to themselves"),
        (model_config.needs_whole_prompts, "a model that reads whole prompts shares no prefixes"),
        (model_config.has_states, "what is stored of a prefix is every position, and no state"),
        (
            WINDOW in model_config.layer_kinds and not cache.keeps_windows,
            "layers with a window give back what lies below it, without --disable-hybrid-swa-memory"
            " (with which they keep every position)",
        ),
    ):
        if is_so:
            return why
    return ""


def can_have_store(config: Config, model_config: ModelConfig) -> bool:
    """Whether a store may be attached, now or while the server runs."""
    return config.cache.hierarchical and not why_no_store(config, model_config)


def check_hicache(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """A store keeps whole prefixes of one rank; features that are incompatible with it are
    refused by name."""
    cache, parallel = config.cache, config.parallel
    store_wishes(cache)
    if cache.store == HOST and not cache.host_tier:
        raise ConfigError(
            f"--hicache-storage-backend {HOST}: the memory of the host is no store that outlives "
            "the process",
            hint="--enable-hierarchical-cache alone keeps pages of a device there",
        )
    if cache.store and not cache.hierarchical:
        raise ConfigError(
            f"--hicache-storage-backend {cache.store} needs --enable-hierarchical-cache",
            hint="give both",
        )
    if not cache.hierarchical:
        return config
    flag = "--enable-hierarchical-cache"
    if tier := facts_of(config).host_tier:
        config = _with_host_tier(config, model_config, tier)
        cache = config.cache
    if not cache.store:
        if why := why_no_store(config, model_config):
            log.info("%s has no effect: %s", flag, why)
        else:
            log.info(
                "%s: the cache lies in the host's memory already; pages outlive the process with "
                "--hicache-storage-backend file, or a store that is attached later",
                flag,
            )
        return config
    if cache.store != HOST:
        flag = f"--hicache-storage-backend {cache.store}"
    if parallel.nodes > 1 or parallel.cp > 1:
        name = parallel.nodes_flag if parallel.nodes > 1 else f"--attn-cp-size {parallel.cp}"
        raise ConfigError(
            f"{flag} is not available with {name}: {why_no_store(config, model_config)}",
            hint="use --tp-size on one machine, or --dp-size for replicas, which share the store",
        )
    if model_config.needs_whole_prompts:
        raise ConfigError(
            f"{flag}: a model that reads whole prompts shares no prefixes", hint="leave it out"
        )
    if WINDOW in model_config.layer_kinds and not cache.keeps_windows:
        raise ConfigError(
            f"{flag} is not available while layers with a window give back what lies below it",
            hint="add --disable-hybrid-swa-memory, with which they keep every position",
        )
    return config


def _with_host_tier(config: Config, model_config: ModelConfig, tier: HostTierFacts) -> Config:
    """With memory of the host for pages of a device."""
    cache, device = config.cache, config.device.name
    copies = cache.host_copies or tier.copies[0]
    layout = cache.host_layout or tier.layouts[model_config.latent is not None]
    for flag, given, known in (
        ("--hicache-io-backend", copies, tier.copies),
        ("--hicache-mem-layout", layout, tier.layouts),
    ):
        if given not in known:
            raise ConfigError(
                f"{flag} {given} is not available on {device}: it is made for other devices",
                hint=f"choose {' or '.join(known)}, or leave it out",
            )
    parallel, flag = config.parallel, "--enable-hierarchical-cache"
    if config.handoff.role:
        why = why_no_store(config, model_config)
        raise ConfigError(
            f"{flag} is not available on {device} with --disaggregation-mode: {why}",
            hint="leave it out; --dp-size starts independent replicas, each with a tier of its own",
        )
    if parallel.world > 1 and not tier.serves_ranks:
        raise ConfigError(
            f"{flag} is not available on {device} with several ranks: pages are carried between "
            "the host and one device",
            hint="leave it out; --dp-size starts independent replicas, each with a tier of its own",
        )
    if cache.host_gb == 0 and cache.host_ratio == 0:
        raise ConfigError(
            "--hicache-ratio 0 without --hicache-size: nothing would be kept", hint="raise one"
        )
    found = replace(cache, store=cache.store or HOST, host_tier=True)
    return replace(config, cache=replace(found, host_copies=copies, host_layout=layout))
