"""/v1/messages and /v1/messages/count_tokens: the Messages API over the path of chat.

An answer is a message of blocks: text, thinking and tool use, one after another. A whole message
is what its events add up to.
"""

from collections.abc import Mapping
from contextlib import aclosing
from typing import TypeVar, cast

import orjson

from banyan.base.errors import RequestError
from banyan.parsers.answer_deltas import (
    AnswerDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_deltas,
)
from banyan.requests.generation import Finish, TextChunk, Usage, run
from banyan.requests.request_spec import RequestContext
from banyan.server.anthropic.translate import (
    BLOCKS,
    FIELD_NAMES,
    HARMLESS,
    HARMLESS_MEMBERS,
    MEMBERS,
    REFUSED,
    CountRequest,
    MessagesRequest,
    chat_body,
    signature,
)
from banyan.server.errors import Json
from banyan.server.http.dialect import ANTHROPIC
from banyan.server.http.exchange import HttpExchange, read_prompt
from banyan.server.http.route import Body, Route
from banyan.server.openai.chat_completions import ChatChoice
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
from banyan.server.openai.shapes import why_no_more
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


PING: Json = {"type": "ping"}

_REASONS: Mapping[str | None, str] = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
}
_TEXT, _THINKING, _TOOL = "text", "thinking", "tool_use"


class Blocks:
    """Content blocks as they are written, each closed before the next begins.

    Args:
        choice: names the calls.
        hides_thinking: blocks of thinking are empty but for their signature.
    """

    def __init__(self, choice: ChatChoice, hides_thinking: bool) -> None:
        self._choice = choice
        self._hides_thinking = hides_thinking
        self._open = ""
        self._index = -1
        self._space = ""
        """Blank text before a block of text, held until visible text follows."""
        self._hidden: list[str] = []

    def take(self, part: AnswerDelta) -> list[Json]:
        """The events of one part of the answer."""
        match part:
            case TextDelta(text):
                return self._said(text)
            case ReasoningDelta(text):
                begun = self._begin(_THINKING, {"thinking": "", "signature": ""})
                if self._hides_thinking:
                    self._hidden.append(text)
                    return begun
                return [*begun, self._delta({"type": "thinking_delta", "thinking": text})]
            case ToolCallStart(_, name, id):
                tool = {"id": self._choice.call_id(id), "name": name, "input": {}}
                return [*self.end(), *self._begin(_TOOL, tool)]
            case ToolCallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def end(self) -> list[Json]:
        """Close the open block, if any."""
        if not self._open:
            return []
        events: list[Json] = []
        if self._open == _THINKING:
            signed = signature("".join(self._hidden))
            events.append(self._delta({"type": "signature_delta", "signature": signed}))
        self._open, self._space, self._hidden = "", "", []
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _said(self, text: str) -> list[Json]:
        if self._open != _TEXT and not text.strip():
            self._space += text
            return []
        text, self._space = self._space + text, ""
        begun = self._begin(_TEXT, {"text": "", "citations": None})
        return [*begun, self._delta({"type": "text_delta", "text": text})]

    def _begin(self, kind: str, empty: Json) -> list[Json]:
        """Open a block of this kind, unless one is open."""
        if self._open == kind:
            return []
        ended = self.end()
        self._open, self._space = kind, ""
        self._index += 1
        block = {"type": kind, **empty}
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*ended, start]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class MessageAnswer:
    """The bodies of one request's answer.

    Args:
        max_tokens: as the client asked; the plan may hold less, where the context is shorter.
        with_cache: report cached prompt tokens (--enable-cache-report).
    """

    def __init__(
        self,
        plan: ChatPlan,
        id: str,
        model: str,
        max_tokens: int,
        hides_thinking: bool,
        with_cache: bool,
    ) -> None:
        self._choice = ChatChoice(plan)
        self._blocks = Blocks(self._choice, hides_thinking)
        self._id = id
        self._model = model
        self._is_shortened = plan.asked[0].sampling.max_new_tokens < max_tokens
        self._with_cache = with_cache

    def whole(self, chunks: list[TextChunk]) -> Json:
        """The whole message of all chunks."""
        parts = merge_deltas([part for chunk in chunks for part in self._choice.read(chunk)])
        events = [event for part in parts for event in self._blocks.take(part)]
        last = self._end(chunks[-1])
        return {
            **self._head(chunks[-1].usage),
            "content": _content([*events, *self._blocks.end()]),
            **cast(Json, last["delta"]),
            "usage": self._usage(chunks[-1].usage),
        }

    def first(self, chunk: TextChunk) -> list[Json]:
        """The events before any content."""
        return [{"type": "message_start", "message": self._head(chunk.usage)}, PING]

    def events(self, chunk: TextChunk) -> list[Json]:
        """The events of one chunk, with the end of the message."""
        found = [e for part in self._choice.read(chunk) for e in self._blocks.take(part)]
        if chunk.finish is None:
            return found
        return [*found, *self._blocks.end(), self._end(chunk), {"type": "message_stop"}]

    def _end(self, chunk: TextChunk) -> Json:
        reason, sequence = self._stop(chunk.finish)
        return {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self._usage(chunk.usage),
        }

    def _stop(self, finish: Finish | None) -> tuple[str, str | None]:
        """stop_reason and stop_sequence."""
        matched = finish.matched if finish else None
        if isinstance(matched, str):
            return "stop_sequence", matched
        reason = self._choice.reason(finish)
        if reason not in _REASONS:
            raise RequestError("the request was aborted", status=500, code="aborted")
        if reason == "length" and self._is_shortened:
            return "model_context_window_exceeded", None
        return _REASONS[reason], None

    def _head(self, usage: Usage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Json:
        """Counts so far; input_tokens without cached ones, if these are reported."""
        cached = usage.cached_tokens if self._with_cache else None
        thinking = self._choice.reasoning_tokens
        return {
            "input_tokens": usage.prompt_tokens - (cached or 0),
            "cache_creation_input_tokens": None if cached is None else 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"thinking_tokens": thinking} if thinking else None,
            **(why_no_more(usage) if self._with_cache else {}),
        }


def _content(events: list[Json]) -> list[Json]:
    """The content blocks of these events."""
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(cast(Json, event["content_block"])))
        elif event["type"] == "content_block_delta":
            for name, value in cast(Json, event["delta"]).items():
                if name == "partial_json":
                    blocks[-1]["input"] = _arguments(cast(str, value))
                elif name != "type":
                    blocks[-1][name] = value
    return blocks


def _arguments(text: str) -> Json:
    """The arguments of a call; {} for a call that was cut off."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
