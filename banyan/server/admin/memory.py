"""Memory of the engine: flush the prefix cache, release and resume memory, attach a cache store.

Requests that arrive while memory is released wait. All replicas and their ranks change the store of
/hicache/storage-backend, or none does; the pages on the device stay.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from banyan.base.errors import ConfigError, RequestError
from banyan.base.json_types import is_object, unique_json
from banyan.base.log import logger, printable
from banyan.config.devices import facts_of
from banyan.config.rules.cache import DYNAMIC, store_wishes
from banyan.config.schema import CacheConfig
from banyan.engine_client.data_parallel import agreed
from banyan.messages.control_ops import GRAPHS, MEMORY_TAGS, USUAL_TAGS
from banyan.messages.events import BUSY, Reply
from banyan.server.admin.weights import LOAD_S
from banyan.server.embeddings import refuse_fields
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

log = logger(__name__)

_MAX_TAGS = 16
MAX_FLUSH_WAIT_S = 3600.0

_WRITES = ("write_through", "write_through_selective", "write_back")
_WAITS = ("best_effort", "wait_complete", "timeout")
_MAX_CONFIG = 64 << 10
_SETTLE_S = 30.0
"""Longest wait for pages that are on their way."""
_LOOK_S = 0.05


class MemoryRequest(msgspec.Struct, frozen=True):
    tags: list[str] | None = None
    """weights, kv_cache; null = both."""


class StoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is left out stays as the flags have it."""

    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str | None = None
    """A JSON object, as text."""
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None


class LeaveRequest(msgspec.Struct, frozen=True, kw_only=True):
    force: bool | str = False
    """Do not wait for pages that are on their way to the store; a text where it comes in the
    query."""


async def flush_cache(exchange: HttpExchange, state: ServerState) -> None:
    """Empty the prefix cache; 400 while requests run.

    `timeout` is how long to wait for them, in seconds. `pinned` flushes pinned prompts too.
    """
    state.admit()
    asked = await exchange.request.optional_object()
    pinned = asked.get("pinned") in (True, "true", "1")
    reply = await flush(state, _seconds(asked.get("timeout", 0)), pinned)
    await exchange.text(reply.text + "\n", 200 if reply.ok else 400)


async def flush(state: ServerState, wait_s: float = 0.0, pinned: bool = False) -> Reply:
    """Empty the prefix cache.

    Args:
        wait_s: how long to wait for running requests.
        pinned: flush pinned prompts too.
    """
    service = state.admit()
    deadline_s = time.monotonic() + wait_s
    reply = await service.client.control("flush_cache", pinned=pinned)
    # The engine frees a request shortly after its client has the answer: try again.
    while not reply.ok and time.monotonic() < deadline_s:
        await state.open.wait_change(min(0.1, deadline_s - time.monotonic()))
        reply = await service.client.control("flush_cache", pinned=pinned)
    return reply


def _seconds(value: object) -> float:
    try:
        found = float(value) if isinstance(value, int | float | str) else -1.0
    except (ValueError, OverflowError):
        found = -1.0
    if not 0 <= found <= MAX_FLUSH_WAIT_S:
        raise RequestError("timeout must be seconds in [0, 3600]", param="timeout")
    return found


async def release(exchange: HttpExchange, state: ServerState) -> None:
    """Release memory to the system; 400 while requests run, unless generation is paused."""
    tags = await _tags(exchange, state, USUAL_TAGS)
    client = state.admit().client
    reply = await agreed(client, "release_memory", LOAD_S, state.paused, tags=",".join(tags))
    if not reply.ok:
        raise RequestError(reply.text)
    state.released |= set(tags)
    log.info("memory released tags=%s", ",".join(tags))
    await exchange.whole(b"", 200, "text/plain")


async def resume(exchange: HttpExchange, state: ServerState) -> None:
    """Allocate released memory again: weights are read from their files, the cache is empty."""
    tags = await _tags(exchange, state, MEMORY_TAGS)
    reply = await state.admit().client.control("resume_memory", LOAD_S, tags=",".join(tags))
    if not reply.ok:
        raise RequestError(reply.text)
    state.released -= set(tags)
    log.info("memory resumed tags=%s", ",".join(tags))
    await exchange.whole(b"", 200, "text/plain")


async def _tags(exchange: HttpExchange, state: ServerState, default: Sequence[str]) -> list[str]:
    given = typed(await exchange.request.optional_object(), MemoryRequest).tags
    if given is None:
        return list(default)
    if len(given) > _MAX_TAGS:
        raise RequestError(f"{len(given)} tags; {_MAX_TAGS} are legal.", param="tags")
    if GRAPHS in given and not facts_of(state.config).has_graphs:
        exchange.context.warn_or_refuse("tags", f"there is no {GRAPHS} to be released")
        given = [tag for tag in given if tag != GRAPHS]
    if unknown := [tag for tag in given if tag not in MEMORY_TAGS]:
        raise RequestError(
            f"tags must be of {', '.join(MEMORY_TAGS)}, got {unknown[0][:40]!r}.", param="tags"
        )
    return list(dict.fromkeys(given))


