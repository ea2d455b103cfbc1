"""Routes about the workers: list, add and remove them, and send a request to all of them.

Pinned prefixes are kept by every worker under one name, so that one call releases them all. A
worker that is added later has no pin; the response says so, because a router keeps no prompts.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from uuid import uuid4

import orjson

from banyan.base.errors import ConfigError, RequestError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import logger
from banyan.router.config import DECODE, KINDS, PLAIN, PREFILL, WorkerSpec
from banyan.router.forward import outgoing
from banyan.router.proxy import OutgoingRequest
from banyan.router.state import RouterState
from banyan.router.upstream import WorkerLost, WorkerUnreachable
from banyan.router.worker import Worker
from banyan.server.errors import RETRY_AFTER_S, Json, unavailable
from banyan.server.http.exchange import HttpExchange

log = logger(__name__)

ALL_S = 30.0
"""Seconds for the slowest worker when all get the same request."""
MOST_ANSWER_BYTES = 4 << 20


async def livez(exchange: HttpExchange, state: RouterState) -> None:
    await exchange.json({"status": "alive"})


async def readyz(exchange: HttpExchange, state: RouterState) -> None:
    trouble = state.trouble(exchange)
    body: Json = {"status": "not ready" if trouble else "ready"}
    if trouble:
        body |= {"reason": trouble}
    await exchange.json(body, 503 if trouble else 200, _retry(trouble))


async def health(exchange: HttpExchange, state: RouterState) -> None:
    """As readyz, but a draining router is healthy, and the body of a 200 is empty."""
    trouble = "" if state.models is not None else state.pool.trouble()
    if trouble:
        trouble = state.trouble(exchange)
        body = {"status": "unhealthy", "reason": trouble}
        await exchange.json(body, 503, _retry(trouble))
    else:
        await exchange.whole(b"", 200, "text/plain")


async def health_generate(exchange: HttpExchange, state: RouterState) -> None:
    """200 if every worker generates a token."""
    if trouble := state.trouble(exchange):
        raise unavailable(trouble, "no_worker")
    found = await send_to_all(exchange, state)
    bad = {w: answer for w, answer in found.items() if answer.status != 200}
    if bad:
        failures = _failures(bad, exchange, state)
        raise unavailable(f"not every worker makes a token: {failures}", "worker_stuck")
    await exchange.whole(b"", 200, "text/plain")


async def list_workers(exchange: HttpExchange, state: RouterState) -> None:
    await exchange.json({"urls": [w.url for w in state.pool.workers]})


async def workers(exchange: HttpExchange, state: RouterState) -> None:
    """GET lists them, POST adds one."""
    if exchange.request.method == "POST":
        worker = await _add(exchange, state, await exchange.request.json_object())
        body = {
            "status": "accepted",
            "worker_id": str(worker.number),
            "url": worker.url,
            "location": f"/workers/{worker.number}",
            "message": "it gets requests once it is well",
        }
        await exchange.json(body, 202)
        return
    some = state.pool.workers
    kinds = {kind: sum(w.spec.kind == kind for w in some) for kind in KINDS}
    await exchange.json(
        {
            "workers": [facts_of(w) for w in some],
            "total": len(some),
            "stats": {f"{kind}_count": count for kind, count in kinds.items()},
        }
    )


async def worker(exchange: HttpExchange, state: RouterState) -> None:
    """GET describes a worker, DELETE removes it."""
    one = _named(state, exchange.request.tail)
    if exchange.request.method == "DELETE":
        _remove(state, one)
        await exchange.json({"status": "accepted", "worker_id": str(one.number), "url": one.url})
        return
    await exchange.json(facts_of(one))


async def add_worker(exchange: HttpExchange, state: RouterState) -> None:
    """Older form of adding a worker: ?url=."""
    one = await _add(exchange, state, dict(exchange.request.query))
    await exchange.text(f"Successfully added worker: {one.url}")


async def remove_worker(exchange: HttpExchange, state: RouterState) -> None:
    one = _named(state, exchange.request.query.get("url", ""))
    _remove(state, one)
    await exchange.text(f"Successfully removed worker: {one.url}")


def facts_of(worker: Worker) -> Json:
    return {
        "id": str(worker.number),
        "url": worker.url,
        "worker_type": worker.spec.kind,
        "bootstrap_port": worker.bootstrap_port,
        "is_healthy": worker.is_well,
        "reason": "" if worker.takes() else worker.why_not(),
        "models": list(worker.models),
        "circuit_breaker": worker.breaker.state(time.monotonic()).name.lower(),
        "load": worker.open,
        "requests": worker.taken,
        "failed_requests": worker.failed,
        "connection_mode": "Http",
    }


async def broadcast(exchange: HttpExchange, state: RouterState) -> None:
    """Send the request to every worker; 200 if all of them answer 200."""
    found = await send_to_all(exchange, state)
    if not found:
        raise unavailable(state.trouble(exchange) or "there is no worker", "no_worker")
    replies: list[Json] = [
        {
            "worker": state.name_of(w, exchange),
            "status": answer.status,
            "body": answer.json(),
        }
        for w, answer in found.items()
    ]
    bad = [answer.status for answer in found.values() if answer.status != 200]
    body: Json = {"success": not bad, "workers": replies}
    await exchange.json(body, 200 if not bad else max(bad))


async def server_info(exchange: HttpExchange, state: RouterState) -> None:
    """The first worker's information, the internal states of all, and the router's view."""
    found = await send_to_all(exchange, state)
    infos = {w: info for w, a in found.items() if a.status == 200 and is_object(info := a.json())}
    if not infos and state.models is None:
        trouble = state.trouble(exchange)
        failures = _failures(found, exchange, state)
        raise unavailable(failures or trouble or "there is no worker", "no_worker")
    by_kind = {k: [i for w, i in infos.items() if w.spec.kind == k] for k in KINDS}
    answering = by_kind[DECODE] or by_kind[PLAIN]
    states: list[object] = []
    for info in answering:
        of_one = info.get("internal_states")
        states += of_one if is_list(of_one) else []
    pools: Json = {kind: by_kind[kind] for kind in (PREFILL, DECODE) if by_kind[kind]}
    first = answering[0] if answering else next(iter(infos.values()), {})
    router: Json = {"trouble": state.trouble(exchange)}
    if state.sees_workers(exchange):
        router["workers"] = [facts_of(w) for w in state.pool.workers]
    await exchange.json({**first, "internal_states": states, **pools, "router": router})


async def loads(exchange: HttpExchange, state: RouterState) -> None:
    found = await send_to_all(exchange, state)
    await exchange.json(
        {
            "workers": [
                {"worker": state.name_of(w, exchange), "load": answer.json()}
                for w, answer in found.items()
            ]
        }
    )


def _failures(
    found: Mapping[Worker, "WorkerReply"], exchange: HttpExchange, state: RouterState
) -> str:
    """The replies of workers that failed, as far as the caller may know them."""
    sees = state.sees_workers(exchange)
    return "; ".join(
        f"{state.name_of(w, exchange)} {answer if sees else answer.status}"
        for w, answer in found.items()
    )


async def show_metrics(exchange: HttpExchange, state: RouterState) -> None:
    if state.metrics is None:
        raise RequestError(
            "This router counts nothing for Prometheus",
            status=404,
            code="not_enabled",
            hint="Start it with --enable-metrics.",
        )
    await exchange.whole(state.metrics.show(), 200, state.metrics.kind)


class WorkerReply:
    """Response of one worker; status 0 = none."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body

    def __str__(self) -> str:
        return f"{self.status or 'no answer'} {self.body[:200].decode('utf-8', 'replace')}".strip()

    def json(self) -> object:
        """The body as JSON, or as text if it is not JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return self.body[:1000].decode("utf-8", "replace")


async def send_to_all(exchange: HttpExchange, state: RouterState) -> dict[Worker, WorkerReply]:
    """Send the request to every healthy worker at the same time."""
    return await send_to(
        [w for w in state.pool.workers if w.is_well], outgoing(exchange, state), ALL_S
    )


async def send_to(
    some: Sequence[Worker], request: OutgoingRequest, limit_s: float
) -> dict[Worker, WorkerReply]:
    """Send a request to some workers; their replies within `limit_s` seconds."""
    replies = await asyncio.gather(*(_send(w, request, limit_s) for w in some))
    return dict(zip(some, replies, strict=True))


async def _send(worker: Worker, request: OutgoingRequest, limit_s: float) -> WorkerReply:
    try:
        async with asyncio.timeout(limit_s):
            answer = await worker.upstream.send(
                request.method, request.target, request.headers_for(worker), request.body
            )
            try:
                return WorkerReply(answer.status, await answer.whole(MOST_ANSWER_BYTES))
            finally:
                answer.close()
    except TimeoutError:
        return WorkerReply(504, b"no answer in time")
    except (WorkerUnreachable, WorkerLost) as error:
        return WorkerReply(502, str(error).encode())


async def _add(exchange: HttpExchange, state: RouterState, fields: Json) -> Worker:
    spec = _spec(fields)
    try:
        worker = state.pool.add(spec)
    except ConfigError as error:
        raise RequestError(error.text, param="url", hint=error.hint) from None
    log.info("worker added url=%s kind=%s", worker.url, spec.kind)
    return worker


def _spec(fields: Json) -> WorkerSpec:
    """The worker in a request body; RequestError 400 if a field is missing, wrong or unknown."""
    known = ("url", "worker_type", "bootstrap_port", "api_key")
    for name in fields:
        if name not in known:
            raise RequestError(
                f"{name[:80]!r} is not honoured by this router",
                param=name[:80],
                hint=f"Known are {', '.join(known)}",
            )
    url, kind = fields.get("url", ""), fields.get("worker_type", PLAIN)
    port, key = fields.get("bootstrap_port"), fields.get("api_key", "")
    if isinstance(port, str) and port.isdigit():
        port = int(port[:6])
    if not isinstance(url, str) or not url:
        raise RequestError("url must be a text that is not empty", param="url")
    if not isinstance(kind, str) or kind not in KINDS:
        raise RequestError(f"worker_type must be one of {', '.join(KINDS)}", param="worker_type")
    if port is not None and (not isinstance(port, int) or not 0 < port < 1 << 16):
        raise RequestError("bootstrap_port must be a port", param="bootstrap_port")
    if not isinstance(key, str) or not key.isascii() or not key.isprintable():
        raise RequestError("api_key must be a text of printable ASCII", param="api_key")
    return WorkerSpec(url, kind, port, key)


def _named(state: RouterState, name: str) -> Worker:
    found = state.pool.find(name) if name else None
    if found is None:
        raise RequestError(
            f"there is no worker {name[:100]!r}",
            status=404,
            code="no_such_worker",
            hint="GET /workers lists them",
        )
    return found


def _remove(state: RouterState, worker: Worker) -> None:
    state.pool.remove(worker)
    log.info("worker removed url=%s open=%d", worker.url, worker.open)


def _retry(trouble: str) -> dict[str, str] | None:
    return {"retry-after": str(RETRY_AFTER_S)} if trouble else None


_ADDED = "workers that are added or started again later have no pin: send it again"


async def pin_prefix(exchange: HttpExchange, state: RouterState) -> None:
    """Pin a prompt in the cache of every worker, under one name."""
    request = outgoing(exchange, state)
    fields = await exchange.request.json_object()
    name = fields.get("rid")
    if "rid" not in fields:
        name = f"pin-{uuid4().hex}"
        rest = request.body.lstrip()[1:]
        request.body = b'{"rid":"%b"%b%b' % (name.encode(), b"," if fields else b"", rest)
    found = await _send_to_pool(exchange, state, request)
    body = {"pin": name, **_summary(state, found), "later": _ADDED}
    await exchange.json(body, max(answer.status for answer in found.values()))


async def unpin_prefix(exchange: HttpExchange, state: RouterState) -> None:
    """Release a pin at every worker; 404 if none has it."""
    found = await _send_to_pool(exchange, state, outgoing(exchange, state))
    statuses = {answer.status for answer in found.values()}
    if 200 in statuses:
        statuses.discard(404)  # a worker that was added after the pin
    counts = [reply.get("unpinned") for a in found.values() if is_object(reply := a.json())]
    body: Json = {
        "unpinned": sum(n for n in counts if isinstance(n, int)),
        **_summary(state, found),
    }
    await exchange.json({**body, "success": statuses == {200}}, max(statuses))


async def pinned_prefixes(exchange: HttpExchange, state: RouterState) -> None:
    """The pinned prefixes of each worker."""
    found = await _send_to_pool(exchange, state, outgoing(exchange, state))
    await exchange.json(_summary(state, found), max(answer.status for answer in found.values()))


async def _send_to_pool(
    exchange: HttpExchange, state: RouterState, request: OutgoingRequest
) -> dict[Worker, WorkerReply]:
    if state.draining:
        raise unavailable("the router is shutting down; send the request elsewhere", "draining")
    if state.settings.pool.is_paired:
        raise RequestError(
            "prefill and decode servers keep no pins: they compute for each other alone",
            status=501,
            code="not_routed",
            hint="Servers that answer by themselves keep them",
        )
    some = [worker for worker in state.pool.workers if worker.is_well]
    if not some:
        raise unavailable(state.trouble(exchange) or "there is no worker", "no_worker")
    async with state.admission.slot():
        return await send_to(some, request, state.settings.limits.request_s)


def _summary(state: RouterState, found: dict[Worker, WorkerReply]) -> Json:
    missed = [w for w in state.pool.workers if w not in found]
    return {
        "success": all(answer.status == 200 for answer in found.values()) and not missed,
        "workers": [
            {"worker": w.url, "status": answer.status, "body": answer.json()}
            for w, answer in found.items()
        ],
        "not_asked": [{"worker": w.url, "reason": w.why_not()} for w in missed],
    }
