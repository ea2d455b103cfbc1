"""What operators ask and order: facts about the server, the cache, and ending requests.

No answer here holds a key, a token of a client, or a prompt.
"""

import asyncio
import time

import msgspec

from banyan.base.errors import RequestError
from banyan.base.log import logger, printable
from banyan.config.described import described, origins
from banyan.config.kv_events import kv_events
from banyan.config.schema import Config
from banyan.engine_client.client import Replica
from banyan.messages.events import accept_length
from banyan.parsers.choice import NONE
from banyan.server.admin.loads import living
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.fields import typed
from banyan.server.state import ServerState

log = logger(__name__)

GIB = 1 << 30


class _Memory(msgspec.Struct, frozen=True):
    weight_bytes: int = 0
    cache_bytes: int = 0


class _Facts(msgspec.Struct, frozen=True):
    """Of what a replica tells when it is ready: what has names of its own here."""

    memory: _Memory = _Memory()


class AbortRequest(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


async def flush_cache(exchange: HttpExchange, state: ServerState) -> None:
    """Empty the prefix cache; 400 while requests run. `timeout` waits for them, in seconds;
    `pinned` lets go of what is pinned too."""
    service = state.admit()
    asked = await exchange.optional_object()
    pinned = asked.get("pinned") in (True, "true", "1")
    wait_s = _seconds(asked.get("timeout", 0))
    deadline_s = time.monotonic() + wait_s
    reply = await service.client.control("flush_cache", pinned=pinned)
    # The engine lets go of a request shortly after its client has the answer: ask again.
    while not reply.ok and time.monotonic() < deadline_s:
        await state.open.wait_change(min(0.1, deadline_s - time.monotonic()))
        reply = await service.client.control("flush_cache", pinned=pinned)
    await exchange.text(reply.text + "\n", 200 if reply.ok else 400)


def _seconds(value: object) -> float:
    try:
        found = float(value) if isinstance(value, int | float | str) else -1.0
    except (ValueError, OverflowError):
        found = -1.0
    if not 0 <= found <= 3600:
        raise RequestError("timeout must be seconds in [0, 3600]", param="timeout")
    return found


async def abort_request(exchange: HttpExchange, state: ServerState) -> None:
    """End the caller's own request of this rid, or all of them; an administrator ends those of
    others too. Unknown rids are no error."""
    service = state.started()
    asked = typed(await exchange.json_object(), AbortRequest)
    if not asked.rid and not asked.abort_all:
        raise RequestError("rid or abort_all must be given", param="rid")
    if asked.abort_all and not exchange.context.is_admin and not exchange.context.tenant:
        raise RequestError(
            "without a key all requests are everybody's: name one by its rid",
            param="abort_all",
            status=403,
            code="forbidden",
        )
    found = state.open.all() if asked.abort_all else state.open.called(asked.rid or "")
    if not exchange.context.is_admin:
        own = set(state.open.of(exchange.context.tenant))
        found = [request for request in found if request in own]
    for request in found:
        service.client.abort(request)
    log.info("abort asked rid=%s found=%d", printable(asked.rid or ""), len(found))
    await exchange.json({"aborted": len(found)})


async def model_info(exchange: HttpExchange, state: ServerState) -> None:
    service = state.started()
    model, model_config = state.config.model, service.model_config
    await exchange.json(
        {
            "model_path": model.source,
            "served_model_name": state.served_name,
            "tokenizer_path": model.tokenizer_path or model.source,
            "is_generation": not service.limits.is_embedding,
            "preferred_sampling_params": dict(state.config.server.preferred_sampling) or None,
            "weight_version": model.weight_version,
            "load_format": model.load_format,
            "reasoning_parser": _name(service.parsers.reasoning_name),
            "tool_call_parser": _name(service.parsers.tool_name),
            "disaggregation_mode": state.config.handoff.mode,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": model_config.model_type,
            "architectures": [model_config.architecture],
        }
    )


async def weight_version(exchange: HttpExchange, state: ServerState) -> None:
    await exchange.json({"weight_version": state.config.model.weight_version})


async def server_info(exchange: HttpExchange, state: ServerState) -> None:
    """Every resolved setting under its flag's name, and what each replica says of itself."""
    service = state.started()
    facts = msgspec.json.decode(service.ready.facts, type=dict[str, object])
    facts.pop("settings", None)  # they are among the resolved ones
    facts.pop("phases", None)  # and these in startup_phases
    await exchange.json(
        {
            **described(state.config),
            "served_model_name": state.served_name,
            "max_running_requests": service.ready.max_running,
            "notes": state.config.observe.notes,
            "origins": origins(state.config),
            "status": "not ready" if state.trouble() else "ready",
            "max_total_num_tokens": service.ready.max_total_tokens,
            "max_req_input_len": service.limits.total - 1,
            "startup_time": sum(state.phases.values()),
            "startup_phases": state.phases,
            "facts": facts,
            "kv_events": _kv_events(state.config),
            "server_tasks": len(asyncio.all_tasks()),
            "internal_states": [_internal(replica) for replica in living(service)],
            "version": state.version,
        }
    )


def _kv_events(config: Config) -> Json | None:
    """Where readers find them, and what a block is."""
    asked = kv_events(config.observe)
    if asked is None:
        return None
    return {
        "publisher": asked.publisher,
        "endpoint": asked.endpoint,
        "replay_endpoint": asked.replay_endpoint or None,
        "topic": asked.topic,
        "block_size": config.cache.page_size,
        "dp_size": config.parallel.dp,
    }


def _internal(replica: Replica) -> Json:
    """What one replica holds and has counted; sizes in GiB."""
    assert replica.ready is not None, "a service is admitted when every replica is ready"
    ready = replica.ready
    memory = msgspec.json.decode(ready.facts, type=_Facts).memory
    return {
        "effective_max_running_requests_per_dp": ready.max_running,
        "memory_usage": {
            "weight": memory.weight_bytes / GIB,
            "kvcache": memory.cache_bytes / GIB,
            "graph": 0.0,
            "token_capacity": ready.max_total_tokens,
        },
        "last_gen_throughput": None,
        "avg_spec_accept_length": accept_length(replica.stats),
        "stats": msgspec.structs.asdict(replica.stats),
    }


def _name(parser: str) -> str | None:
    return None if parser == NONE else parser
