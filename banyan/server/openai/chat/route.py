"""/v1/chat/completions: messages in, one answer or a stream of deltas out."""

from contextlib import aclosing

from banyan.base.errors import RequestError
from banyan.requests.generation import run, unstreamed
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange, follow
from banyan.server.openai.chat.answer import ChatAnswer
from banyan.server.openai.chat.plan import ChatPlan, plan_chat
from banyan.server.openai.fields import (
    read_fields,
    with_openai_names,
)
from banyan.server.openai.models import model_and_adapters
from banyan.server.openai.schema import ChatRequest
from banyan.server.openai.shapes import Extension
from banyan.server.state import ServerState, Service


async def chat_completions(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit_to_queue(exchange.context.id)
    server = state.config.server
    context = exchange.context
    report = context.warn_or_refuse

    def read(raw: Json) -> tuple[ChatRequest, str, ChatPlan]:
        request = read_fields(raw, ChatRequest, context)
        model, adapters = model_and_adapters(request.model, state, context, request.lora_path, 1)
        adapter = adapters[0] if adapters else ""
        try:
            plan = plan_chat(context, service, raw, request, "chat", adapter, report)
            return request, model, plan
        except RequestError as error:
            raise with_openai_names(error) from None

    request, model, plan = await exchange.request.read(read, waits=True)
    extension = Extension(request, state.config.cache.store)
    options = request.stream_options
    answer = ChatAnswer(
        service,
        request.rid or context.id,
        plan,
        model,
        server.cache_report,
        extension,
        bool(options and options.continuous_usage_stats),
    )
    with state.open.holding(plan.asked, exchange.context.tenant):
        if request.stream:
            await _stream(exchange, service, request, answer, plan)
        else:
            async with aclosing(run(service.generator, unstreamed(plan.asked))) as chunks:
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
