"""/requests and /abort_request: open requests by id. No response contains text of a request."""

from collections.abc import Sequence

import msgspec

from banyan.base.errors import RequestError
from banyan.base.log import logger, printable
from banyan.messages.events import LiveRequest, Reply
from banyan.requests.context import RequestContext
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

log = logger(__name__)

MOST = 256
"""Requests of one replica in a response."""

_ASK_S = 5.0


class AbortRequest(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool = False


async def list_requests(exchange: HttpExchange, state: ServerState) -> None:
    """List the caller's open requests; an administrator sees all of them.

    Running requests come first, in scheduling order. `open` is larger than the list while prompts
    are tokenized or constraints are compiled.
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
    await exchange.json({"requests": found, "open": len(visible), "most_per_replica": MOST})


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
    asked = typed(await exchange.json_object(), AbortRequest)
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
