"""/v1/embeddings: one vector for each input, as numbers or as base64 of float32."""

import base64

from banyan.base.errors import RequestError
from banyan.frontend.vectors import Vector, prompts_of, shortened, usage_of
from banyan.server.errors import Json
from banyan.server.exchange import Exchange
from banyan.server.openai.fields import check_model, typed
from banyan.server.state import ServerState
from banyan.server.vectors import COMMON, VectorRequest, read_vectors, refuse_fields

_NOTE = "dimensions: cut to the first values; only models trained for it keep their quality"


class EmbeddingRequest(VectorRequest, frozen=True, kw_only=True):
    input: object
    encoding_format: str | None = "float"
    dimensions: int | None = None


async def create_embeddings(exchange: Exchange, state: ServerState) -> None:
    service = state.admit()
    raw = await exchange.json_object()
    known = {*COMMON, "input", "encoding_format", "dimensions"}
    refuse_fields(raw, known, exchange, state.config.server.strict_requests)
    request = typed(raw, EmbeddingRequest)
    form = request.encoding_format or "float"
    if form not in ("float", "base64"):
        raise RequestError(
            f"encoding_format must be float or base64, got {form[:40]!r}.", param="encoding_format"
        )
    strict = state.config.server.strict_requests
    model = check_model(request.model, state.served_name, exchange.warn, strict)
    prompts, _ = prompts_of(request.input, "input")
    found = await read_vectors(exchange, state, service, prompts, request, "embeddings")
    if request.dimensions is not None:
        found = [_cut(v, request.dimensions) for v in found]
        exchange.warn(_NOTE)
    entries: list[Json] = [
        {"object": "embedding", "index": i, "embedding": _shown(vector, form)}
        for i, vector in enumerate(found)
    ]
    await exchange.json(
        {"object": "list", "data": entries, "model": model, "usage": usage_of(found)}
    )


def _cut(vector: Vector, dimensions: int) -> Vector:
    return Vector(shortened(vector.values, dimensions), vector.usage)


def _shown(vector: Vector, form: str) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.values.tobytes()).decode()
    return vector.values.tolist()
