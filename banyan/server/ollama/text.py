"""/api/chat and /api/generate over the path of chat."""

import time
from contextlib import aclosing

from banyan.base.errors import RequestError
from banyan.frontend.generation import run
from banyan.server.errors import Json
from banyan.server.exchange import Exchange
from banyan.server.ollama.answer import OllamaAnswer, now
from banyan.server.ollama.fields import model_of, read, reporter
from banyan.server.ollama.schema import ChatRequest, GenerateRequest, TextRequest
from banyan.server.ollama.translate import WORDS, chat_body, prompt_body, raw_body
from banyan.server.openai.chat_plan import plan_chat
from banyan.server.openai.completions import filled_in
from banyan.server.openai.fields import Report, in_words, origin_of, typed
from banyan.server.openai.schema import ChatRequest as OpenAIChatRequest
from banyan.server.prompts import text_ids
from banyan.server.state import ServerState, Service

_NOTHING: Json = {"role": "assistant", "content": ""}


async def chat(exchange: Exchange, state: ServerState) -> None:
    service = state.admit()
    report = reporter(exchange, state, WORDS)
    request = await read(exchange, ChatRequest, report)
    if not request.messages:
        await _say_loaded(exchange, state, request, {"message": _NOTHING})
        return
    try:
        body = chat_body(request, report)
        await _answer(exchange, state, service, request, body, report)
    except RequestError as error:
        raise in_words(error, WORDS) from None


async def generate(exchange: Exchange, state: ServerState) -> None:
    service = state.admit()
    report = reporter(exchange, state, WORDS)
    request = await read(exchange, GenerateRequest, report)
    if not request.prompt and not request.suffix:
        await _say_loaded(exchange, state, request, {"response": ""})
        return
    try:
        body = await _prompt_body(service, request, report)
        await _answer(exchange, state, service, request, body, report)
    except RequestError as error:
        raise in_words(error, WORDS) from None


async def _prompt_body(service: Service, request: GenerateRequest, report: Report) -> Json:
    """A prompt is a user's message, unless it is raw, has a suffix, or there is no template."""
    if not (request.raw or request.suffix or service.chat is None):
        return prompt_body(request, report)
    if request.system:
        why = "there is no chat template" if service.chat is None else "the prompt is raw"
        raise RequestError(f"system cannot be shown to the model: {why}", param="system")
    prompt = request.prompt or ""
    if request.suffix:
        prompt = filled_in(service, prompt, request.suffix)
    return raw_body(request, await text_ids(service, prompt), report)


async def _say_loaded(
    exchange: Exchange, state: ServerState, request: TextRequest, empty: Json
) -> None:
    """Nothing to answer: clients ask so to have the model loaded, and it is."""
    model = model_of(request.model, exchange, state)
    body = {"model": model, "created_at": now(), **empty, "done": True, "done_reason": "load"}
    await exchange.json(body)


async def _answer(
    exchange: Exchange,
    state: ServerState,
    service: Service,
    request: TextRequest,
    body: Json,
    report: Report,
) -> None:
    started_ns = time.monotonic_ns()
    is_chat = isinstance(request, ChatRequest)
    model = model_of(request.model, exchange, state)
    chat = typed(body, OpenAIChatRequest)
    origin = origin_of(exchange, chat, "chat" if is_chat else "generate")
    plan = await plan_chat(service, body, chat, origin, report, may_shorten=True)
    answer = OllamaAnswer(service, plan, model, is_chat, started_ns)
    kept = []
    with state.open.holding(plan.asked, exchange.tenant):
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
