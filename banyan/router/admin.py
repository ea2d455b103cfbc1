"""Routes about the workers: which there are, how they are, and what is asked of all of them."""

import asyncio
import time
from collections.abc import Sequence

import orjson

from banyan.base.errors import ConfigError, RequestError
from banyan.base.json_types import is_list, is_object
from banyan.base.log import logger
from banyan.router.config import DECODE, KINDS, PLAIN, PREFILL, WorkerSpec
from banyan.router.forward import outgoing
from banyan.router.proxy import Outgoing
from banyan.router.state import RouterState
from banyan.router.upstream import Lost, NotReached
from banyan.router.worker import Worker
from banyan.server.errors import Json, unavailable
from banyan.server.http.exchange import RETRY_AFTER_S, HttpExchange

log = logger(__name__)

ALL_S = 30.0
"""For the slowest of workers that are all asked the same."""
MOST_ANSWER_BYTES = 4 << 20


async def livez(exchange: HttpExchange, state: RouterState) -> None:
    await exchange.json({"status": "alive"})


async def readyz(exchange: HttpExchange, state: RouterState) -> None:
    trouble = state.trouble()
    body: Json = {"status": "not ready" if trouble else "ready"}
    if trouble:
        body |= {"reason": trouble}
    await exchange.json(body, 503 if trouble else 200, _retry(trouble))


async def health(exchange: HttpExchange, state: RouterState) -> None:
    """As readyz, but draining is healthy work, and the body of a 200 is empty."""
    trouble = state.fleet.trouble()
    if trouble:
        body = {"status": "unhealthy", "reason": trouble}
        await exchange.json(body, 503, _retry(trouble))
    else:
        await exchange.whole(b"", 200, "text/plain")


async def health_generate(exchange: HttpExchange, state: RouterState) -> None:
    """200 when every worker that gets requests makes a token."""
    if trouble := state.trouble():
        raise unavailable(trouble, "no_worker")
    found = await ask_all(exchange, state)
    bad = {w.url: answer for w, answer in found.items() if answer.status != 200}
    if bad:
        told = "; ".join(f"{url} {answer}" for url, answer in bad.items())
        raise unavailable(f"not every worker makes a token: {told}", "worker_stuck")
    await exchange.whole(b"", 200, "text/plain")


async def list_workers(exchange: HttpExchange, state: RouterState) -> None:
    await exchange.json({"urls": [w.url for w in state.fleet.workers]})


async def workers(exchange: HttpExchange, state: RouterState) -> None:
    """GET lists them, POST adds one."""
    if exchange.method == "POST":
        worker = await _add(exchange, state, await exchange.json_object())
        body = {
            "status": "accepted",
            "worker_id": str(worker.number),
            "url": worker.url,
            "location": f"/workers/{worker.number}",
            "message": "it gets requests once it is well",
        }
        await exchange.json(body, 202)
        return
    some = state.fleet.workers
    kinds = {kind: sum(w.spec.kind == kind for w in some) for kind in KINDS}
    await exchange.json(
        {
            "workers": [facts_of(w) for w in some],
            "total": len(some),
            "stats": {f"{kind}_count": count for kind, count in kinds.items()},
        }
    )


async def worker(exchange: HttpExchange, state: RouterState) -> None:
    """GET tells of one, DELETE removes it."""
    one = _named(state, exchange.tail)
    if exchange.method == "DELETE":
        _remove(state, one)
        await exchange.json({"status": "accepted", "worker_id": str(one.number), "url": one.url})
        return
    await exchange.json(facts_of(one))


async def add_worker(exchange: HttpExchange, state: RouterState) -> None:
    """The older form: ?url=."""
    one = await _add(exchange, state, dict(exchange.query))
    await exchange.text(f"Successfully added worker: {one.url}")


async def remove_worker(exchange: HttpExchange, state: RouterState) -> None:
    one = _named(state, exchange.query.get("url", ""))
    _remove(state, one)
    await exchange.text(f"Successfully removed worker: {one.url}")


def facts_of(worker: Worker) -> Json:
    return {
        "id": str(worker.number),
        "url": worker.url,
        "worker_type": worker.spec.kind,
        "bootstrap_port": worker.spec.bootstrap_port,
        "is_healthy": worker.is_well,
        "reason": "" if worker.takes() else worker.why_not(),
        "circuit_breaker": worker.breaker.state(time.monotonic()).name.lower(),
        "load": worker.open,
        "requests": worker.taken,
        "failed_requests": worker.failed,
        "connection_mode": "Http",
    }


