"""The table of routes as an OpenAPI document."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from banyan.base.errors import RequestError
from banyan.server.http import auth
from banyan.server.http.dialect import Dialect
from banyan.server.http.route import WITH_BODY, Route

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
