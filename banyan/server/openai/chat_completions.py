"""/v1/chat/completions: messages in, one answer or a stream of deltas out."""

import os
import time
from contextlib import aclosing

from banyan.base.errors import RequestError
from banyan.parsers.answer_deltas import (
    AnswerDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from banyan.parsers.answer_parser import AnswerParser, ReasoningTokenCounter
from banyan.requests.generation import Arrival, Finish, TextChunk, TokenScore, run, unstreamed
from banyan.server.errors import Json
from banyan.server.http.dialect import OPENAI, FrameTemplate
from banyan.server.http.exchange import HttpExchange, follow, read_prompt
from banyan.server.openai.chat_plan import ChatPlan, plan_chat
from banyan.server.openai.custom_tools import CUSTOM, INPUT, CustomCalls
from banyan.server.openai.models import model_and_adapters
from banyan.server.openai.schema import (
    ChatRequest,
    read_fields,
    with_openai_names,
)
from banyan.server.openai.shapes import (
    Extension,
    UsageCount,
    chat_logprobs,
    finish_reason,
    hidden_states,
    matched_stop,
)
from banyan.server.state import ServerState, Service


class ChatChoice:
    """One choice as it arrives: its parser and its counts."""

    def __init__(self, plan: ChatPlan) -> None:
        self._parser = AnswerParser(plan.form)
        self._thinking = ReasoningTokenCounter(plan.thinking_end)
        names = plan.form.offered.custom
        self.custom = CustomCalls(names) if names else None
        self._id_chars = plan.form.tools.id_chars if plan.form.tools else 0
        self._ids: dict[str, None] = {}
        self.parts: list[AnswerDelta] = []
        self.scores: list[TokenScore] = []
        self.finish: Finish | None = None
        self.hidden: Json = {}
        self.is_open = False
        self.templates: dict[type[AnswerDelta], FrameTemplate] = {}
        """Templates of the events that have only text."""

    def read(self, chunk: TextChunk) -> list[AnswerDelta]:
        """The parts that a chunk makes final."""
        parts = self._parser.feed(chunk.text)
        self._thinking.add(chunk.tokens, self._parser.has_answered)
        if chunk.finish is not None:
            parts += self._parser.finish(_is_cut(chunk.finish))
        if self.custom is None:
            return parts
        return self.custom.merged(parts, chunk.finish is not None)

    @property
    def reasoning_tokens(self) -> int:
        return self._thinking.count if self._parser.has_reasoning else 0

    def reason(self, finish: Finish | None) -> str | None:
        """finish_reason; "tool_calls" if the model stopped by itself after calls."""
        found = finish_reason(finish)
        return "tool_calls" if found == "stop" and self._parser.num_calls else found

    def call_id(self, given: str) -> str:
        """The model's own id of a call, or a new one if it has none or repeats one."""
        if not given or given in self._ids:
            fresh = os.urandom(12).hex()
            given = fresh[: self._id_chars] if self._id_chars else f"call_{fresh}"
        self._ids[given] = None
        return given


class ChatAnswer:
    """The bodies of one request's answer.

    Args:
        counts_along: every event of a stream has the usage so far.
    """

    def __init__(
        self,
        service: Service,
        rid: str,
        plan: ChatPlan,
        model: str,
        with_cache: bool,
        extension: Extension,
        counts_along: bool = False,
    ) -> None:
        self._counts_along = counts_along
        num_choices = len(plan.asked)
        self.usage = UsageCount(num_choices, num_choices, with_cache)
        self._extension = extension
        self._service = service
        self._top = plan.top
        self._choices = [ChatChoice(plan) for _ in range(num_choices)]
        self._id = rid
        self._model = model
        self._created = int(time.time())

    def keep(self, index: int, chunk: TextChunk) -> None:
        """Take one chunk of an answer that is not streamed."""
        choice = self._choices[index]
        choice.parts += choice.read(chunk)
        choice.scores += chunk.output_scores
        choice.finish = chunk.finish
        choice.hidden = hidden_states(chunk)
        self._extension.take(chunk)
        self.usage.take(index, chunk.usage, choice.reasoning_tokens)

    def whole(self) -> Json:
        """The body of an answer that is not streamed."""
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": self.usage.total(),
            **self._extension.echoed,
            **self._extension.of(self.usage),
        }

    def frames(self, arrival: Arrival) -> bytes:
        """The events of one chunk, with the beginning and end of its choice."""
        index, chunk = arrival
        choice = self._choices[index]
        parts = choice.read(chunk)
        self.usage.take(index, chunk.usage, choice.reasoning_tokens)
        if choice.is_open and not (chunk.output_scores or chunk.finish):
            if len(parts) == 1:  # as nearly always
                return self._part(index, choice, parts[0], None)
        elif not parts and chunk.output_scores:
            parts = [TextDelta("")]
        logprobs = self._logprobs(chunk.output_scores)
        frames = []
        if not choice.is_open:
            choice.is_open = True
            delta: Json = {"role": "assistant", "content": "", "reasoning_content": None}
            frames.append(self._frame(index, self._chunk(index, delta)))
        for part in parts:
            frames.append(self._part(index, choice, part, logprobs))
            logprobs = None
        if chunk.finish is not None:
            frames.append(self._frame(index, self._last(index, choice, chunk.finish)))
        if chunk.hidden:
            delta = {"content": None, "reasoning_content": None, **hidden_states(chunk)}
            frames.append(self._frame(index, self._chunk(index, delta)))
        self._extension.take(chunk)
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _part(
        self, index: int, choice: ChatChoice, part: AnswerDelta, logprobs: Json | None
    ) -> bytes:
        if (
            logprobs is not None
            or self._counts_along
            or not isinstance(part, TextDelta | ReasoningDelta)
        ):
            return self._frame(index, self._chunk(index, _delta(part, choice), logprobs))
        template = choice.templates.get(type(part))
        if template is None:
            delta = _delta(type(part)(FrameTemplate.GAP), choice)
            template = choice.templates[type(part)] = FrameTemplate(
                OPENAI.frame(self._chunk(index, delta))
            )
        return template.fill(part.text)

    def _frame(self, index: int, body: Json) -> bytes:
        if self._counts_along:
            body["usage"] = self.usage.of(index)
        return OPENAI.frame(body)

    def last(self) -> list[Json]:
        """The `sglext` event after all choices, if it was requested."""
        extra = self._extension.of(self.usage)
        head = self._head("chat.completion.chunk")
        return [{**head, "choices": [], "usage": None, **extra}] if extra else []

    def total(self) -> Json:
        return {
            **self._head("chat.completion.chunk"),
            "choices": [],
            "usage": self.usage.total(),
        }

    def _last(self, index: int, choice: ChatChoice, finish: Finish) -> Json:
        """The event that closes a choice."""
        delta: Json = {"content": None, "reasoning_content": None}
        body = self._chunk(index, delta, None, choice.reason(finish), matched_stop(finish))
        return {**body, **self._extension.echoed}

    def _choice(self, index: int, choice: ChatChoice) -> Json:
        return {
            "index": index,
            "message": _message(choice.parts, choice),
            "logprobs": self._logprobs(choice.scores),
            "finish_reason": choice.reason(choice.finish),
            "matched_stop": matched_stop(choice.finish),
            **choice.hidden,
        }

    def _chunk(
        self,
        index: int,
        delta: Json,
        logprobs: Json | None = None,
        reason: object = None,
        matched: object = None,
    ) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
            "matched_stop": matched,
        }
        return {**self._head("chat.completion.chunk"), "choices": [choice], "usage": None}

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _logprobs(self, scores: list[TokenScore]) -> Json | None:
        if self._top is None:
            return None
        return chat_logprobs(self._service.required_tokenizer(), scores, self._top)


