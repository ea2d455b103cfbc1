"""/v1/loads: how busy the engine is, in sections, as JSON or as Prometheus text."""

import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from banyan.base.errors import RequestError
from banyan.server.errors import Json
from banyan.server.exchange import Exchange
from banyan.server.state import ServerState, Service

GIB = 1 << 30


async def show_loads(exchange: Exchange, state: ServerState) -> None:
    """Numbers that nothing here counts are null."""
    service = state.admit()
    query = exchange.query
    unknown = query.keys() - {"dp_rank", "include", "format"}
    if unknown:
        raise RequestError(f"unknown parameter {sorted(unknown)[0][:80]!r}", param="include")
    wanted = [name for name in query.get("include", "all").split(",") if name]
    strange = [name for name in wanted if name not in (*SECTIONS, "core", "all")]
    if strange:
        known = ", ".join(("core", *SECTIONS, "all"))
        raise RequestError(
            f"include must name sections of {known}, got {strange[0][:40]!r}.", param="include"
        )
    form = query.get("format", "json")
    if form not in ("json", "prometheus"):
        raise RequestError("format must be json or prometheus.", param="format")
    load = _core(service, state)
    for name, (title, section) in SECTIONS.items():
        if name in wanted or "all" in wanted:
            load[title] = section(service)
    loads = [load] if query.get("dp_rank", "0") == "0" else []
    if form == "prometheus":
        await exchange.text("".join(_prometheus(load) for load in loads))
        return
    await exchange.json(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": state.version,
            "accelerator": state.config.device.name,
            "num_accelerators": state.config.parallel.tp * state.config.parallel.dp,
            "loads": loads,
        }
    )


def _core(service: Service, state: ServerState) -> Json:
    stats, most = service.client.stats, service.ready.max_total_tokens
    page = state.config.cache.page_size
    used = (stats.held_pages + stats.in_flight_pages) * page
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_waiting_uncached_tokens": None,
        "num_used_tokens": used,
        "num_total_tokens": used + stats.cached_pages * page,
        "max_total_num_tokens": most,
        "max_running_requests": service.ready.max_running,
        "token_usage": used / most if most else 0.0,
        "gen_throughput": None,
        "cache_hit_rate": stats.cached_tokens / max(1, stats.prompt_tokens),
        "utilization": stats.running / max(1, service.ready.max_running),
    }


def _memory(service: Service) -> Json:
    found = json.loads(service.ready.facts).get("memory", {})
    return {
        "weight_gb": found.get("weight_bytes", 0) / GIB,
        "kv_cache_gb": found.get("cache_bytes", 0) / GIB,
        "graph_gb": 0.0,
        "token_capacity": service.ready.max_total_tokens,
    }


def _queues(service: Service) -> Json:
    stats = service.client.stats
    return {"waiting": stats.waiting, "grammar": None, "paused": None, "retracted": None}


def _nothing(service: Service) -> None:
    """A section about something that this build does not have."""


SECTIONS: Mapping[str, tuple[str, Callable[[Service], Json | None]]] = {
    "memory": ("memory", _memory),
    "spec": ("speculative", _nothing),
    "lora": ("lora", _nothing),
    "disagg": ("disaggregation", lambda service: {"mode": "null"}),
    "queues": ("queues", _queues),
}
"""Name in `include` -> key of the answer, and what makes the section."""


def _prometheus(load: Json) -> str:
    """Every number of the load as a gauge."""
    lines = []
    parts = {"": load} | {f"{k}_": v for k, v in load.items() if isinstance(v, dict)}
    for prefix, part in parts.items():
        for name, value in part.items():
            if isinstance(value, int | float) and name != "dp_rank":
                full = f"banyan_load_{prefix}{name}"
                rank = load["dp_rank"]
                lines.append(f'# TYPE {full} gauge\n{full}{{dp_rank="{rank}"}} {value}\n')
    return "".join(lines)
