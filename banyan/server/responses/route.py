"""/v1/responses: the Responses API over the path of chat, with a bounded store in memory.

A response runs while its client listens; in the background it runs on its own, and its client
polls, or follows its stream.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import orjson

from banyan.base.errors import RequestError
from banyan.base.log import logger
from banyan.chat_template.template import ChatTemplate
from banyan.requests.generation import run
from banyan.requests.request_spec import RequestContext
from banyan.server.errors import Json, internal
from banyan.server.http.dialect import RESPONSES
from banyan.server.http.exchange import HttpExchange, read_prompt
from banyan.server.http.route import Body, Route
from banyan.server.openai.chat_plan import ChatPlan, chat_prompt, plan_chat
from banyan.server.openai.files import listed, page
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
from banyan.server.responses.answer import ResponseAnswer
from banyan.server.responses.tools import (
    MAX_CALLS,
    MAX_TURNS,
    Offered,
    ServerCalls,
    first_listings,
    offered_tools,
)
from banyan.server.responses.translate import (
    FIELD_NAMES,
    HARMLESS,
    MEMBERS,
    REFUSED,
    PromptRequest,
    Reasoning,
    ResponsesRequest,
    TextForm,
    chat_body,
    given_items,
)
from banyan.server.state import ServerState, Service
from banyan.server.store.responses import StoredResponse

R = TypeVar("R", bound=PromptRequest)

log = logger(__name__)

_PAGE = 20
_ID = re.compile(r"resp_[\w-]{1,64}", re.ASCII)
_ON = ("true", "1")


@dataclass(frozen=True)
class Running:
    """One response in progress: the turns of the model, and between them the calls of tool servers.

    Attributes:
        plan: of the first turn.
        plan_turn: of each turn after that; takes the request as it is for this turn, and the
            output items so far.
        calls: answers what is called of tool servers.
        over: called before the last event is seen.
    """

    service: Service
    request: ResponsesRequest
    plan: ChatPlan
    plan_turn: Callable[[ResponsesRequest, list[Json]], Awaitable[ChatPlan]]
    calls: ServerCalls
    answer: ResponseAnswer
    over: Callable[[], None]

    async def events(self) -> AsyncGenerator[Json, None]:
        """The events of the response; RequestError when it fails."""
        answer, plan, num_turns = self.answer, self.plan, 0
        try:
            while True:
                async with aclosing(run(self.service.generator, plan.asked)) as chunks:
                    async for _, chunk in chunks:
                        begun = [] if answer.has_begun else answer.begin()
                        for event in self._seen([*begun, *answer.events(chunk)]):
                            yield event
                if answer.is_over:
                    return
                for index, item in answer.output.calls():
                    for event in answer.answered(index, await self.calls.outcome(item)):
                        yield event
                if reason := self._reason_to_end():
                    for event in self._seen(answer.end(reason)):
                        yield event
                    return
                num_turns += 1
                plan = await self.plan_turn(self._rest(num_turns), answer.output.so_far())
                answer.turn(plan)
        finally:
            await self.calls.close()

    def fail(self, error: RequestError) -> list[Json]:
        """The events that end a response which cannot be completed."""
        return self._seen(self.answer.fail(error))

    def _seen(self, events: list[Json]) -> list[Json]:
        if self.answer.is_over:
            self.over()
        return events

    def _reason_to_end(self) -> str:
        """Why no turn follows the calls; "" if one does."""
        if self.answer.needs_client:
            return "stop"
        left = self._tokens_left()
        return "length" if left is not None and left <= 0 else ""

    def _tokens_left(self) -> int | None:
        longest = self.request.max_output_tokens
        return None if longest is None else longest - self.answer.output_tokens

    def _rest(self, num_turns: int) -> ResponsesRequest:
        """The request for the next turn, which no longer has to call a tool."""
        may_call = num_turns < MAX_TURNS and self.calls.limit > 0
        return msgspec.structs.replace(
            self.request,
            tool_choice="auto" if may_call else "none",
            max_output_tokens=self._tokens_left(),
        )


@dataclass(frozen=True)
class _Asked:
    """A parsed request: the items it continues, its own items, and its tools."""

    request: ResponsesRequest
    model: str
    adapter: str
    before: list[Json]
    given: list[Json]
    offered: Offered


async def create(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit_to_queue(exchange.context.id)
    server = state.config.server
    report = _reporter(exchange.context)

    def plan_turn(
        asked: _Asked, request: ResponsesRequest, written: list[Json], report: Report
    ) -> ChatPlan:
        items = [*asked.before, *asked.given, *written]
        try:
            body = chat_body(request, items, asked.offered, _template(service), report)
            chat = typed(body, ChatRequest)
            return plan_chat(
                exchange.context, service, body, chat, "responses", asked.adapter, report
            )
        except RequestError as error:
            raise with_names(error, FIELD_NAMES) from None

    def read(raw: Json) -> tuple[_Asked, ChatPlan]:
        request = _read(raw, ResponsesRequest, report)
        model, adapter = model_and_adapter(request.model, state, exchange.context)
        before, given = _before(request, exchange.context, state), given_items(request.input)
        offered = offered_tools(request.tools or [], state.tool_servers, report)
        asked = _Asked(request, model, adapter, before, given, offered)
        return asked, plan_turn(asked, request, [], report)

    asked, plan = await read_prompt(exchange, read, service.media)
    request, model, before, given = asked.request, asked.model, asked.before, asked.given
    offered = asked.offered

    async def plan_later(request: ResponsesRequest, written: list[Json]) -> ChatPlan:
        return await asyncio.to_thread(plan_turn, asked, request, written, _reported_before)

    id = _fresh_id(request, exchange.context, state)
    listings = first_listings(offered, [*before, *given])
    answer = ResponseAnswer(
        service, plan, request, offered, listings, id, model, server.cache_report
    )
    stored = StoredResponse(answer.body, id, given, before, exchange.context.tenant)

    def over() -> None:
        final = answer.body()
        stored.show = lambda: final
        if request.store is not False:
            state.responses.keep(stored)

    calls = ServerCalls(offered, MAX_CALLS)
    if request.max_tool_calls is not None:
        calls.limit = min(MAX_CALLS, request.max_tool_calls)
    running = Running(service, request, plan, plan_later, calls, answer, over)
    if request.background:
        await _in_background(exchange, state, running, stored, bool(request.stream))
        return
    with state.open.holding(plan.asked, exchange.context.tenant):
        if request.stream:
            await _stream(exchange, running)
        else:
            async with aclosing(running.events()) as events:
                async for _ in events:
                    pass
            await exchange.json(stored.show())


async def one(exchange: HttpExchange, state: ServerState) -> None:
    """One stored response: show it, follow it, delete it, cancel it, or list its input."""
    id, _, verb = exchange.request.tail.partition("/")
    if verb not in ("", "input_items", "cancel") or (exchange.request.method == "POST") != (
        verb == "cancel"
    ):
        raise RequestError(
            f"no route below a response: {verb[:40]!r}", status=404, code="not_found"
        )
    found = state.responses.find(id, exchange.context.tenant)
    if exchange.request.method == "POST":
        await exchange.json(await _cancel(found))
    elif exchange.request.method == "DELETE":
        await _end(found)
        state.responses.remove(id, exchange.context.tenant)
        await exchange.json({"id": id, "object": "response", "deleted": True})
    elif verb:
        shown, has_more = page(
            found.given, exchange.request.query, lambda item: str(item["id"]), _PAGE
        )
        await exchange.json(listed(shown, has_more))
    elif exchange.request.query.get("stream") in _ON:
        await _follow(exchange, found, exchange.request.query.get("starting_after"))
    else:
        await exchange.json(found.show())


async def input_tokens(exchange: HttpExchange, state: ServerState) -> None:
    """The length of a prompt, counted and not run."""
    service = state.admit()
    report = _reporter(exchange.context)

    def read(raw: Json) -> list[int]:
        request = _read(raw, PromptRequest, report)
        model_and_adapter(request.model, state, exchange.context)
        items = [*_before(request, exchange.context, state), *given_items(request.input)]
        offered = offered_tools(request.tools or [], state.tool_servers, report)
        chat = typed(chat_body(request, items, offered, _template(service), report), ChatRequest)
        return chat_prompt(exchange.context, service, chat, report)[0].ids

    ids = await read_prompt(exchange, read, service.media)
    await exchange.json({"object": "response.input_tokens", "input_tokens": len(ids)})


def responses_routes() -> list[Route]:
    return [
        Route(
            "/v1/responses",
            ("POST",),
            create,
            dialect=RESPONSES,
            about="Create a response; kept unless store is false",
            body=Body(ResponsesRequest),
        ),
        Route(
            "/v1/responses/input_tokens",
            ("POST",),
            input_tokens,
            dialect=RESPONSES,
            about="Count the input tokens of a response",
            body=Body(PromptRequest),
        ),
        Route(
            "/v1/responses/",
            ("GET", "POST", "DELETE"),
            one,
            dialect=RESPONSES,
            about="Get, cancel or delete a stored response",
            below={
                "{response_id}": ("GET", "DELETE"),
                "{response_id}/cancel": ("POST",),
                "{response_id}/input_items": ("GET",),
            },
        ),
    ]


def _reporter(context: RequestContext) -> Report:
    def report(field: str, why: str) -> None:
        context.warn_or_refuse(FIELD_NAMES.get(field, field), why)

    return report


def _reported_before(field: str, why: str) -> None:
    """Ignore the report: the first turn made it."""


def _read(raw: Json, kind: type[R], report: Report) -> R:
    """The typed request; every field of the body is honoured, refused or reported."""
    try:
        orjson.dumps(raw)
    except TypeError as error:
        raise RequestError(f"the response could not show the request: {error}") from None
    account_for(raw, kind.__struct_fields__, REFUSED, HARMLESS, report)
    account_for_members(raw, {"reasoning": Reasoning, "text": TextForm}, (), report)
    for path in unread_members({name: raw.get(name) for name in MEMBERS}, MEMBERS):
        report(path, "the model is not shown it")
    return typed(raw, kind)


def _fresh_id(request: ResponsesRequest, context: RequestContext, state: ServerState) -> str:
    """The id of a new response: the `request_id`, where it has an id's form, or one of ours."""
    given = request.request_id or ""
    if not _ID.fullmatch(given):
        return f"resp_{context.id}"
    if state.responses.has(given, context.tenant):
        raise RequestError(f"there is a response {given!r} already", param="request_id")
    return given


