"""/api/embed and the older /api/embeddings: vectors of texts."""

import time

from banyan.base.errors import RequestError
from banyan.frontend.vectors import Prompt, Vector, prompts_of, shortened
from banyan.server.exchange import Exchange
from banyan.server.ollama.fields import model_of, read, reporter
from banyan.server.ollama.schema import EmbedRequest
from banyan.server.state import ServerState
from banyan.server.vectors import VectorRequest, read_vectors


async def embed(exchange: Exchange, state: ServerState) -> None:
    started_ns = time.monotonic_ns()
    request = await _read(exchange, state)
    model = model_of(request.model, exchange, state)
    prompts: list[Prompt] = []
    if request.input != []:
        prompts, _ = prompts_of(request.input, "input")
    found = await _vectors(exchange, state, prompts) if prompts else []
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


async def embed_prompt(exchange: Exchange, state: ServerState) -> None:
    """The form of before `input`: one text, one vector."""
    request = await _read(exchange, state)
    model_of(request.model, exchange, state)
    if not request.prompt:
        raise RequestError("prompt must be a text", param="prompt")
    (vector,) = await _vectors(exchange, state, [request.prompt])
    await exchange.json({"embedding": vector.values.tolist()})


async def _read(exchange: Exchange, state: ServerState) -> EmbedRequest:
    report = reporter(exchange, state)
    request = await read(exchange, EmbedRequest, report)
    for name in request.options or {}:
        report(f"options.{name}", "not used for vectors")
    return request


async def _vectors(exchange: Exchange, state: ServerState, prompts: list[Prompt]) -> list[Vector]:
    service = state.admit()
    if not service.limits.is_embedding:
        raise RequestError(
            "this model is served for text; it makes no vectors",
            status=501,
            code="not_available",
            hint="Start a server with --is-embedding",
        )
    return await read_vectors(exchange, state, service, prompts, VectorRequest(), "embed")
