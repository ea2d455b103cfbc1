"""Health routes.

/livez: the process responds. /readyz: requests are admitted. /health: the engine makes progress.
/health_generate: the engine generates a token.
"""

import asyncio

from banyan.base.ids import RequestId, fresh_id
from banyan.messages.sampling_params import SamplingParams
from banyan.requests.generation import collect
from banyan.requests.request_spec import spec_of
from banyan.server.errors import RETRY_AFTER_S, Json, unavailable
from banyan.server.http.exchange import HttpExchange
from banyan.server.state import ServerState, Service

PROBE_TIMEOUT_S = 20.0


async def livez(exchange: HttpExchange, state: ServerState) -> None:
    await exchange.json({"status": "alive"})


async def readyz(exchange: HttpExchange, state: ServerState) -> None:
    reason = state.not_ready_reason() or ("generation is paused" if state.paused else "")
    if state.released and not reason:
        reason = f"memory is released: {', '.join(sorted(state.released))}"
    body: Json = {"status": "not ready" if reason else "ready"}
    if reason:
        body |= {"reason": reason, "phases": state.phases}
    await _respond(exchange, body, bool(reason))


async def health(exchange: HttpExchange, state: ServerState) -> None:
    """Like readyz, but draining is healthy, and the body of a 200 is empty."""
    reason = state.not_ready_reason() if not state.draining or state.dead else ""
    if reason:
        await _respond(exchange, {"status": "unhealthy", "reason": reason}, True)
    else:
        await exchange.whole(b"", 200, "text/plain")


async def health_generate(exchange: HttpExchange, state: ServerState) -> None:
    """Generate one token; 200 if it comes in time."""
    await check_generation(state)
    await exchange.whole(b"", 200, "text/plain")


async def check_generation(state: ServerState) -> None:
    """Generate one token within PROBE_TIMEOUT_S. Callers at the same time share one check.

    Raises:
        RequestError: 503 with the reason.
    """
    service = state.admit_with_weights()

    async def generate() -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await generate_one(service)
        except TimeoutError:
            raise unavailable(f"no token within {PROBE_TIMEOUT_S:g} s", "engine_stuck") from None

    await state.probe.ask(generate)


async def generate_one(service: Service) -> None:
    """Generate one greedy token after token 0, or embed it; RequestError if that fails."""
    is_embedding = service.limits.is_embedding
    request = spec_of(
        RequestId(f"probe-{fresh_id()}"),
        [0],
        SamplingParams(max_new_tokens=0 if is_embedding else 1, temperature=0.0),
        pool=is_embedding,
        route="probe",
    )
    await collect(service.generator, [request])


async def _respond(exchange: HttpExchange, body: Json, is_bad: bool) -> None:
    retry = {"retry-after": str(RETRY_AFTER_S)} if is_bad else None
    await exchange.json(body, 503 if is_bad else 200, retry)
