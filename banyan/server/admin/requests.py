"""/requests: what runs and waits, request by request. Tells numbers and ids, and no text."""

from collections.abc import Sequence

import msgspec

from banyan.base.errors import RequestError
from banyan.messages.events import LiveRequest, Reply
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.state import ServerState

MOST = 256
"""Requests of one replica that an answer tells of."""

_ASK_S = 5.0


async def list_requests(exchange: HttpExchange, state: ServerState) -> None:
    """The caller's own requests that have not ended; an administrator sees those of all.

    Those that run come first, in the order in which they are served. `open` counts what the server
    has taken in, more than the list where texts are still read or a constraint is compiled.
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
        state.open.all() if exchange.context.is_admin else state.open.of(exchange.context.tenant)
    )
    found: list[Json] = []
    for replica, reply in replies:
        found += [_row(replica, one) for one in _read(reply) if one.request in visible]
    await exchange.json({"requests": found, "open": len(visible), "most_per_replica": MOST})


def _read(reply: Reply) -> Sequence[LiveRequest]:
    return msgspec.json.decode(reply.body, type=list[LiveRequest]) if reply.ok else ()


def _row(replica: int, request: LiveRequest) -> Json:
    row: Json = {"rid": request.request, "dp_rank": replica}
    told = msgspec.structs.asdict(request)
    del told["request"]
    return row | told
