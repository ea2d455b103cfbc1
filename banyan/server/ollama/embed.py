"""/api/embed and the older /api/embeddings: vectors of texts."""

import time

from banyan.base.errors import RequestError
from banyan.requests.context import RequestContext
from banyan.requests.embeddings import Prompt, prompts_of, shortened
from banyan.requests.request_spec import RequestSpec
from banyan.server.embeddings.sglang import VectorRequest, vector_specs, vectors_of
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.ollama.fields import model_and_adapter_of, reporter, typed_from
from banyan.server.ollama.schema import EmbedRequest
from banyan.server.state import ServerState, Service


async def embed(exchange: HttpExchange, state: ServerState) -> None:
    started_ns = time.monotonic_ns()
    service = state.admit()

    def read(raw: Json) -> tuple[EmbedRequest, str, list[RequestSpec]]:
        request = _typed(raw, exchange.context)
        model, adapter = model_and_adapter_of(request.model, exchange.context, state)
        if request.input == []:
            return request, model, []
        prompts, _ = prompts_of(request.input, "input", service.limits)
        return request, model, _requests(exchange.context, state, service, prompts, adapter)

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
    service = state.admit()

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
