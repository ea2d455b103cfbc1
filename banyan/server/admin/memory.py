"""/flush_cache, /release_memory_occupation and /resume_memory_occupation.

Requests that arrive while memory is released wait.
"""

import time

import msgspec

from banyan.base.errors import RequestError
from banyan.base.log import logger
from banyan.engine_client.all_or_none import agreed
from banyan.messages.control_ops import MEMORY_TAGS
from banyan.messages.events import Reply
from banyan.server.admin.control import LOAD_S
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

log = logger(__name__)

_GRAPHS = "cuda_graph"
_MAX_TAGS = 16
MAX_FLUSH_WAIT_S = 3600.0


class MemoryRequest(msgspec.Struct, frozen=True):
    tags: list[str] | None = None
    """weights, kv_cache; null = both."""


async def flush_cache(exchange: HttpExchange, state: ServerState) -> None:
    """Empty the prefix cache; 400 while requests run.

    `timeout` is how long to wait for them, in seconds. `pinned` flushes pinned prompts too.
    """
    state.admit()
    asked = await exchange.optional_object()
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
    tags = await _tags(exchange, state)
    client = state.admit().client
    reply = await agreed(client, "release_memory", LOAD_S, state.paused, tags=",".join(tags))
    if not reply.ok:
        raise RequestError(reply.text)
    state.released |= set(tags)
    log.info("memory released tags=%s", ",".join(tags))
    await exchange.whole(b"", 200, "text/plain")


async def resume(exchange: HttpExchange, state: ServerState) -> None:
    """Allocate released memory again: weights are read from their files, the cache is empty."""
    tags = await _tags(exchange, state)
    reply = await state.admit().client.control("resume_memory", LOAD_S, tags=",".join(tags))
    if not reply.ok:
        raise RequestError(reply.text)
    state.released -= set(tags)
    log.info("memory resumed tags=%s", ",".join(tags))
    await exchange.whole(b"", 200, "text/plain")


async def _tags(exchange: HttpExchange, state: ServerState) -> list[str]:
    given = typed(await exchange.optional_object(), MemoryRequest).tags
    if given is None:
        return list(MEMORY_TAGS)
    if len(given) > _MAX_TAGS:
        raise RequestError(f"{len(given)} tags; {_MAX_TAGS} are legal.", param="tags")
    if _GRAPHS in given:
        exchange.context.warn_or_refuse("tags", f"there is no {_GRAPHS} to be released")
    tags = [tag for tag in given if tag != _GRAPHS]
    if unknown := [tag for tag in tags if tag not in MEMORY_TAGS]:
        raise RequestError(
            f"tags must be of {', '.join(MEMORY_TAGS)}, got {unknown[0][:40]!r}.", param="tags"
        )
    return list(dict.fromkeys(tags))
