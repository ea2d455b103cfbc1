"""/generate: the native form over HTTP, and Vertex AI's form of it. What it means is in
frontend.native.
"""

from contextlib import aclosing

from banyan.base.errors import RequestError
from banyan.frontend.native_answer import NativeService
from banyan.server.exchange import Exchange
from banyan.server.state import ServerState, Service


def native_service(service: Service, state: ServerState) -> NativeService:
    return NativeService(
        service.generator,
        service.tokenizer,
        service.limits,
        defaults=service.native_defaults,
        draw_seed=service.draw_seed,
        weight_version=state.config.model.weight_version,
        incremental=state.config.server.incremental_output,
    )


async def generate(exchange: Exchange, state: ServerState) -> None:
    native = native_service(state.admit(), state)
    body = await exchange.json_object()
    request = await native.read(body, exchange.tenant)
    for name in dict.fromkeys(n for s in request.sequences for n in s.not_honoured):
        exchange.warn_or_refuse(name, "not used", state.config.server.strict_requests)
    with state.open.holding([s.request for s in request.sequences]):
        if not request.stream:
            await exchange.json(await native.answer(request))
            return
        async with aclosing(native.stream(request)) as answers:
            async for answer in answers:
                if not exchange.streaming:
                    await exchange.begin_events()
                await exchange.event(answer)
        await exchange.end_events()


async def vertex(exchange: Exchange, state: ServerState) -> None:
    """Vertex AI: `instances` are the prompts, `parameters` the fields that they have in common."""
    native = native_service(state.admit(), state)
    body = await exchange.json_object()
    instances, parameters = body.get("instances"), body.get("parameters") or {}
    names = ("text", "input_ids")
    name = next((n for n in names if isinstance(instances, list) and _all_have(instances, n)), "")
    if not isinstance(instances, list) or not name or not isinstance(parameters, dict):
        raise RequestError(
            "instances must be a list of objects with text, or all with input_ids, and parameters "
            "an object",
            param="instances",
        )
    prompts = [instance[name] for instance in instances]
    request = await native.read({**parameters, name: prompts, "stream": False}, exchange.tenant)
    with state.open.holding([s.request for s in request.sequences]):
        answer = await native.answer(request)
    await exchange.json({"predictions": answer})


def _all_have(instances: list[object], name: str) -> bool:
    """Whether each instance is a prompt of this kind and nothing else."""
    return bool(instances) and all(isinstance(i, dict) and set(i) == {name} for i in instances)