def _template(service: Service) -> ChatTemplate | None:
    return service.chat.template if service.chat else None


def _before(request: PromptRequest, context: RequestContext, state: ServerState) -> list[Json]:
    """The items of the conversation that the request continues."""
    if not request.previous_response_id:
        return []
    id = request.previous_response_id
    found = state.responses.find(id, context.tenant, "previous_response_id")
    if not found.is_over:
        raise RequestError(
            f"the response {found.id} is still {found.status}",
            param="previous_response_id",
            status=409,
            code="response_not_over",
        )
    return found.conversation


async def _stream(exchange: HttpExchange, running: Running) -> None:
    """Send the events of a response, whose last says how it ended."""
    try:
        async with aclosing(running.events()) as events:
            async for event in events:
                if not exchange.streaming:
                    await exchange.begin_events()
                await exchange.event(event)
    except RequestError as error:
        if not exchange.streaming:
            raise
        await _send_all(exchange, running.fail(error))
    except asyncio.CancelledError:
        if isinstance(exchange.ending, RequestError) and exchange.streaming:
            await _send_all(exchange, running.fail(exchange.ending))
            await exchange.end_events()
        raise
    await exchange.end_events()


async def _send_all(exchange: HttpExchange, events: list[Json]) -> None:
    for event in events:
        await exchange.event(event)


