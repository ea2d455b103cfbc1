"""/v1/embeddings, /encode, /classify: vectors of texts; parts that all vector routes share."""

import base64
import time
from collections.abc import Collection, Sequence

import msgspec

from banyan.base.errors import RequestError
from banyan.requests.embeddings import (
    Prompt,
    Vector,
    VectorService,
    prompts_of,
    shortened,
    softmax,
    usage_of,
)
from banyan.requests.request_spec import RequestContext, RequestSpec
from banyan.server.errors import Json
from banyan.server.http.exchange import HttpExchange
from banyan.server.openai.models import model_and_adapters
from banyan.server.openai.schema import typed
from banyan.server.state import ServerState, Service

COMMON = ("model", "lora_path", "rid", "priority", "cache_salt", "extra_key", "user")
"""Fields that every route for vectors honours, and `user`, which changes nothing."""

_MEDIA = ("image_data", "video_data", "audio_data", "embed_overrides")


class VectorRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    lora_path: str | list[str | None] | None = None
    rid: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class EncodeRequest(VectorRequest, frozen=True, kw_only=True):
    text: object = None
    input_ids: object = None
    dimensions: int | None = None


class ClassifyRequest(VectorRequest, frozen=True, kw_only=True):
    input: object


async def encode(exchange: HttpExchange, state: ServerState) -> None:
    """The vector, or the scores of the model's classes, of each prompt."""
    service = state.admit_to_queue(exchange.context.id)
    vectors = vector_service(service, state)

    def read(raw: Json) -> tuple[EncodeRequest, list[RequestSpec], bool]:
        known = {*COMMON, "text", "input_ids", "dimensions", "sampling_params"}
        refuse_fields(raw, known, exchange.context)
        request = typed(raw, EncodeRequest)
        if (request.text is None) == (request.input_ids is None):
            raise RequestError("Exactly one of text and input_ids must be given.", param="text")
        name = "text" if request.input_ids is None else "input_ids"
        value = request.text if request.input_ids is None else request.input_ids
        prompts, is_list = prompts_of(value, name, service.limits, with_pairs=True)
        _, adapters = model_and_adapters_of(exchange.context, state, request, len(prompts))
        specs = vector_specs(exchange.context, state, service, request, prompts, "encode", adapters)
        return request, specs, is_list

    request, requests, is_list = await exchange.request.read(read)
    with state.open.holding(requests, exchange.context.tenant):
        answers = await vectors.answer(requests, request.dimensions)
    await exchange.json(answers if is_list else answers[0])


async def classify(exchange: HttpExchange, state: ServerState) -> None:
    """The likeliest class of each input and the probabilities of all."""
    service = state.admit_to_queue(exchange.context.id)
    labels = labels_of(service)

    def read(raw: Json) -> tuple[str, list[RequestSpec]]:
        refuse_fields(raw, {*COMMON, "input"}, exchange.context)
        request = typed(raw, ClassifyRequest)
        prompts, _ = prompts_of(request.input, "input", service.limits, with_pairs=True)
        model, adapters = model_and_adapters_of(exchange.context, state, request, len(prompts))
        return model, vector_specs(
            exchange.context, state, service, request, prompts, "classify", adapters
        )

    model, requests = await exchange.request.read(read)
    found = await vectors_of(exchange.context, state, service, requests)
    entries: list[Json] = []
    for index, vector in enumerate(found):
        probs = softmax(vector.values)
        label = labels[probs.index(max(probs))]
        entries.append({"index": index, "label": label, "probs": probs, "num_classes": len(labels)})
    await exchange.json(
        {
            "id": exchange.context.id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": entries,
            "usage": usage_of(found),
        }
    )


def labels_of(service: Service) -> tuple[str, ...]:
    """The classes of the model; RequestError 400 when it has none."""
    if not service.model_config.labels:
        raise RequestError(
            f"{service.model_config.architecture} has no head that scores classes",
            code="not_a_classifier",
            hint="Serve a model for sequence classification.",
        )
    return service.model_config.labels


def vector_specs(
    context: RequestContext,
    state: ServerState,
    service: Service,
    request: VectorRequest,
    prompts: Sequence[Prompt],
    route: str,
    adapters: Sequence[str],
) -> list[RequestSpec]:
    """One request for the vector of each prompt."""
    fields = shared_fields(context, request)
    return vector_service(service, state).read(context, fields, prompts, route, adapters)


def shared_fields(context: RequestContext, request: VectorRequest) -> Json:
    """The fields of `build_specs`, with the id of the exchange where the body gives no rid."""
    fields = msgspec.structs.asdict(request)
    return {**fields, "rid": context.id if request.rid is None else request.rid}


def model_and_adapters_of(
    context: RequestContext, state: ServerState, request: VectorRequest, count: int
) -> tuple[str, tuple[str, ...]]:
    """The model name to answer with, and the adapter of each of `count` prompts; "" for none."""
    return model_and_adapters(request.model, state, context, request.lora_path, count)


async def vectors_of(
    context: RequestContext, state: ServerState, service: Service, requests: Sequence[RequestSpec]
) -> list[Vector]:
    """The vector of each request; their ids are taken while they run."""
    with state.open.holding(requests, context.tenant):
        return await vector_service(service, state).vectors(requests)


def vector_service(service: Service, state: ServerState) -> VectorService:
    return VectorService(
        service.generator,
        service.tokenizer,
        service.limits,
        lambda: state.config.model.weight_version,
    )


def refuse_fields(
    raw: Json, known: Collection[str], context: RequestContext, is_strict: bool = False
) -> None:
    """Refuse fields that would change the vectors; report the others that nothing reads."""
    for name, value in raw.items():
        if name in known or value in (None, False, "", [], {}):
            continue
        if name in _MEDIA or name.startswith(("embed_override", "return_pooled")):
            raise RequestError(
                f"{name} is not available in this build", param=name, code="not_available"
            )
        context.warn_or_refuse(name, "not used", is_strict)


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

    request, model, requests = await exchange.request.read(read)
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
