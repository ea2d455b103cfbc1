"""What operators change while the server runs: pauses and what is logged."""

from dataclasses import replace

import msgspec

from banyan.base.errors import RequestError
from banyan.base.log import logger, printable, set_level
from banyan.config.schema import ObserveConfig
from banyan.engine_client.all_or_none import agreed
from banyan.engine_client.request_log import RequestLog
from banyan.engine_client.text_generator import with_log
from banyan.server.embeddings import refuse_fields
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

log = logger(__name__)

_MODES = ("abort", "retract", "in_place")
_MAX_NAME = 1000
LOAD_S = 1800.0
"""Longest wait for other weights."""

_LEVELS = ("debug", "info", "warning", "error", "critical")


class PauseRequest(msgspec.Struct, frozen=True):
    mode: str = "abort"


class WeightsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The last three ask for what always is so here, or for nothing that exists here."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    keep_pause: bool = False
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False


class WeightRequest(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    truncate_size: int | str = 100
    """Rows; a text where it comes in the query."""


class VersionRequest(msgspec.Struct, frozen=True, kw_only=True):
    new_version: str
    abort_all_requests: bool = True


class LoggingRequest(msgspec.Struct, frozen=True, kw_only=True):
    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_requests_format: str | None = None
    log_level: str | None = None


async def pause_generation(exchange: HttpExchange, state: ServerState) -> None:
    """Plan no more steps; requests that come meanwhile wait.

    `abort` ends what runs, `retract` lets it recompute later, `in_place` keeps its pages.
    """
    service = state.admit()
    mode = typed(await exchange.optional_object(), PauseRequest).mode
    if mode not in _MODES:
        raise RequestError(f"mode must be one of {', '.join(_MODES)}, got {mode[:40]!r}.")
    state.paused = True
    reply = await service.client.control("pause", retract=mode == "retract")
    if mode == "abort":
        reply = await service.client.control("abort_all")
    log.info("generation paused mode=%s", mode)
    await exchange.json({"message": reply.text, "status": "ok"})


async def continue_generation(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit()
    reply = await service.client.control("resume")
    state.paused = False
    log.info("generation continues")
    await exchange.json({"message": reply.text, "status": "ok"})


async def update_weights_from_disk(exchange: HttpExchange, state: ServerState) -> None:
    """Take the weights of another checkpoint of the same model; 400 when that failed."""
    service = state.admit()
    raw = await exchange.json_object()
    refuse_fields(raw, WeightsRequest.__struct_fields__, exchange.context, is_strict=True)
    asked = typed(raw, WeightsRequest)
    if asked.load_format not in (None, "auto"):
        raise RequestError("load_format must be auto.", param="load_format")
    if asked.abort_all_requests:
        await service.client.control("abort_all")
    path, flush = asked.model_path, asked.flush_cache
    reply = await agreed(
        service.client, "update_weights", LOAD_S, state.paused, path=path, flush_cache=flush
    )
    if reply.ok:
        _set_version(state, asked.weight_version)
        log.info("weights taken path=%s", printable(path))
    stats = service.client.stats
    body = {
        "success": reply.ok,
        "message": reply.text,
        "num_paused_requests": stats.running + stats.waiting if state.paused else 0,
    }
    await exchange.json(body, 200 if reply.ok else 400)


async def get_weights_by_name(exchange: HttpExchange, state: ServerState) -> None:
    """The first rows of one tensor, under its name in the checkpoint, as numbers in lists."""
    asked = typed(await exchange.optional_object(), WeightRequest)
    rows = asked.truncate_size
    if not (isinstance(rows, int) or rows.isascii() and rows.isdecimal() and len(rows) <= 9):
        raise RequestError("truncate_size must be a whole number.", param="truncate_size")
    if int(rows) < 1:
        raise RequestError("truncate_size must be at least 1.", param="truncate_size")
    if len(asked.name) > _MAX_NAME:
        raise RequestError(f"name has {len(asked.name)} characters.", param="name")
    client = state.admit().client
    reply = await client.control("read_weight", LOAD_S, name=asked.name, rows=int(rows))
    if not reply.ok:
        raise RequestError(reply.text)
    await exchange.whole(reply.body, 200, "application/json")


async def update_weight_version(exchange: HttpExchange, state: ServerState) -> None:
    """Change the label of the weights that clients see."""
    service = state.admit()
    asked = typed(await exchange.json_object(), VersionRequest)
    if asked.abort_all_requests:
        await service.client.control("abort_all")
    _set_version(state, asked.new_version)
    text = "The version of the weights has been changed."
    await exchange.json({"success": True, "message": text, "new_version": asked.new_version})


def _set_version(state: ServerState, version: str | None) -> None:
    if version is not None:
        model = replace(state.config.model, weight_version=version)
        state.config = replace(state.config, model=model)


async def configure_logging(exchange: HttpExchange, state: ServerState) -> None:
    """Log the end of requests or not; the level of this process's lines."""
    service = state.started()
    raw = await exchange.optional_object()
    for name, value in raw.items():
        if name not in LoggingRequest.__struct_fields__ and value is not None:
            raise RequestError(
                f"{name[:80]} is not available in this build",
                param=name[:80],
                code="not_available",
                hint="log_requests, log_requests_level, log_requests_format and log_level can be "
                "set; requests are never dumped.",
            )
    asked = typed(raw, LoggingRequest)
    if asked.log_level is not None:
        if asked.log_level.lower() not in _LEVELS:
            raise RequestError(f"log_level must be one of {', '.join(_LEVELS)}.", param="log_level")
        set_level(asked.log_level)
    observe = _observed(state.config.observe, asked)
    generator = service.generator
    bare = generator.inner if isinstance(generator, RequestLog) else generator
    state.config = replace(state.config, observe=observe)
    state.service = replace(service, generator=with_log(bare, service.tokenizer, observe))
    await exchange.whole(b"", 200, "text/plain")


def _observed(observe: ObserveConfig, asked: LoggingRequest) -> ObserveConfig:
    """What lines about requests are, now that an operator has asked for others."""
    level, form = asked.log_requests_level, asked.log_requests_format
    if level not in (None, 0, 1, 2, 3):
        raise RequestError("log_requests_level must be 0, 1, 2 or 3.", param="log_requests_level")
    if form not in (None, "text", "json"):
        raise RequestError("log_requests_format must be text or json.", param="log_requests_format")
    return replace(
        observe,
        log_requests=observe.log_requests if asked.log_requests is None else asked.log_requests,
        log_detail=observe.log_detail if level is None else level,
        log_format=form or observe.log_format,
    )


async def version(exchange: HttpExchange, state: ServerState) -> None:
    await exchange.json({"version": state.version})
