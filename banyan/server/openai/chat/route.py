"""/v1/chat/completions: messages in, one answer or a stream of deltas out."""

from contextlib import aclosing

from banyan.base.errors import RequestError
from banyan.requests.generation import at_once, run
from banyan.server.errors import Json
from banyan.server.http.event_writer import follow
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.chat.answer import ChatAnswer
from banyan.server.openai.chat.plan import ChatPlan, plan_chat
from banyan.server.openai.fields import (
    Origin,
    in_openai_words,
    origin_of,
    read_fields,
)
from banyan.server.openai.lora import model_and_adapters
from banyan.server.openai.schema import ChatRequest
from banyan.server.openai.shapes import Extension
from banyan.server.state import ServerState, Service


async def chat_completions(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit_to_queue(exchange.context.id)
    server = state.config.server
    report = exchange.context.warn_or_refuse

    def read(raw: Json) -> tuple[ChatRequest, str, Origin, ChatPlan]:
        request = read_fields(raw, ChatRequest, exchange.context)
        asked = (request.model, state, exchange.context, request.lora_path)
        model, adapters = model_and_adapters(*asked, 1)
        origin = origin_of(exchange.context, request, "chat", adapters)
        try:
            return request, model, origin, plan_chat(service, raw, request, origin, report)
        except RequestError as error:
            raise in_openai_words(error) from None

    request, model, origin, plan = await exchange.read(read, waits=True)
    extension = Extension(request, state.config.cache.store)
    options = request.stream_options
    told = (server.cache_report, extension, bool(options and options.continuous_usage_stats))
    answer = ChatAnswer(service, origin.rid, plan, model, *told)
    with state.open.holding(plan.asked, exchange.context.tenant):
        if request.stream:
            await _stream(exchange, service, request, answer, plan)
        else:
            async with aclosing(run(service.generator, at_once(plan.asked))) as chunks:
                async for index, chunk in chunks:
                    answer.keep(index, chunk)
            await exchange.json(answer.whole())


async def _stream(
    exchange: HttpExchange,
    service: Service,
    request: ChatRequest,
    answer: ChatAnswer,
    plan: ChatPlan,
) -> None:
    options = request.stream_options
    async with aclosing(run(service.generator, plan.asked)) as chunks:
        await follow(exchange, chunks, answer.frames)
    for body in answer.last():
        await exchange.event(body)
    if options and options.include_usage:
        await exchange.event(answer.total())
    await exchange.end_events()