async def storage_backend(exchange: HttpExchange, state: ServerState) -> None:
    """Which store there is; PUT attaches one, DELETE lets go of it."""
    if not state.config.server.admin_api_key:
        raise RequestError(
            "The store of the cache is shown and changed with an admin key alone.",
            code="admin_key_needed",
            hint="Start the server with --admin-api-key.",
        )
    does = {"PUT": _attach, "DELETE": _detach}.get(exchange.request.method, _show)
    await does(exchange, state)


async def _show(exchange: HttpExchange, state: ServerState) -> None:
    cache = state.config.cache
    await exchange.json(
        {
            "hicache_storage_backend": cache.store or None,
            "hicache_storage_backend_extra_config": (
                msgspec.json.encode(cache.store_options).decode() if cache.store_options else None
            ),
            "hicache_storage_prefetch_policy": cache.store_waits,
            "hicache_write_policy": cache.store_writes,
        }
    )


async def _attach(exchange: HttpExchange, state: ServerState) -> None:
    """Keep pages in a store from here on; 400 while there are requests, or when that failed."""
    service = state.admit()
    raw = await exchange.request.json_object()
    refuse_fields(raw, StoreRequest.__struct_fields__, exchange.context, is_strict=True)
    cache = _wished(state.config.cache, typed(raw, StoreRequest))
    try:
        wishes = store_wishes(cache)
    except ConfigError as error:
        raise RequestError(str(error), param="hicache_storage_backend_extra_config_json") from None
    reply = await agreed(
        service.client,
        "attach_store",
        LOAD_S,
        state.paused,
        store=cache.store,
        options=msgspec.json.encode(wishes.rest).decode(),
        write=cache.store_writes,
        prefetch=cache.store_waits,
        threshold=wishes.threshold,
        patience_s=wishes.timeout_s,
        patience_per_ki_s=wishes.timeout_per_ki_s,
    )
    if not reply.ok:
        text = f"Failed to attach HiCache storage backend.\n{reply.text}"
        raise RequestError(text, code="store_not_attached")
    state.config = replace(state.config, cache=cache)
    log.info("store attached %s", printable(reply.text))
    await exchange.text(f"HiCache storage backend attached.\n{reply.text}\n")


async def _detach(exchange: HttpExchange, state: ServerState) -> None:
    """Let go of the store, once what is on its way has come there; 400 while there are requests."""
    client = state.admit().client
    asked = typed(await exchange.request.optional_object(), LeaveRequest)
    force = asked.force in (True, "true", "1")
    deadline_s = time.monotonic() + _SETTLE_S

    async def once() -> Reply:
        return await agreed(client, "detach_store", LOAD_S, state.paused, force=force)

    reply = await once()
    while not reply.ok and reply.body == BUSY and time.monotonic() < deadline_s:
        await state.open.wait_change(_LOOK_S)
        reply = await once()
    if not reply.ok:
        text = f"Failed to detach HiCache storage backend.\n{reply.text}"
        raise RequestError(text, code="store_not_detached")
    cache = replace(state.config.cache, store="", store_options={})
    state.config = replace(state.config, cache=cache)
    log.info("store detached")
    await exchange.text(f"HiCache storage backend detached.\n{reply.text}\n")


def _wished(cache: CacheConfig, asked: StoreRequest) -> CacheConfig:
    """The settings as they would be."""
    for name, given, known in (
        ("hicache_write_policy", asked.hicache_write_policy, _WRITES),
        ("hicache_storage_prefetch_policy", asked.hicache_storage_prefetch_policy, _WAITS),
    ):
        if given is not None and given not in known:
            raise RequestError(
                f"{name} must be one of {', '.join(known)}, got {given[:40]!r}.", param=name
            )
    if not asked.hicache_storage_backend:
        raise RequestError("A store must be named.", param="hicache_storage_backend")
    if asked.hicache_storage_backend == DYNAMIC:
        raise RequestError(
            f"{DYNAMIC} runs code that the options name, so only the command line may ask for it.",
            param="hicache_storage_backend",
            hint=f"Start the server with --hicache-storage-backend {DYNAMIC}.",
        )
    text = asked.hicache_storage_backend_extra_config_json or "{}"
    field = "hicache_storage_backend_extra_config_json"
    if len(text) > _MAX_CONFIG:
        raise RequestError(
            f"{field} has {len(text)} characters; {_MAX_CONFIG} are legal.", param=field
        )
    try:
        options = unique_json(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is no JSON: {error}", param=field) from None
    if not is_object(options):
        raise RequestError(f"{field} must be a JSON object.", param=field)
    return replace(
        cache,
        store=asked.hicache_storage_backend[:200],
        store_options=options,
        store_writes=asked.hicache_write_policy or cache.store_writes,
        store_waits=asked.hicache_storage_prefetch_policy or cache.store_waits,
    )
