"""Open requests, pauses and logging: what operators list, abort and change while the server runs.

No response contains text of a request.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from banyan.base.errors import RequestError
from banyan.base.log import logger, printable, set_level
from banyan.config.schema import ObserveConfig
from banyan.engine_client.request_log import RequestLog
from banyan.engine_client.text_generator import with_log
from banyan.messages.events import LiveRequest, Reply
from banyan.requests.request_spec import RequestContext
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

log = logger(__name__)

MOST = 256
"""Requests of one replica in a response."""

_ASK_S = 5.0
_MODES = ("abort", "retract", "in_place")
_LEVELS = ("debug", "info", "warning", "error", "critical")


class AbortRequest(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


class PauseRequest(msgspec.Struct, frozen=True):
    mode: str = "abort"


class LoggingRequest(msgspec.Struct, frozen=True, kw_only=True):
    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_requests_format: str | None = None
    log_level: str | None = None


async def list_requests(exchange: HttpExchange, state: ServerState) -> None:
    """List the caller's open requests; an administrator sees all of them.

    Running requests come first, in scheduling order. `open` is larger than the list while prompts
    are tokenized or constraints are compiled. With ?ended=true also the latest ended requests,
    newest first, with the seconds of their phases.
    """
    service = state.started()
    if not exchange.context.is_admin and not exchange.context.tenant:
        raise RequestError(
            "without a key all requests are everybody's: only this machine may list them",
            status=403,
            code="forbidden",
            hint="Start the server with --api-key",
        )
    replies = await service.client.ask("requests", _ASK_S, limit=MOST)
    visible = set(
        state.open.all()
        if exchange.context.is_admin
        else state.open.owned_by(exchange.context.tenant)
    )
    found: list[Json] = []
    for replica, reply in replies:
        found += [_row(replica, one) for one in _read(reply) if one.request in visible]
    body: Json = {"requests": found, "open": len(visible), "most_per_replica": MOST}
    if exchange.request.query.get("ended", "").lower() in ("1", "true"):
        caller = None if exchange.context.is_admin else exchange.context.tenant
        body["ended"] = state.ended.rows(caller)
    await exchange.json(body)


def _read(reply: Reply) -> Sequence[LiveRequest]:
    return msgspec.json.decode(reply.body, type=list[LiveRequest]) if reply.ok else ()


def _row(replica: int, request: LiveRequest) -> Json:
    row: Json = {"rid": request.request, "dp_rank": replica}
    fields = msgspec.structs.asdict(request)
    del fields["request"]
    return row | fields


async def abort_request(exchange: HttpExchange, state: ServerState) -> None:
    """Abort the caller's request with this rid, or all of the caller's requests.

    An administrator may abort the requests of others too. An unknown rid is no error.
    """
    state.started()
    asked = typed(await exchange.request.json_object(), AbortRequest)
    if not asked.rid and not asked.abort_all:
        raise RequestError("rid or abort_all must be given", param="rid")
    await exchange.json({"aborted": abort(state, exchange.context, asked.rid, asked.abort_all)})


def abort(
    state: ServerState, context: RequestContext, rid: str | None, abort_all: bool = False
) -> int:
    """Abort the request `rid` or all requests that the caller may abort; returns their number.

    Raises:
        RequestError: 403; without a key nobody may abort all requests.
    """
    service = state.started()
    if abort_all and not context.is_admin and not context.tenant:
        raise RequestError(
            "without a key all requests are everybody's: name one by its rid",
            param="abort_all",
            status=403,
            code="forbidden",
        )
    found = state.open.all() if abort_all else state.open.sequences_of(rid or "")
    if not context.is_admin:
        own = set(state.open.owned_by(context.tenant))
        found = [request for request in found if request in own]
    for request in found:
        service.client.abort(request)
    log.info("abort asked rid=%s found=%d", printable(rid or ""), len(found))
    return len(found)


async def pause_generation(exchange: HttpExchange, state: ServerState) -> None:
    """Stop planning steps; requests that arrive meanwhile wait.

    `abort` ends what runs, `retract` lets it recompute later, `in_place` keeps its pages.
    """
    service = state.admit()
    mode = typed(await exchange.request.optional_object(), PauseRequest).mode
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


async def configure_logging(exchange: HttpExchange, state: ServerState) -> None:
    """Switch the log of finished requests, and set the log level of this process."""
    service = state.started()
    raw = await exchange.request.optional_object()
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
    """The log settings with the fields that the operator sent."""
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