async def _in_background(
    exchange: HttpExchange,
    state: ServerState,
    running: Running,
    stored: StoredResponse,
    is_streamed: bool,
) -> None:
    """Start a response that runs on its own, and answer with its beginning."""
    stored.events = [] if is_streamed else None
    state.responses.keep(stored)
    stored.work = asyncio.create_task(_work(exchange.context.id, state, running, stored))
    if is_streamed:
        await _follow(exchange, stored, None)
    else:
        await exchange.json(stored.show())


async def _work(id: str, state: ServerState, running: Running, stored: StoredResponse) -> None:
    """Run a response to its end, whatever that is."""

    def take(event: Json) -> None:
        if stored.events is not None:
            stored.events.append(event)
        stored.news.set()

    try:
        with state.open.holding(running.plan.asked, stored.owner):
            async with aclosing(running.events()) as events:
                async for event in events:
                    take(event)
    except asyncio.CancelledError:
        running.answer.cancel()
        running.over()
    except RequestError as error:
        for event in running.fail(error):
            take(event)
    except Exception:
        log.exception("response failed id=%s", stored.id)
        for event in running.fail(internal(id)):
            take(event)
    stored.news.set()


async def _follow(exchange: HttpExchange, stored: StoredResponse, after: str | None) -> None:
    """Send the events of a background response, past ones first, until it is over."""
    if stored.events is None:
        raise RequestError(
            "only a background response that was created with stream: true can be streamed again",
            param="stream",
        )
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise RequestError("starting_after must be a sequence number", param="starting_after")
    next_ = 0 if after is None else int(after) + 1
    await exchange.begin_events()
    while True:
        stored.news.clear()
        while next_ < len(stored.events):
            await exchange.event(stored.events[next_])
            next_ += 1
        if stored.is_over and next_ >= len(stored.events):
            break
        await stored.news.wait()
    await exchange.end_events()


async def _cancel(stored: StoredResponse) -> Json:
    if stored.work is None:
        raise RequestError(
            "only a response in the background can be cancelled; "
            "closing the connection ends the others",
            param="response_id",
        )
    await _end(stored)
    return stored.show()


async def _end(stored: StoredResponse) -> None:
    """End what still runs in the background."""
    if stored.work is not None and not stored.is_over:
        stored.work.cancel()
        await asyncio.gather(stored.work, return_exceptions=True)
