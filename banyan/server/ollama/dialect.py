"""The frames and errors of the Ollama routes: one JSON object a line, and {"error": text}."""

import orjson

from banyan.base.errors import RequestError
from banyan.server.errors import Json
from banyan.server.http.dialect import Dialect


def error_body(error: RequestError) -> Json:
    return {"error": str(error)}


def _frame(body: Json) -> bytes:
    return orjson.dumps(body) + b"\n"


OLLAMA = Dialect(
    media="application/x-ndjson",
    frame=_frame,
    end=b"",
    error_body=error_body,
    error_event=error_body,
    unauthorized={"error": "unauthorized"},
)
