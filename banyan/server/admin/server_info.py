"""/model_info, /server_info, /weight_version, and the load of each replica: /v1/loads, /get_load.

No response contains a key, or text or tokens of a request.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from banyan.base.errors import RequestError
from banyan.config.cli import described, origins
from banyan.config.observability import kv_events
from banyan.config.schema import Config
from banyan.engine_client.client import Replica
from banyan.messages.events import Ready, Stats, accept_length
from banyan.parsers.choice import NONE
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.state import ServerState, Service

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
        "has_image_understanding": service.media is not None,
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


async def show_loads(exchange: HttpExchange, state: ServerState) -> None:
    """The load of each replica. Values that this server does not measure are null."""
    state.started()
    query = exchange.request.query
    unknown = query.keys() - {"dp_rank", "include", "format"}
    if unknown:
        raise RequestError(f"unknown parameter {sorted(unknown)[0][:80]!r}", param="include")
    wanted = [name for name in query.get("include", "all").split(",") if name]
    strange = [name for name in wanted if name not in (*SECTIONS, *_OTHERS, _HISTORY)]
    if strange:
        known = ", ".join((*SECTIONS, *_OTHERS, _HISTORY))
        raise RequestError(
            f"include must name sections of {known}, got {strange[0][:40]!r}.", param="include"
        )
    form = query.get("format", "json")
    if form not in ("json", "prometheus"):
        raise RequestError("format must be json or prometheus.", param="format")
    if form == "prometheus":
        await exchange.text(_prometheus(_loads(state, wanted, query.get("dp_rank"))))
        return
    body = all_loads(state, wanted, query.get("dp_rank"))
    if _HISTORY in wanted:
        body["history"] = state.history.samples()
    await exchange.json(body)


def all_loads(state: ServerState, wanted: Sequence[str], rank: str | None = None) -> Json:
    """The body of /v1/loads.

    Args:
        wanted: the sections to include (`SECTIONS`, "all").
        rank: only this replica; None = all.
    """
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": state.version,
        "accelerator": state.config.device.name,
        "num_accelerators": state.config.parallel.world * state.config.parallel.dp,
        "loads": _loads(state, wanted, rank),
    }


def _loads(state: ServerState, wanted: Sequence[str], rank: str | None) -> list[Json]:
    return [
        _load(replica, state, wanted)
        for replica in living(state.started())
        if rank is None or rank == str(replica.rank)
    ]


async def get_load(exchange: HttpExchange, state: ServerState) -> None:
    """The short form: a list with one entry per live replica."""
    loads: list[Json] = [
        {
            "dp_rank": replica.rank,
            "num_reqs": replica.stats.running + replica.stats.waiting,
            "num_waiting_reqs": replica.stats.waiting,
            "num_tokens": _used_tokens(replica, state),
        }
        for replica in living(state.started())
    ]
    await exchange.json(loads)


def living(service: Service) -> list[Replica]:
    return [replica for replica in service.client.replicas() if replica.alive]


def _used_tokens(replica: Replica, state: ServerState) -> int:
    return (replica.stats.held_pages + replica.stats.in_flight_pages) * state.config.cache.page_size


def _load(replica: Replica, state: ServerState, wanted: Sequence[str]) -> Json:
    assert replica.ready is not None, "a service is admitted when every replica is ready"
    load = _core(replica, replica.ready, state)
    for name, (title, section) in SECTIONS.items():
        if name in wanted or "all" in wanted:
            load[title] = section(replica.stats, replica.ready)
    if "disagg" in wanted or "all" in wanted:
        load["disaggregation"] = {"mode": state.config.handoff.mode}
    return load


def _core(replica: Replica, ready: Ready, state: ServerState) -> Json:
    stats, most = replica.stats, ready.max_total_tokens
    used = _used_tokens(replica, state)
    return {
        "timestamp": time.time(),
        "dp_rank": replica.rank,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_waiting_uncached_tokens": None,
        "num_used_tokens": used,
        "num_total_tokens": used + stats.cached_pages * state.config.cache.page_size,
        "max_total_num_tokens": most,
        "max_running_requests": ready.max_running,
        "token_usage": used / most if most else 0.0,
        "gen_throughput": None,
        "cache_hit_rate": stats.cached_tokens / max(1, stats.prompt_tokens),
        "utilization": stats.running / max(1, ready.max_running),
    }


def _memory(stats: Stats, ready: Ready) -> Json:
    found = json.loads(ready.facts).get("memory", {})
    return {
        "weight_gb": found.get("weight_bytes", 0) / GIB,
        "kv_cache_gb": found.get("cache_bytes", 0) / GIB,
        "graph_gb": 0.0,
        "token_capacity": ready.max_total_tokens,
    }


def _queues(stats: Stats, ready: Ready) -> Json:
    return {"waiting": stats.waiting, "grammar": None, "paused": None, "retracted": None}


def _drafts(stats: Stats, ready: Ready) -> Json | None:
    """None without speculative decoding."""
    if not stats.verify_rows:
        return None
    proposed = stats.proposed_drafts
    return {
        "accept_length": accept_length(stats),
        "accept_rate": stats.correct_drafts / proposed if proposed else 0.0,
    }


def _adapters(stats: Stats, ready: Ready) -> Json | None:
    """None without LoRA adapters."""
    if (rules := json.loads(ready.facts).get("adapters")) is None:
        return None
    return {"num_loaded": stats.adapters, "used_bytes": stats.adapter_bytes, **rules}


_HISTORY = "history"
"""Value of `include`, not part of "all": the load of the last hour, all replicas together."""
_OTHERS = ("core", "disagg", "all")
"""Values of `include` that are not in SECTIONS."""

SECTIONS: Mapping[str, tuple[str, Callable[[Stats, Ready], Json | None]]] = {
    "memory": ("memory", _memory),
    "spec": ("speculative", _drafts),
    "lora": ("lora", _adapters),
    "queues": ("queues", _queues),
    "counters": ("counters", lambda stats, ready: msgspec.structs.asdict(stats)),
}
"""Value of `include` -> (key of the section, function that builds it)."""


def _prometheus(loads: list[Json]) -> str:
    """Every number of the loads as a Prometheus gauge."""
    lines: dict[str, list[str]] = {}
    for load in loads:
        parts = {"": load} | {f"{k}_": v for k, v in load.items() if isinstance(v, dict)}
        for prefix, part in parts.items():
            for name, value in part.items():
                if isinstance(value, int | float) and name != "dp_rank":
                    full = f"banyan_load_{prefix}{name}"
                    line = f'{full}{{dp_rank="{load["dp_rank"]}"}} {value}\n'
                    lines.setdefault(full, [f"# TYPE {full} gauge\n"]).append(line)
    return "".join(line for gauge in lines.values() for line in gauge)
