"""Pins at every worker: a prompt that stays warm does so wherever the next request is sent.

One name holds everywhere, so that one call lets go of all. What a worker that comes later misses is
said, not made up for: a router keeps no prompts.
"""

from uuid import uuid4

from banyan.base.errors import RequestError
from banyan.base.json_types import is_object
from banyan.router.admin import Said, ask
from banyan.router.forward import outgoing
from banyan.router.proxy import Outgoing
from banyan.router.state import RouterState
from banyan.router.worker import Worker
from banyan.server.errors import Json, unavailable
from banyan.server.http.exchange import HttpExchange

_ADDED = "workers that are added or started again later have no pin: send it again"


async def pin_prefix(exchange: HttpExchange, state: RouterState) -> None:
    """Have every worker compute a prompt and keep it, by one name."""
    request = outgoing(exchange)
    fields = await exchange.json_object()
    name = fields.get("rid")
    if "rid" not in fields:
        name = f"pin-{uuid4().hex}"
        rest = request.body.lstrip()[1:]
        request.body = b'{"rid":"%b"%b%b' % (name.encode(), b"," if fields else b"", rest)
    found = await _ask(state, request)
    body = {"pin": name, **_told(state, found), "later": _ADDED}
    await exchange.json(body, max(answer.status for answer in found.values()))


async def unpin_prefix(exchange: HttpExchange, state: RouterState) -> None:
    """Let it go at every worker; 404 where none of them has it."""
    found = await _ask(state, outgoing(exchange))
    statuses = {answer.status for answer in found.values()}
    if 200 in statuses:
        statuses.discard(404)  # as of one that came after the pin
    counts = [said.get("unpinned") for a in found.values() if is_object(said := a.said())]
    body: Json = {"unpinned": sum(n for n in counts if isinstance(n, int)), **_told(state, found)}
    await exchange.json({**body, "success": statuses == {200}}, max(statuses))


async def pinned_prefixes(exchange: HttpExchange, state: RouterState) -> None:
    """What each worker keeps."""
    found = await _ask(state, outgoing(exchange))
    await exchange.json(_told(state, found), max(answer.status for answer in found.values()))


async def _ask(state: RouterState, request: Outgoing) -> dict[Worker, Said]:
    if state.draining:
        raise unavailable("the router is shutting down; send the request elsewhere", "draining")
    if state.settings.fleet.is_paired:
        raise RequestError(
            "prefill and decode servers keep no pins: they compute for each other alone",
            status=501,
            code="not_routed",
            hint="Servers that answer by themselves keep them",
        )
    some = [worker for worker in state.fleet.workers if worker.is_well]
    if not some:
        raise unavailable(state.trouble() or "there is no worker", "no_worker")
    async with state.gate.place():
        return await ask(some, request, state.settings.limits.request_s)


def _told(state: RouterState, found: dict[Worker, Said]) -> Json:
    missed = [w for w in state.fleet.workers if w not in found]
    return {
        "success": all(answer.status == 200 for answer in found.values()) and not missed,
        "workers": [
            {"worker": w.url, "status": answer.status, "body": answer.said()}
            for w, answer in found.items()
        ],
        "not_asked": [{"worker": w.url, "reason": w.why_not()} for w in missed],
    }
