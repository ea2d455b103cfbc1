"""/v1/messages and /v1/messages/count_tokens: the Messages API over the path of chat."""

from contextlib import aclosing
from typing import TypeVar

from banyan.base.errors import RequestError
from banyan.requests.generation import run
from banyan.requests.request_spec import RequestContext
from banyan.server.anthropic.answer import MessageAnswer
from banyan.server.anthropic.schema import (
    BLOCKS,
    HARMLESS,
    HARMLESS_MEMBERS,
    MEMBERS,
    REFUSED,
    CountRequest,
    MessagesRequest,
)
from banyan.server.anthropic.translate import FIELD_NAMES, chat_body
from banyan.server.errors import Json
from banyan.server.http.dialect import ANTHROPIC
from banyan.server.http.exchange import HttpExchange, read_prompt
from banyan.server.http.route import Body, Route
from banyan.server.openai.chat_plan import ChatPlan, chat_prompt, plan_chat
from banyan.server.openai.models import model_and_adapter
from banyan.server.openai.schema import (
    ChatRequest,
    Report,
    account_for,
    account_for_members,
    typed,
    unread_members,
    with_names,
)
from banyan.server.state import ServerState

R = TypeVar("R", bound=CountRequest)


async def messages(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit_to_queue(exchange.context.id)
    server = state.config.server
    context = exchange.context
    report = _reporter(context)

    def read(raw: Json) -> tuple[MessagesRequest, str, ChatPlan]:
        request = _read(raw, MessagesRequest, report)
        model, adapter = model_and_adapter(request.model, state, exchange.context)
        try:
            body = chat_body(request, service.chat and service.chat.template, report)
            chat = typed(body, ChatRequest)
            plan = plan_chat(
                context, service, body, chat, "messages", adapter, report, may_shorten=True
            )
        except RequestError as error:
            raise with_names(error, FIELD_NAMES) from None
        return request, model, plan

    request, model, plan = await read_prompt(exchange, read, service.media)
    answer = MessageAnswer(
        plan,
        f"msg_{exchange.context.id}",
        model,
        request.max_tokens,
        request.thinking is not None and request.thinking.display == "omitted",
        server.cache_report,
    )
    with state.open.holding(plan.asked, exchange.context.tenant):
        async with aclosing(run(service.generator, plan.asked)) as chunks:
            if not request.stream:
                await exchange.json(answer.whole([chunk async for _, chunk in chunks]))
                return
            async for _, chunk in chunks:
                if not exchange.streaming:
                    await exchange.begin_events()
                    for event in answer.first(chunk):
                        await exchange.event(event)
                for event in answer.events(chunk):
                    await exchange.event(event)
        await exchange.end_events()


async def count_tokens(exchange: HttpExchange, state: ServerState) -> None:
    """The length of a prompt, counted and not run."""
    service = state.admit()
    report = _reporter(exchange.context)

    def read(raw: Json) -> list[int]:
        request = _read(raw, CountRequest, report)
        model_and_adapter(request.model, state, exchange.context)
        body = chat_body(request, service.chat and service.chat.template, report)
        return chat_prompt(exchange.context, service, typed(body, ChatRequest), report)[0].ids

    ids = await read_prompt(exchange, read, service.media)
    await exchange.json({"input_tokens": len(ids)})


def _reporter(context: RequestContext) -> Report:
    def report(field: str, why: str) -> None:
        context.warn_or_refuse(FIELD_NAMES.get(field, field), why)

    return report


def _read(raw: Json, kind: type[R], report: Report) -> R:
    """The typed request; every field of the body is honoured, refused or reported."""
    account_for(raw, kind.__struct_fields__, REFUSED, HARMLESS, report)
    account_for_members(raw, MEMBERS, HARMLESS_MEMBERS, report)
    for path in unread_members({name: raw.get(name) for name in BLOCKS}, BLOCKS):
        report(path, "the model is not shown it")
    return typed(raw, kind)


def anthropic_routes() -> list[Route]:
    return [
        Route(path, ("POST",), handler, dialect=ANTHROPIC, about=about, body=Body(kind))
        for path, handler, about, kind in (
            ("/v1/messages", messages, "Create a message", MessagesRequest),
            (
                "/v1/messages/count_tokens",
                count_tokens,
                "Count input tokens",
                CountRequest,
            ),
        )
    ]
