"""/v1/chat/completions: messages in, one answer or a stream of deltas out."""

import time
from contextlib import aclosing

from banyan.base.errors import RequestError
from banyan.frontend.generation import ScoreOptions, TextChunk, TextRequest, collect, run
from banyan.frontend.sampling import fit_prompt, parse_sampling
from banyan.messages.requests import NO_SCORES
from banyan.server.errors import Json
from banyan.server.exchange import Exchange
from banyan.server.openai.fields import (
    Origin,
    check_model,
    in_openai_words,
    native_sampling,
    origin_of,
    read_fields,
    sequences,
)
from banyan.server.openai.schema import ChatRequest
from banyan.server.openai.shapes import (
    UsageCount,
    chat_logprobs,
    finish_reason,
    matched_stop,
)
from banyan.server.prompts import Conversation, chat_ids, checked_ids
from banyan.server.state import ServerState, Service

MAX_TOP_LOGPROBS = 20


async def chat_completions(exchange: Exchange, state: ServerState) -> None:
    service = state.admit()
    server = state.config.server
    raw = await exchange.json_object()
    request = read_fields(raw, ChatRequest, exchange, server.strict_requests)
    model = check_model(request.model, state.served_name, exchange.warn, server.strict_requests)
    top = _top_logprobs(request)
    origin = origin_of(exchange, request, "chat")
    try:
        asked = await _sequences(service, raw, request, origin, top)
    except RequestError as error:
        raise in_openai_words(error) from None
    answer = ChatAnswer(service, origin.rid, len(asked), model, top, server.cache_report)
    with state.open.holding(asked):
        if request.stream:
            await _stream(exchange, service, request, answer, asked)
        else:
            chunks = await collect(service.generator, asked)
            await exchange.json(answer.whole(chunks))


async def _sequences(
    service: Service, raw: Json, request: ChatRequest, origin: Origin, top: int | None
) -> list[TextRequest]:
    ids = fit_prompt(await _prompt(service, request), service.limits)
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    if max_tokens is not None and max_tokens <= 0:
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        raise RequestError(f"{name} must be at least 1, got {max_tokens}", param=name)
    parsed = parse_sampling(
        native_sampling(raw, max_tokens),
        prompt_len=len(ids),
        limits=service.limits,
        defaults=service.chat_defaults,
        draw_seed=service.draw_seed,
    )

    def scores(prompt: list[int]) -> ScoreOptions:
        return ScoreOptions(NO_SCORES if top is None else len(prompt), top or 0)

    return sequences(origin, [(ids, parsed)], scores)


async def _prompt(service: Service, request: ChatRequest) -> list[int]:
    if request.input_ids is not None:
        return checked_ids(request.input_ids, service, "input_ids")
    options = request.chat_template_kwargs or {}
    continues = bool(request.continue_final_message)
    return await chat_ids(service, Conversation(request.messages, options, continues))


def _top_logprobs(request: ChatRequest) -> int | None:
    """Alternatives to report at each token; None when no log-probabilities are wanted."""
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(
            f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {top}", param="top_logprobs"
        )
    if top and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (top or 0) if request.logprobs else None


class ChatAnswer:
    """Shapes of one chat answer, whole or in chunks."""

    def __init__(
        self,
        service: Service,
        rid: str,
        num_choices: int,
        model: str,
        top: int | None,
        with_cache: bool,
    ) -> None:
        self.usage = UsageCount(num_choices, num_choices, with_cache)
        self._service = service
        self._top = top
        self._id = rid
        self._model = model
        self._created = int(time.time())

    def whole(self, chunks: list[TextChunk]) -> Json:
        for index, chunk in enumerate(chunks):
            self.usage.take(index, chunk.usage)
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(i, chunk) for i, chunk in enumerate(chunks)],
            "usage": self.usage.total(),
        }

    def first(self, index: int) -> Json:
        """The chunk that opens a choice."""
        delta = {"role": "assistant", "content": "", "reasoning_content": None}
        return self._chunk(index, delta)

    def delta(self, index: int, chunk: TextChunk) -> Json:
        body = {"content": chunk.text, "reasoning_content": None}
        return self._chunk(index, body, self._logprobs(chunk))

    def last(self, index: int, chunk: TextChunk) -> Json:
        """The chunk that closes a choice: nothing but why it ended."""
        body = self._chunk(index, {"content": None, "reasoning_content": None})
        choice = body["choices"][0]
        choice["finish_reason"] = finish_reason(chunk.finish)
        choice["matched_stop"] = matched_stop(chunk.finish)
        return body

    def total(self) -> Json:
        return {
            **self._head("chat.completion.chunk"),
            "choices": [],
            "usage": self.usage.total(),
        }

    def _choice(self, index: int, chunk: TextChunk) -> Json:
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": chunk.text,
                "reasoning_content": None,
                "tool_calls": None,
            },
            "logprobs": self._logprobs(chunk),
            "finish_reason": finish_reason(chunk.finish),
            "matched_stop": matched_stop(chunk.finish),
        }

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None) -> Json:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
            "matched_stop": None,
        }
        return {**self._head("chat.completion.chunk"), "choices": [choice], "usage": None}

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _logprobs(self, chunk: TextChunk) -> Json | None:
        if self._top is None:
            return None
        return chat_logprobs(self._service.words(), chunk.output_scores, self._top)


async def _stream(
    exchange: Exchange,
    service: Service,
    request: ChatRequest,
    answer: ChatAnswer,
    asked: list[TextRequest],
) -> None:
    options = request.stream_options
    continuous = bool(options and options.continuous_usage_stats)

    async def send(index: int, body: Json) -> None:
        if continuous:
            body["usage"] = answer.usage.of(index)
        await exchange.event(body)

    opened: set[int] = set()
    async with aclosing(run(service.generator, asked)) as chunks:
        async for index, chunk in chunks:
            if not exchange.streaming:
                await exchange.begin_events()
            answer.usage.take(index, chunk.usage)
            if index not in opened:
                opened.add(index)
                await send(index, answer.first(index))
            if chunk.text or chunk.output_scores:
                await send(index, answer.delta(index, chunk))
            if chunk.finish is not None:
                await send(index, answer.last(index, chunk))
    if options and options.include_usage:
        await exchange.event(answer.total())
    await exchange.end_events()
