"""/v1/embeddings: one vector for each input, as numbers or as base64 of float32."""

import base64

from banyan.base.errors import RequestError
from banyan.requests.embeddings import Vector, prompts_of, shortened, usage_of
from banyan.requests.request_spec import RequestSpec
from banyan.server.embeddings.sglang import (
    COMMON,
    VectorRequest,
    model_and_adapters_of,
    refuse_fields,
    vector_specs,
    vectors_of,
)
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState

_FIELDS = frozenset((*COMMON, "input", "encoding_format", "dimensions"))
_NOTE = "dimensions: cut to the first values; only models trained for it keep their quality"


class EmbeddingRequest(VectorRequest, frozen=True, kw_only=True):
    input: object
    encoding_format: str | None = "float"
    dimensions: int | None = None


async def create_embeddings(exchange: HttpExchange, state: ServerState) -> None:
    service = state.admit_to_queue(exchange.context.id)

    def read(raw: Json) -> tuple[EmbeddingRequest, str, list[RequestSpec]]:
        refuse_fields(raw, _FIELDS, exchange.context)
        request = typed(raw, EmbeddingRequest)
        form = request.encoding_format or "float"
        if form not in ("float", "base64"):
            raise RequestError(
                f"encoding_format must be float or base64, got {form[:40]!r}.",
                param="encoding_format",
            )
        prompts, _ = prompts_of(request.input, "input", service.limits)
        model, adapters = model_and_adapters_of(exchange.context, state, request, len(prompts))
        specs = vector_specs(
            exchange.context, state, service, request, prompts, "embeddings", adapters
        )
        return request, model, specs

    request, model, requests = await exchange.read(read)
    found = await vectors_of(exchange.context, state, service, requests)
    if request.dimensions is not None:
        found = [_cut(v, request.dimensions) for v in found]
        exchange.context.warn(_NOTE)
    entries: list[Json] = [
        {"object": "embedding", "index": i, "embedding": _shown(vector, request.encoding_format)}
        for i, vector in enumerate(found)
    ]
    await exchange.json(
        {"object": "list", "data": entries, "model": model, "usage": usage_of(found)}
    )


def _cut(vector: Vector, dimensions: int) -> Vector:
    return Vector(shortened(vector.values, dimensions), vector.usage)


def _shown(vector: Vector, form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.values.tobytes()).decode()
    return vector.values.tolist()
