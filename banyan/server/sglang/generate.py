"""/generate and /vertex_generate over HTTP. requests.generate_request parses the body."""

from contextlib import aclosing

import msgspec
import orjson

from banyan.base.errors import RequestError
from banyan.requests.generate_request import NativeRequest
from banyan.requests.generate_response import NativeService, NativeSettings
from banyan.requests.sampling_params import Limits, merged
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange, read_prompt
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState, Service


class OpenSession(msgspec.Struct, frozen=True, kw_only=True):
    capacity_of_str_len: int
    session_id: str | None = None
    streaming: bool | None = None
    timeout: float | None = None


class CloseSession(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str


def native_service(service: Service, state: ServerState) -> NativeService:
    return NativeService(
        service.generator,
        service.tokenizer,
        service.limits,
        NativeSettings(
            service.native_defaults,
            service.draw_seed,
            lambda: state.config.model.weight_version,
            state.config.server.incremental_output,
            state.config.cache.store,
            pack=lambda triples: orjson.Fragment(orjson.dumps(triples)),
        ),
        state.adapters,
        service.media,
    )


async def generate(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit_to_queue(exchange.context.id)
    native = native_service(service, state)
    size = len(exchange.request.body)
    body = await exchange.request.json_object()
    turn = await state.sessions.begin(
        body, service.tokenizer, service.limits, exchange.context.tenant
    )
    if turn is None:
        await _answer(exchange, state, native, await native.read(body, exchange.context, size))
        return
    try:
        request = await native.read(turn.body, exchange.context, size)
        if len(request.sequences) > 1:
            raise RequestError("A turn of a session has one answer.", param="n")
        turn.keep(await _answer(exchange, state, native, request))
    finally:
        turn.end()


async def _answer(
    exchange: HttpExchange, state: ServerState, native: NativeService, request: NativeRequest
) -> list[int]:
    """Answer a request; returns the tokens of one with one sequence."""
    for name, why in merged(s.not_honoured for s in request.sequences).items():
        exchange.context.warn_or_refuse(name, why)
    output: list[int] = []
    with state.open.holding([s.request for s in request.sequences], exchange.context.tenant):
        if not request.stream:
            answer = await native.answer(request)
            output = output_of(answer)
            await exchange.json(answer)
        else:
            async with aclosing(native.stream(request)) as answers:
                async for answer in answers:
                    if not exchange.streaming:
                        await exchange.begin_events()
                    new = output_of(answer)
                    output = output + new if native.settings.incremental else new
                    await exchange.event(answer)
            await exchange.end_events()
    return output


def output_of(answer: object) -> list[int]:
    """Tokens of an answer to one sequence; [] of a list of answers."""
    ids = answer.get("output_ids") if isinstance(answer, dict) else None
    return ids if isinstance(ids, list) else []


async def open_session(exchange: HttpExchange, state: ServerState) -> None:
    """Answers with the session's id as a JSON string."""
    state.admit()
    asked = typed(await exchange.request.optional_object(), OpenSession)
    if asked.streaming and not state.config.server.streaming_sessions:
        raise RequestError(
            "This server has no streaming sessions.",
            param="streaming",
            code="not_available",
            hint="Start it with --enable-streaming-session, or name the turn to go on from in "
            "session_params.rid.",
        )
    found = state.sessions.open(
        asked.capacity_of_str_len,
        asked.session_id,
        asked.timeout,
        exchange.context.tenant,
        bool(asked.streaming),
    )
    await exchange.json(found)


async def close_session(exchange: HttpExchange, state: ServerState) -> None:
    """Close a session. One that is not open is no error: it may have timed out."""
    asked = typed(await exchange.request.optional_object(), CloseSession)
    state.sessions.close(asked.session_id, exchange.context.tenant)
    await exchange.whole(b"", 200, "text/plain")


async def vertex(exchange: HttpExchange, state: ServerState) -> None:
    """Vertex AI: `instances` are the prompts, `parameters` the fields that they have in common."""
    service = state.admit_to_queue(exchange.context.id)
    native = native_service(service, state)
    limits = native.limits
    request = await read_prompt(
        exchange,
        lambda body: native.parse(_from_vertex(body, limits), exchange.context),
        service.media,
    )
    with state.open.holding([s.request for s in request.sequences], exchange.context.tenant):
        answer = await native.answer(request)
    await exchange.json({"predictions": answer})


def _from_vertex(body: Json, limits: Limits) -> Json:
    """The native body that means the same."""
    instances, parameters = body.get("instances"), body.get("parameters") or {}
    if isinstance(instances, list) and len(instances) > limits.max_sequences:
        raise RequestError(
            f"at most {limits.max_sequences} instances are accepted, got {len(instances)}",
            param="instances",
        )
    names = ("text", "input_ids", "input_embeds")
    name = next((n for n in names if isinstance(instances, list) and _all_have(instances, n)), "")
    if not isinstance(instances, list) or not name or not isinstance(parameters, dict):
        raise RequestError(
            "instances must be a list of objects with text, or all with input_ids, or all with "
            "input_embeds, and parameters an object",
            param="instances",
        )
    return {**parameters, name: [instance[name] for instance in instances], "stream": False}


def _all_have(instances: list[object], name: str) -> bool:
    """Whether each instance is a prompt of this kind and nothing else."""
    return bool(instances) and all(isinstance(i, dict) and set(i) == {name} for i in instances)
