"""/release_memory_occupation and /resume_memory_occupation: what the engine holds goes back to the
system, and comes again. Requests that arrive meanwhile wait.
"""

import msgspec

from banyan.base.errors import RequestError
from banyan.base.log import logger
from banyan.engine_client.all_or_none import agreed
from banyan.messages.control_ops import MEMORY_TAGS
from banyan.server.admin.control import LOAD_S
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.fields import typed
from banyan.server.state import ServerState

log = logger(__name__)

_GRAPHS = "cuda_graph"
_MAX_TAGS = 16


class MemoryRequest(msgspec.Struct, frozen=True):
    tags: list[str] | None = None
    """weights, kv_cache; null = both."""


async def release(exchange: HttpExchange, state: ServerState) -> None:
    """Give memory back to the system; 400 while requests run, unless generation is paused."""
    tags = await _tags(exchange, state)
    client = state.admit().client
    reply = await agreed(client, "release_memory", LOAD_S, state.paused, tags=",".join(tags))
    if not reply.ok:
        raise RequestError(reply.text)
    state.released |= set(tags)
    log.info("memory released tags=%s", ",".join(tags))
    await exchange.whole(b"", 200, "text/plain")


async def resume(exchange: HttpExchange, state: ServerState) -> None:
    """Take released memory back: weights are read from their files, the cache is empty."""
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
