"""The routes as an OpenAPI document, with types for bodies that no struct describes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from banyan.base.errors import RequestError
from banyan.requests.constraint import FIELDS as CONSTRAINTS
from banyan.requests.sampling_params import BREAKERS, FILTERS
from banyan.server.http import auth
from banyan.server.http.dialect import Dialect
from banyan.server.http.route import WITH_BODY, Body, Route
from banyan.server.openai.schema import SAMPLING, ChatRequest, CompletionRequest

Document = dict[str, Any]
"""The OpenAPI document or a part of it."""

_REF = "#/components/schemas/{name}"
_KEY = "key"
ANYTHING = ("string", "number", "boolean", "object", "array", "null")
Bodies = Mapping[type[msgspec.Struct], tuple[Document, Document]]
"""Request struct -> (reference to its schema, schema)."""
_NAMES = re.compile(r"\{(\w+)\}")


def openapi(routes: Sequence[Route], version: str, root_path: str = "") -> Document:
    """OpenAPI 3.1 of every path and method of the table.

    Args:
        root_path: prefix that a reverse proxy strips.
    """
    kinds = list(dict.fromkeys(r.body.kind for r in routes if r.body is not None))
    found, components = msgspec.json.schema_components(
        kinds, schema_hook=_anything, ref_template=_REF
    )
    bodies = {
        kind: (reference, components[reference["$ref"].rpartition("/")[2]])
        for kind, reference in zip(kinds, found, strict=True)
    }
    refusals = dict.fromkeys(route.dialect for route in routes)
    named = {dialect: f"Refusal{i or ''}" for i, dialect in enumerate(refusals)}
    paths: dict[str, Document] = {}
    for route in routes:
        for path, methods in route.places().items():
            paths[path] = {
                method.lower(): _operation(route, path, method, bodies)
                | {"responses": _responses(route, method, named[route.dialect])}
                for method in methods
            }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Banyan", "version": version, "description": _ABOUT},
        "servers": [{"url": root_path or "/"}],
        "security": [{}, {_KEY: []}],
        "tags": [{"name": name} for name in dict.fromkeys(route.group for route in routes)],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {name: _refusal(dialect) for dialect, name in named.items()},
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


_ABOUT = (
    "API of a Banyan server. If the server was started with an API key, send it as a bearer token. "
    "Unknown fields are rejected, or reported in the response header x-banyan-warnings."
)


def _anything(kind: type) -> Document:
    assert kind is object, f"no schema says what {kind} is"
    return {"type": list(ANYTHING)}


def _operation(route: Route, path: str, method: str, bodies: Bodies) -> Document:
    word = re.sub(r"\W+", "_", path).strip("_") or "root"
    operation: Document = {
        "operationId": f"{method.lower()}_{word}",
        "summary": route.about,
        "tags": [route.group],
    }
    if route.guard == auth.OPEN:
        operation["security"] = []
    parameters: list[Document] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _NAMES.findall(path)
    ]
    body = route.body
    if body is not None and method in WITH_BODY:
        content = {body.media: {"schema": bodies[body.kind][0]}}
        operation["requestBody"] = {"content": content, "required": not body.is_query}
    elif body is not None and body.is_query:
        parameters += _query(bodies[body.kind][1])
    if parameters:
        operation["parameters"] = parameters
    return operation


def _query(schema: Document) -> list[Document]:
    """Query parameters for the fields of a body."""
    needed = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in needed, "schema": one}
        for name, one in schema["properties"].items()
    ]


def _responses(route: Route, method: str, refusal: str) -> Document:
    refused = {"$ref": f"#/components/responses/{refusal}"}
    if not route.is_available:
        return {"501": refused}
    answer: Document = {"description": "Success."}
    fields = route.body.kind.__struct_fields__ if route.body and method in WITH_BODY else ()
    if "stream" in fields:
        answer["content"] = {"application/json": {}, route.dialect.media: {}}
    return {"200": answer, "default": refused}


def _refusal(dialect: Dialect) -> Document:
    """The error response of a dialect, with an example."""
    sample = RequestError("temperature must be a finite number, got 'hot'.", param="temperature")
    content = {"application/json": {"example": dialect.error_body(sample)}}
    return {"description": "The request was refused.", "content": content}


_TEXTS = str | list[str] | None
_SCHEMA = bool | str | dict[str, object] | None
_OBJECT = str | dict[str, object] | None

SAMPLING_TYPES: Mapping[str, object] = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "n", "top_k"), int | None),
    **dict.fromkeys(("sampling_seed", "stream_interval"), int | None),
    **dict.fromkeys(("temperature", "top_p", "min_p"), float | None),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), float | None),
    "repetition_penalty": float | None,
    "stop": _TEXTS,
    "stop_regex": _TEXTS,
    "stop_token_ids": list[int] | None,
    **dict.fromkeys(("ignore_eos", "no_stop_trim", "skip_special_tokens"), bool | None),
    "spaces_between_special_tokens": bool | None,
    "logit_bias": dict[str, float] | None,
    "custom_logit_processor": str | None,
    "custom_params": dict[str, object] | None,
    **{name: int | None if rule.is_whole else float | None for name, rule in FILTERS.items()},
    BREAKERS: list[str] | None,
    "json_schema": _SCHEMA,
    "regex": str | None,
    "ebnf": str | None,
    "structural_tag": _OBJECT,
}
"""Field of `sampling_params` -> its type."""

CONSTRAINT_TYPES: Mapping[str, object] = {
    "response_format": dict[str, object] | None,
    "guided_json": _SCHEMA,
    "guided_regex": str | None,
    "guided_choice": list[str] | None,
    "guided_grammar": str | None,
    "guided_json_object": bool | None,
    "structured_outputs": dict[str, object] | None,
    "grammar": str | None,
}
"""Constraint field of the OpenAI routes that /generate does not have -> its type."""

NATIVE_TYPES: Mapping[str, object] = {
    "text": _TEXTS,
    "input_ids": list[int | list[int]] | None,
    **dict.fromkeys(("input_embeds", "image_data", "audio_data"), object),
    "sampling_params": object,
    **dict.fromkeys(("rid", "extra_key", "cache_salt"), _TEXTS),
    **dict.fromkeys(("stream", "return_text_in_logprobs", "return_prompt_token_ids"), bool | None),
    "return_logprob": bool | list[bool] | None,
    **dict.fromkeys(("logprob_start_len", "top_logprobs_num"), int | list[int] | None),
    "token_ids_logprob": object,
    "priority": int | None,
    "return_hidden_states": object,
    "return_routed_experts": bool | None,
    "routed_experts_start_len": int | None,
    "custom_logit_processor": object,
    "session_params": dict[str, object] | None,
    "lora_path": _TEXTS,
    "bootstrap_host": _TEXTS,
    **dict.fromkeys(("bootstrap_port", "bootstrap_room"), int | list[int] | None),
    **dict.fromkeys(("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"), int | None),
}
"""Field of /generate -> its type."""


def _struct(
    name: str, types: Mapping[str, object], *bases: type[msgspec.Struct]
) -> type[msgspec.Struct]:
    """A struct with the fields of `bases` and `types`; the latter are optional."""
    fields = [(field, type_, None) for field, type_ in types.items()]
    return msgspec.defstruct(name, fields, bases=bases or None, kw_only=True, module=__name__)


SamplingParams = _struct("SamplingParams", SAMPLING_TYPES)
_SAMPLED = {field: SAMPLING_TYPES[native] for field, native in SAMPLING.items()}
_SAMPLED |= {field: {**SAMPLING_TYPES, **CONSTRAINT_TYPES}[field] for field in CONSTRAINTS}

CHAT = Body(_struct("ChatCompletionRequest", _SAMPLED, ChatRequest))
COMPLETION = Body(_struct("TextCompletionRequest", _SAMPLED, CompletionRequest))
GENERATE = Body(
    _struct("NativeGeneration", {**NATIVE_TYPES, "sampling_params": SamplingParams | None})
)


class VertexRequest(msgspec.Struct, kw_only=True):
    instances: list[dict[str, object]]
    parameters: dict[str, object] | None = None


class UploadForm(msgspec.Struct, kw_only=True):
    """A batch input file: JSON lines, with purpose "batch"."""

    file: str
    purpose: str


class FlushRequest(msgspec.Struct, kw_only=True):
    timeout: float = 0.0
    """Seconds to wait for running requests."""
    pinned: bool = False
    """Flush pinned prompts too."""


VERTEX = Body(VertexRequest)


class SpeechForm(msgspec.Struct, kw_only=True):
    """A file of speech."""

    file: str
    model: str = ""
    language: str = ""
    prompt: str = ""
    response_format: str = "json"
    temperature: float = 0.0
    stream: bool = False
    timestamp_granularities: list[str] = []


SPEECH = Body(SpeechForm, media="multipart/form-data")
UPLOAD = Body(UploadForm, media="multipart/form-data")
FLUSH = Body(FlushRequest, is_query=True)