def _is_cut(finish: Finish) -> bool:
    """Whether the model was stopped: by a length, an abort or a stop text."""
    return finish.reason != "stop" or isinstance(finish.matched, str)


def _delta(part: AnswerDelta, choice: ChatChoice) -> Json:
    match part:
        case TextDelta(text):
            return {"content": text, "reasoning_content": None}
        case ReasoningDelta(text):
            return {"content": None, "reasoning_content": text}
        case ToolCallStart(index):
            call = {"index": index, **_call(choice, part, "")}
        case ToolCallArguments(index, text):
            is_custom = choice.custom is not None and index in choice.custom.indices
            call = {"index": index}
            call |= {CUSTOM: {INPUT: text}} if is_custom else {"function": {"arguments": text}}
    return {"content": None, "reasoning_content": None, "tool_calls": [call]}


def _call(choice: ChatChoice, start: ToolCallStart, text: str) -> Json:
    """A call; `text` is its arguments, or the input of a custom tool."""
    head = {"id": choice.call_id(start.id)}
    if choice.custom is not None and start.index in choice.custom.indices:
        return {**head, "type": CUSTOM, CUSTOM: {"name": start.name, INPUT: text}}
    return {**head, "type": "function", "function": {"name": start.name, "arguments": text}}


def _message(parts: list[AnswerDelta], choice: ChatChoice) -> Json:
    said = "".join(p.text for p in parts if isinstance(p, TextDelta))
    thought = "".join(p.text for p in parts if isinstance(p, ReasoningDelta))
    calls = []
    for start in (p for p in parts if isinstance(p, ToolCallStart)):
        own = (p.text for p in parts if isinstance(p, ToolCallArguments) and p.index == start.index)
        calls.append(_call(choice, start, "".join(own)))
    return {
        "role": "assistant",
        "content": said if said or not (thought or calls) else None,
        "reasoning_content": thought or None,
        "tool_calls": calls or None,
    }


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

    request, model, plan = await read_prompt(exchange, read, service.media)
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
