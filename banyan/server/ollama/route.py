"""The routes of Ollama's API: /api/chat and /api/generate over the path of chat, /api/embed.

Answers are sent whole or line by line. A tool call is sent when it is complete.
"""

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import cast

import msgspec
import orjson

from banyan.base.errors import RequestError
from banyan.parsers.answer_deltas import (
    AnswerDelta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from banyan.requests.embeddings import Prompt, prompts_of, shortened
from banyan.requests.generation import TextChunk, run
from banyan.requests.request_spec import RequestContext, RequestSpec
from banyan.server.embeddings import VectorRequest, vector_specs, vectors_of
from banyan.server.errors import Json
from banyan.server.http.dialect import OLLAMA
from banyan.server.http.exchange import HttpExchange, read_prompt
from banyan.server.http.route import Body, Route
from banyan.server.ollama import models
from banyan.server.ollama.translate import (
    FIELD_NAMES,
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    ShowRequest,
    TextRequest,
    chat_body,
    model_and_adapter_of,
    prompt_body,
    raw_body,
    reporter,
    typed_from,
)
from banyan.server.openai.chat_completions import ChatChoice
from banyan.server.openai.chat_plan import ChatPlan, plan_chat
from banyan.server.openai.completions import filled_in
from banyan.server.openai.prompts import text_ids
from banyan.server.openai.schema import ChatRequest as OpenAIChatRequest
from banyan.server.openai.schema import Report, typed, with_names
from banyan.server.openai.shapes import chat_logprobs, why_no_more
from banyan.server.state import Handler, ServerState, Service

_NOTHING: Json = {"role": "assistant", "content": ""}


async def chat(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit_with_weights()
    report = reporter(exchange.context, FIELD_NAMES)

    def read(raw: Json) -> tuple[OllamaChatRequest, _Asked | None]:
        request = typed_from(raw, OllamaChatRequest, report)
        if not request.messages:
            return request, None
        body = chat_body(request, report)
        return request, _asked(exchange.context, state, service, body, report, "chat")

    await _answer(exchange, state, service, read, {"message": _NOTHING})


async def generate(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit_with_weights()
    report = reporter(exchange.context, FIELD_NAMES)

    def read(raw: Json) -> tuple[GenerateRequest, _Asked | None]:
        request = typed_from(raw, GenerateRequest, report)
        if not request.prompt and not request.suffix:
            return request, None
        body = _prompt_body(service, request, report)
        return request, _asked(exchange.context, state, service, body, report, "generate")

    await _answer(exchange, state, service, read, {"response": ""})


@dataclass(frozen=True)
class _Asked:
    """A request as a chat request, and its plan."""

    model: str
    chat: OpenAIChatRequest
    plan: ChatPlan


def _prompt_body(service: Service, request: GenerateRequest, report: Report) -> Json:
    """A prompt is a user's message, unless it is raw, has a suffix, or there is no template."""
    if not (request.raw or request.suffix or service.chat is None):
        return prompt_body(request, report)
    for name in ("system", "images"):
        if getattr(request, name):
            why = "there is no chat template" if service.chat is None else "the prompt is raw"
            raise RequestError(f"{name} cannot be shown to the model: {why}", param=name)
    prompt = request.prompt or ""
    if request.suffix:
        prompt = filled_in(service, prompt, request.suffix)
    (ids,) = text_ids(service, [prompt])
    return raw_body(request, ids, report)


async def _say_loaded(
    exchange: HttpExchange, state: ServerState, request: TextRequest, empty: Json
) -> None:
    """Answer an empty request, with which clients load the model: it is loaded."""
    model, _ = model_and_adapter_of(request.model, exchange.context, state)
    body = {"model": model, "created_at": now(), **empty, "done": True, "done_reason": "load"}
    await exchange.json(body)


def _asked(
    context: RequestContext,
    state: ServerState,
    service: Service,
    body: Json,
    report: Report,
    route: str,
) -> _Asked:
    """The plan of the body of a chat request."""
    chat = typed(body, OpenAIChatRequest)
    model, adapter = model_and_adapter_of(chat.model, context, state)
    plan = plan_chat(context, service, body, chat, route, adapter, report, may_shorten=True)
    return _Asked(model, chat, plan)


async def _answer(
    exchange: HttpExchange,
    state: ServerState,
    service: Service,
    read: Callable[[Json], tuple[TextRequest, _Asked | None]],
    empty: Json,
) -> None:
    """Read the body, run it and answer; `empty` is the answer of an empty request."""
    started_ns = time.monotonic_ns()
    try:
        request, asked = await read_prompt(exchange, read, service.media)
    except RequestError as error:
        raise with_names(error, FIELD_NAMES) from None
    if asked is None:
        await _say_loaded(exchange, state, request, empty)
        return
    chat, plan = asked.chat, asked.plan
    is_chat, with_cache = isinstance(request, OllamaChatRequest), state.config.server.cache_report
    answer = OllamaAnswer(service, plan, asked.model, is_chat, started_ns, with_cache)
    kept = []
    with state.open.holding(plan.asked, exchange.context.tenant):
        async with aclosing(run(service.generator, plan.asked)) as chunks:
            async for _, chunk in chunks:
                answer.arrived()
                if not chat.stream:
                    kept.append(chunk)
                    continue
                if not exchange.streaming:
                    await exchange.begin_events()
                for line in answer.lines(chunk):
                    await exchange.event(line)
        if chat.stream:
            await exchange.end_events()
        else:
            await exchange.json(answer.whole(kept))


async def embed(exchange: HttpExchange, state: ServerState) -> None:
    started_ns = time.monotonic_ns()
    service = state.admit_with_weights()

    def read(raw: Json) -> tuple[EmbedRequest, str, list[RequestSpec]]:
        request = _typed(raw, exchange.context)
        model, adapter = model_and_adapter_of(request.model, exchange.context, state)
        if request.input == []:
            return request, model, []
        prompts, _ = prompts_of(request.input, "input", service.limits)
        asked = service
        if request.truncate is not False:
            asked = replace(service, limits=replace(service.limits, auto_truncate=True))
        specs = _requests(exchange.context, state, asked, prompts, adapter)
        most = service.limits.total
        if asked is not service and any(len(spec.prompt) >= most for spec in specs):
            exchange.context.warn(f"input: texts are cut after {most} tokens")
        return request, model, specs

    request, model, requests = await exchange.request.read(read)
    found = await vectors_of(exchange.context, state, service, requests) if requests else []
    await exchange.json(
        {
            "model": model,
            "embeddings": [
                shortened(vector.values, request.dimensions).tolist() for vector in found
            ],
            "total_duration": time.monotonic_ns() - started_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(vector.usage.prompt_tokens for vector in found),
        }
    )


async def embed_prompt(exchange: HttpExchange, state: ServerState) -> None:
    """The form of before `input`: one text, one vector."""
    service = state.admit_with_weights()

    def read(raw: Json) -> list[RequestSpec]:
        request = _typed(raw, exchange.context)
        _, adapter = model_and_adapter_of(request.model, exchange.context, state)
        if not request.prompt:
            raise RequestError("prompt must be a text", param="prompt")
        return _requests(exchange.context, state, service, [request.prompt], adapter)

    (vector,) = await vectors_of(
        exchange.context, state, service, await exchange.request.read(read)
    )
    await exchange.json({"embedding": vector.values.tolist()})


def _typed(raw: Json, context: RequestContext) -> EmbedRequest:
    report = reporter(context)
    request = typed_from(raw, EmbedRequest, report)
    for name in request.options or {}:
        report(f"options.{name}", "not used for vectors")
    return request


def _requests(
    context: RequestContext,
    state: ServerState,
    service: Service,
    prompts: list[Prompt],
    adapter: str,
) -> list[RequestSpec]:
    if not service.limits.is_embedding:
        raise RequestError(
            "this model is served for text; it makes no vectors",
            status=501,
            code="not_available",
            hint="Start a server with --is-embedding",
        )
    adapters = [adapter] * len(prompts)
    return vector_specs(context, state, service, VectorRequest(), prompts, "embed", adapters)


_POST = ("POST",)

_POST_ROUTES: tuple[tuple[str, Handler, str, type[msgspec.Struct]], ...] = (
    ("/api/chat", chat, "Chat", OllamaChatRequest),
    ("/api/generate", generate, "Generate a completion", GenerateRequest),
    ("/api/embed", embed, "Create embeddings", EmbedRequest),
    ("/api/embeddings", embed_prompt, "Create one embedding (older form)", EmbedRequest),
    ("/api/show", models.show, "Model information", ShowRequest),
)
_GET_ROUTES: tuple[tuple[str, Handler, str], ...] = (
    ("/api/tags", models.tags, "List models"),
    ("/api/ps", models.running, "List loaded models"),
    ("/api/version", models.version, "API version"),
)
_UNAVAILABLE: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((f"/api/{verb}", _POST) for verb in ("pull", "push", "create", "copy")),
    ("/api/delete", ("DELETE",)),
)


def ollama_routes() -> list[Route]:
    return [
        *(
            Route(path, _POST, handler, dialect=OLLAMA, about=about, body=Body(kind))
            for path, handler, about, kind in _POST_ROUTES
        ),
        *(
            Route(path, ("GET",), handler, dialect=OLLAMA, about=about)
            for path, handler, about in _GET_ROUTES
        ),
        *(
            Route(
                path,
                methods,
                models.no_library,
                dialect=OLLAMA,
                about=models.NO_LIBRARY,
                is_available=False,
            )
            for path, methods in _UNAVAILABLE
        ),
    ]


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer:
    """The bodies of one request's answer.

    Args:
        is_chat: the text is in `message`, otherwise in `response`.
        started_ns: when the request came, by time.monotonic_ns.
        with_cache: report cached prompt tokens, and why there were no more (--enable-cache-report).
    """

    def __init__(
        self,
        service: Service,
        plan: ChatPlan,
        model: str,
        is_chat: bool,
        started_ns: int,
        with_cache: bool,
    ) -> None:
        self._with_cache = with_cache
        self._service = service
        self._choice = ChatChoice(plan)
        self._top = plan.top
        self._model = model
        self._is_chat = is_chat
        self._started_ns = started_ns
        self._planned_ns = time.monotonic_ns()
        self._first_ns = 0
        self._calls: list[tuple[ToolCallStart, list[str]]] = []
        """Calls that were not sent yet; the last may be incomplete."""

    def whole(self, chunks: list[TextChunk]) -> Json:
        """The whole answer of all chunks."""
        parts = [part for chunk in chunks for part in self._choice.read(chunk)]
        body = self._body(parts, is_last=True)
        scores = [score for chunk in chunks for score in chunk.output_scores]
        if self._top is not None:
            body["logprobs"] = chat_logprobs(self._service.required_tokenizer(), scores, self._top)[
                "content"
            ]
        return {**body, **self._end(chunks[-1])}

    def arrived(self) -> None:
        """Count a chunk; the first ends the evaluation of the prompt."""
        self._first_ns = self._first_ns or time.monotonic_ns()

    def lines(self, chunk: TextChunk) -> list[Json]:
        """The lines of one chunk; the last line of the answer has no text."""
        is_last = chunk.finish is not None
        parts = self._choice.read(chunk)
        body = self._body(parts, is_last)
        has_scores = self._top is not None and bool(chunk.output_scores)
        if has_scores:
            scores = chat_logprobs(
                self._service.required_tokenizer(), chunk.output_scores, self._top or 0
            )
            body["logprobs"] = scores["content"]
        found = [{**body, "done": False}] if has_scores or self._has_content(body) else []
        return [*found, {**self._body([], False), **self._end(chunk)}] if is_last else found

    def _has_content(self, body: Json) -> bool:
        inner = cast(Json, body["message"]) if self._is_chat else body
        return any(inner.get(key) for key in ("content", "response", "thinking", "tool_calls"))

    def _body(self, parts: list[AnswerDelta], is_last: bool) -> Json:
        said = "".join(p.text for p in parts if isinstance(p, TextDelta))
        thought = "".join(p.text for p in parts if isinstance(p, ReasoningDelta))
        inner: Json = {"content" if self._is_chat else "response": said}
        if thought:
            inner["thinking"] = thought
        if calls := self._complete(parts, is_last):
            inner["tool_calls"] = calls
        head: Json = {"model": self._model, "created_at": now()}
        if not self._is_chat:
            return {**head, **inner}
        return {**head, "message": {"role": "assistant", **inner}}

    def _complete(self, parts: list[AnswerDelta], is_last: bool) -> list[Json]:
        """Calls that these parts complete. A call that was cut off is dropped."""
        for part in parts:
            if isinstance(part, ToolCallStart):
                self._calls.append((part, []))
            elif isinstance(part, ToolCallArguments):
                self._calls[-1][1].append(part.text)
        num_done = len(self._calls) if is_last else max(0, len(self._calls) - 1)
        done, self._calls = self._calls[:num_done], self._calls[num_done:]
        found = []
        for index, (start, texts) in enumerate(done):
            arguments = _arguments("".join(texts))
            if arguments is not None:
                function = {"index": index, "name": start.name, "arguments": arguments}
                found.append({"id": self._choice.call_id(start.id), "function": function})
        return found

    def _end(self, chunk: TextChunk) -> Json:
        """Fields of the last line: reason of the end, counts, durations in nanoseconds."""
        end_ns = time.monotonic_ns()
        first_ns = self._first_ns or end_ns
        usage = chunk.usage
        cached: Json = {"cached_tokens": usage.cached_tokens, **why_no_more(usage)}
        return {
            "done": True,
            "done_reason": chunk.finish.reason if chunk.finish else None,
            "total_duration": end_ns - self._started_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first_ns - self._planned_ns,
            "eval_count": usage.output_tokens,
            "eval_duration": end_ns - first_ns,
            **(cached if self._with_cache else {}),
        }


def _arguments(text: str) -> Json | None:
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
