"""The frames and errors of the Anthropic routes: server-sent events that carry their type's name,
and {"type": "error", "error": {"type", "message"}}.

Source: the public reference of the Messages API.
"""

from collections.abc import Mapping

import orjson

from banyan.base.errors import RequestError
from banyan.server.errors import Json
from banyan.server.http.dialect import Dialect

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}

_TOO_LONG = "prompt is too long"
"""Agents look for these words to shorten their history and go on."""


def type_of(status: int) -> str:
    """Name of an error: other refusals are invalid requests, other failures are ours."""
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_body(error: RequestError) -> Json:
    text = str(error)
    if error.code == "context_length_exceeded":
        text = f"{_TOO_LONG}: {text}"
    return _error(error.status, text)


def _error(status: int, text: str) -> Json:
    return {"type": "error", "error": {"type": type_of(status), "message": text}}


def _frame(body: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(body["type"]).encode(), orjson.dumps(body))


ANTHROPIC = Dialect(
    media="text/event-stream",
    frame=_frame,
    end=b"",
    error_body=error_body,
    error_event=error_body,
    unauthorized=_error(
        401, "the key in x-api-key or in Authorization: Bearer is missing or wrong"
    ),
)