async def everywhere(exchange: HttpExchange, state: RouterState) -> None:
    """Ask every worker the same; 200 when all of them say so."""
    found = await ask_all(exchange, state)
    if not found:
        raise unavailable(state.trouble() or "there is no worker", "no_worker")
    told: list[Json] = [
        {"worker": w.url, "status": answer.status, "body": answer.said()}
        for w, answer in found.items()
    ]
    bad = [answer.status for answer in found.values() if answer.status != 200]
    body: Json = {"success": not bad, "workers": told}
    await exchange.json(body, 200 if not bad else max(bad))


async def server_info(exchange: HttpExchange, state: RouterState) -> None:
    """What the first worker says of itself, the states of all, and what the router knows."""
    found = await ask_all(exchange, state)
    infos = {w: said for w, a in found.items() if a.status == 200 and is_object(said := a.said())}
    if not infos:
        told = "; ".join(f"{w.url} {answer}" for w, answer in found.items())
        raise unavailable(told or state.trouble() or "there is no worker", "no_worker")
    by_kind = {k: [i for w, i in infos.items() if w.spec.kind == k] for k in KINDS}
    answering = by_kind[DECODE] or by_kind[PLAIN]
    states: list[object] = []
    for info in answering:
        of_one = info.get("internal_states")
        states += of_one if is_list(of_one) else []
    pools: Json = {kind: by_kind[kind] for kind in (PREFILL, DECODE) if by_kind[kind]}
    first = answering[0] if answering else next(iter(infos.values()))
    router = {"workers": [facts_of(w) for w in state.fleet.workers], "trouble": state.trouble()}
    await exchange.json({**first, "internal_states": states, **pools, "router": router})


async def loads(exchange: HttpExchange, state: RouterState) -> None:
    found = await ask_all(exchange, state)
    await exchange.json(
        {"workers": [{"worker": w.url, "load": answer.said()} for w, answer in found.items()]}
    )


async def show_metrics(exchange: HttpExchange, state: RouterState) -> None:
    if state.figures is None:
        raise RequestError(
            "This router counts nothing for Prometheus",
            status=404,
            code="not_enabled",
            hint="Start it with --enable-metrics.",
        )
    await exchange.whole(state.figures.show(), 200, state.figures.kind)


class Said:
    """What one worker answered; status 0 = nothing."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body

    def __str__(self) -> str:
        return f"{self.status or 'no answer'} {self.body[:200].decode('utf-8', 'replace')}".strip()

    def said(self) -> object:
        """The JSON of the body; its text where that is none."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return self.body[:1000].decode("utf-8", "replace")


async def ask_all(exchange: HttpExchange, state: RouterState) -> dict[Worker, Said]:
    """The same request to every worker that is well, at the same time."""
    return await ask([w for w in state.fleet.workers if w.is_well], outgoing(exchange), ALL_S)


async def ask(some: Sequence[Worker], request: Outgoing, limit_s: float) -> dict[Worker, Said]:
    """What each of some workers answers within a time."""
    said = await asyncio.gather(*(_ask(w, request, limit_s) for w in some))
    return dict(zip(some, said, strict=True))


async def _ask(worker: Worker, request: Outgoing, limit_s: float) -> Said:
    try:
        async with asyncio.timeout(limit_s):
            answer = await worker.upstream.send(
                request.method, request.target, request.headers_for(worker), request.body
            )
            try:
                return Said(answer.status, await answer.whole(MOST_ANSWER_BYTES))
            finally:
                answer.close()
    except TimeoutError:
        return Said(504, b"no answer in time")
    except (NotReached, Lost) as error:
        return Said(502, str(error).encode())


async def _add(exchange: HttpExchange, state: RouterState, fields: Json) -> Worker:
    spec = _spec(fields)
    try:
        worker = state.fleet.add(spec)
    except ConfigError as error:
        raise RequestError(error.text, param="url", hint=error.hint) from None
    log.info("worker added url=%s kind=%s", worker.url, spec.kind)
    return worker


def _spec(fields: Json) -> WorkerSpec:
    """RequestError 400: a field is missing, of the wrong type, or not honoured here."""
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
    found = state.fleet.find(name) if name else None
    if found is None:
        raise RequestError(
            f"there is no worker {name[:100]!r}",
            status=404,
            code="no_such_worker",
            hint="GET /workers lists them",
        )
    return found


def _remove(state: RouterState, worker: Worker) -> None:
    state.fleet.remove(worker)
    log.info("worker removed url=%s open=%d", worker.url, worker.open)


def _retry(trouble: str) -> dict[str, str] | None:
    return {"retry-after": str(RETRY_AFTER_S)} if trouble else None
