"""/generate: the native form over HTTP. What it means is in frontend.native."""

from contextlib import aclosing

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
