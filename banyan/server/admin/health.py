"""Health: /livez = the process answers, /readyz = a request would be admitted, /health = the engine
makes progress. Three questions, so three routes; none generates unless asked to.
"""

import asyncio

from banyan.base.ids import RequestId, fresh_id
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.generation import collect
from banyan.requests.request_spec import spec_of
from banyan.server.errors import Json, unavailable
from banyan.server.http.exchange import RETRY_AFTER_S, HttpExchange
from banyan.server.state import ServerState, Service

PROBE_TIMEOUT_S = 20.0


async def livez(exchange: HttpExchange, state: ServerState) -> None:
    await exchange.json({"status": "alive"})


async def readyz(exchange: HttpExchange, state: ServerState) -> None:
    trouble = state.trouble() or ("generation is paused" if state.paused else "")
    if state.released and not trouble:
        trouble = f"memory is released: {', '.join(sorted(state.released))}"
    body: Json = {"status": "not ready" if trouble else "ready"}
    if trouble:
        body |= {"reason": trouble, "phases": state.phases}
    await _say(exchange, body, bool(trouble))


async def health(exchange: HttpExchange, state: ServerState) -> None:
    """Like readyz, but draining is healthy work, and the body of a 200 is empty."""
    trouble = state.trouble() if not state.draining or state.dead else ""
    if trouble:
        await _say(exchange, {"status": "unhealthy", "reason": trouble}, True)
    else:
        await exchange.whole(b"", 200, "text/plain")


async def health_generate(exchange: HttpExchange, state: ServerState) -> None:
    """Generate one token; 200 when it comes in time. All who ask at a time get the same answer."""
    service = state.admit()

    async def generate() -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await generate_one(service)
        except TimeoutError:
            raise unavailable(f"no token within {PROBE_TIMEOUT_S:g} s", "engine_stuck") from None

    await state.probe.ask(generate)
    await exchange.whole(b"", 200, "text/plain")


async def generate_one(service: Service) -> None:
    """One greedy token after token 0, or its vector; RequestError when it fails."""
    is_embedding = service.limits.is_embedding
    request = spec_of(
        RequestId(f"probe-{fresh_id()}"),
        [0],
        SamplingParams(max_new_tokens=0 if is_embedding else 1, temperature=0.0),
        pool=is_embedding,
        route="probe",
    )
    await collect(service.generator, [request])


async def _say(exchange: HttpExchange, body: Json, is_bad: bool) -> None:
    retry = {"retry-after": str(RETRY_AFTER_S)} if is_bad else None
    await exchange.json(body, 503 if is_bad else 200, retry)
