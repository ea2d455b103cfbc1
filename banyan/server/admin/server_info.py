"""/model_info, /server_info and /weight_version.

No response contains a key, or text or tokens of a request.
"""

import asyncio

import msgspec

from banyan.config.cli import described, origins
from banyan.config.observability import kv_events
from banyan.config.schema import Config
from banyan.engine_client.client import Replica
from banyan.messages.events import accept_length
from banyan.parsers.choice import NONE
from banyan.server.admin.loads import living
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.state import ServerState

GIB = 1 << 30


class _Memory(msgspec.Struct, frozen=True):
    weight_bytes: int = 0
    cache_bytes: int = 0


class _Facts(msgspec.Struct, frozen=True):
    """The facts of a ready replica that have their own fields here."""

    memory: _Memory = _Memory()


async def model_info(exchange: HttpExchange, state: ServerState) -> None:
    await exchange.json(model_facts(state))


def model_facts(state: ServerState) -> Json:
    """The body of /model_info."""
    service = state.started()
    model, model_config = state.config.model, service.model_config
    return {
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


async def weight_version(exchange: HttpExchange, state: ServerState) -> None:
    await exchange.json({"weight_version": state.config.model.weight_version})


async def server_info(exchange: HttpExchange, state: ServerState) -> None:
    await exchange.json(server_facts(state))


def server_facts(state: ServerState) -> Json:
    """The body of /server_info: the resolved settings by flag name, and each replica's state."""
    service = state.started()
    facts = msgspec.json.decode(service.ready.facts, type=dict[str, object])
    facts.pop("settings", None)  # they are part of the resolved settings
    facts.pop("phases", None)  # they are part of startup_phases
    return {
        **described(state.config),
        "served_model_name": state.served_name,
        "max_running_requests": service.ready.max_running,
        "notes": state.config.observe.notes,
        "origins": origins(state.config),
        "status": "not ready" if state.not_ready_reason() else "ready",
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


def _kv_events(config: Config) -> Json | None:
    """Endpoints and block size of the cache events; None without --kv-events-config."""
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
    """Memory (GiB) and counters of one replica."""
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
