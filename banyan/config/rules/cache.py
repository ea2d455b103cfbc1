"""Rules about the KV cache: recurrent states, eviction, sliding windows, hierarchical cache."""

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
DYNAMIC = "dynamic"
"""The store whose class the options name."""
BY_NAME = ("page_first_kv_split", "page_first")
"""Layouts in which what all layers keep under one name lies together; each device has its word."""
COPIED_APART = "direct"
_EXTRA = "--hicache-storage-backend-extra-config"
_STATE_FLAGS = {
    "states": "--max-mamba-cache-size",
    "state_ratio": "--mamba-full-memory-ratio",
    "state_interval": "--mamba-track-interval",
    "state_dtype": "--mamba-ssm-dtype",
    "state_strategy": "--mamba-scheduler-strategy",
}
_EVICTION = "--radix-eviction-policy-config"
_MAX_NUMBER = 1 << 31

_NUMBERS: dict[str, dict[str, tuple[int, bool]]] = {
    "slru": {"protected_threshold": (1, False)},
    "tlru": {"threshold": (1, True), "next_prompt_estimate": (0, True)},
}
"""Policy -> parameter -> (minimum, whether it is required)."""


def check_states(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    cache = config.cache
    if not model_config.has_states:
        for field, flag in _STATE_FLAGS.items():
            if getattr(cache, field) != getattr(CacheConfig(), field):
                log.warning("%s has no effect: this model has no recurrent states", flag)
        return config
    if cache.states and cache.state_strategy == "no_buffer":
        line = "--mamba-scheduler-strategy no_buffer has no effect: --max-mamba-cache-size %d does"
        log.warning(line, cache.states)
    if cache.state_dtype != CacheConfig().state_dtype:
        log.info("states are kept in %s: they are rounded after each step", cache.state_dtype)
    running, states = config.schedule.max_running, cache.states
    if states and running > states:
        raise ConfigError(
            f"--max-running-requests {running}: each of them needs a state, and there are "
            f"--max-mamba-cache-size {states}",
            hint="raise --max-mamba-cache-size; states beyond the running requests are checkpoints",
        )
    return config


def check_eviction(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    """Check the names and ranges of a policy's parameters."""
    policy, given = config.cache.eviction, config.cache.eviction_numbers
    known = _NUMBERS.get(policy, {})
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"{_EVICTION}: {policy} takes no {printable(str(key), 40)!r}",
                hint=f"it takes {' and '.join(known) or 'no numbers'}",
            )
        least, _ = known[key]
        if type(value) is not int or not least <= value < _MAX_NUMBER:
            shown = printable(repr(value), 40)
            raise ConfigError(
                f"{_EVICTION}: {key} must be an integer in [{least}, 2^31), got {shown}"
            )
    missing = [key for key, (_, is_needed) in known.items() if is_needed and key not in given]
    if missing:
        raise ConfigError(
            f"--radix-eviction-policy {policy} needs {' and '.join(missing)}",
            hint=f"give {_EVICTION} "
            '\'{"threshold": 4096, "next_prompt_estimate": 512}\', in tokens: '
            "how many may be left to compute, and how many a prompt adds",
        )
    if policy == "tlru" and given["threshold"] <= given["next_prompt_estimate"]:
        raise ConfigError(
            f"{_EVICTION}: threshold {given['threshold']} must be above next_prompt_estimate "
            f"{given['next_prompt_estimate']}",
            hint="or use --radix-eviction-policy lru, which it would be the same as",
        )
    return config


def check_windows(config: Config, model_config: ModelConfig, environment: Environment) -> Config:
    cache = config.cache
    if -1 < cache.window_mix < 0:
        raise ConfigError(
            f"--hybrid-kvcache-ratio must be in [0, 1], or -1 for none, got {cache.window_mix:g}"
        )
    given = {
        "--swa-full-tokens-ratio": cache.window_ratio > 0,
        "--hybrid-kvcache-ratio": cache.window_mix >= 0,
        "--disable-hybrid-swa-memory": cache.keeps_windows,
    }
    names = [name for name, is_given in given.items() if is_given]
    if names and WINDOW not in model_config.layer_kinds:
        log.warning("%s has no effect: this model has no sliding-window layers", names[0])
    return config


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
        (
            config.handoff.mode == "decode" and not config.handoff.offloads,
            "a decode server stores pages only with --disaggregation-decode-enable-offload-kvcache",
        ),
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
    if config.handoff.offloads and config.handoff.mode == "decode":
        config = _with_offload(config)
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
    if config.handoff.mode == "decode" and not config.handoff.offloads:
        raise ConfigError(
            f"{flag}: {why_no_store(config, model_config)}", hint="give it, or leave the store out"
        )
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


def _with_offload(config: Config) -> Config:
    """A decode server that writes its pages to a store."""
    flag = "--disaggregation-decode-enable-offload-kvcache"
    if not config.cache.store:
        raise ConfigError(
            f"{flag} needs --hicache-storage-backend",
            hint="name the same store as on the prefill servers, which read the pages",
        )
    log.debug("set enable-hierarchical-cache=True because of %s", flag)
    return replace(config, cache=replace(config.cache, hierarchical=True))


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
        if cache.store in ("", HOST):
            raise ConfigError(
                f"{flag} is not available on {device} with --disaggregation-mode: memory of the "
                "host holds pages for the other server",
                hint="name a store, where pages go at once: --hicache-storage-backend file",
            )
        if cache.host_layout or cache.host_copies:
            log.info(
                "pages go to the store at once, in one layout: no memory of the host keeps them"
            )
        return replace(config, cache=replace(cache, host_layout="", host_copies=""))
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
